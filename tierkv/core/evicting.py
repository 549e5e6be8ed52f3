"""Evicting by an operator's word: down to a size, in the order in force; and what that would take, without doing it.

An eviction makes others possible: what hung on the evicted is what held its parent. A preview therefore takes victims
out of the order, offers what would have become free, and puts everything back as it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Branch, Extent
from tierkv.core.host_room import parts_in_host
from tierkv.core.ledger import Ledger
from tierkv.core.left import stay_of_segment
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.tier_leaving import parts_of_file
from tierkv.core.tier_room import EVICTIONS_AT_A_TIME
from tierkv.core.value.cost import prefill_seconds
from tierkv.core.value.order import EvictionOrder, Rank

MAX_VICTIMS = 1_000
"""Victims of a preview: nobody is kept waiting for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """Blocks of one extent that go. All of them are still in tier `to`, or they are "dropped". `seconds` is what
    computing them again costs; 0.0 where they stay in another tier."""

    group: bytes
    key: bytes
    first_token: int
    to: str
    blocks: int
    tokens: int
    num_bytes: int
    created: float
    last_used: float
    hits: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class EvictState:
    """`used_bytes` are left in the tier; the rest is what has gone, or would. `reason`: why no more goes, though more
    is used than was wished. `is_cut`: a preview that ends before that. `victims` are listed by previews."""

    used_bytes: int
    evictions: int = 0
    blocks: int = 0
    tokens: int = 0
    num_bytes: int = 0
    lost_tokens: int = 0
    lost_seconds: float = 0.0
    finished: bool = False
    is_cut: bool = False
    reason: Reason | None = None
    victims: list[Victim] = field(default_factory=list)

    def add(self, victims: list[Victim]) -> None:
        """What goes of one extent at one time. Each part is an eviction of its own, as it is in the journal."""
        self.evictions += len(victims)
        for victim in victims:
            self.blocks += victim.blocks
            self.tokens += victim.tokens
            self.num_bytes += victim.num_bytes
            if victim.to == "dropped":
                self.lost_tokens += victim.tokens
                self.lost_seconds += victim.seconds


def used_bytes(ledger: Ledger, cascade: Cascade, tier: str) -> int:
    """Files on their way out, to the disk tier too, are gone already."""
    if tier != "host":
        files = cascade.files_of(tier)
        return files.used_bytes - files.going_bytes
    return sum(group.host_slots * group.slot_bytes for group in ledger.groups.values())


def evict(ledger: Ledger, cascade: Cascade, tier: str, to_bytes: int, fingerprint: str, now: float) -> EvictState:
    """Evict a slice, of a model whose fingerprint begins so. Ask again until it is finished."""
    state = EvictState(used_bytes=used_bytes(ledger, cascade, tier))
    there = _There(ledger, cascade, now)
    source = _source(there, cascade, tier, fingerprint, now)
    while state.used_bytes > to_bytes and state.evictions < EVICTIONS_AT_A_TIME:
        extent = source.take()
        if extent is None:
            state.reason = _why_no_more(cascade, tier)
            break
        concerned = list(_with_parent(extent))  # when it has left the tree, nobody knows what it hung on
        if tier == "host":
            remaining = there.remaining(extent, state.used_bytes - to_bytes)
            state.add(there.victims_in_host(extent, remaining))
            cascade.leave_host(extent, remaining, now, Reason.OPERATOR)
        else:
            state.add(there.victims_in_files(extent, tier))
            cascade.send_off(extent, tier, now, Reason.OPERATOR)
        source.freed(concerned)
        state.used_bytes = used_bytes(ledger, cascade, tier)
    for extent in source.skipped:
        ledger.reconsider(extent)
    state.finished = state.used_bytes <= to_bytes or state.reason is not None
    return state


def preview(ledger: Ledger, cascade: Cascade, tier: str, to_bytes: int, fingerprint: str, now: float) -> EvictState:
    """What `evict` would do, all of its slices together; nearly, where shares are set (whose turn it is, is reckoned
    with what is used now) or the order learns from each victim (gdsf). Changes nothing but which of two equal ones is
    first."""
    state = EvictState(used_bytes=used_bytes(ledger, cascade, tier), finished=True)
    ahead = _Ahead(ledger, cascade, now)
    source = _source(ahead, cascade, tier, fingerprint, now)
    try:
        while state.used_bytes > to_bytes:
            if len(state.victims) >= MAX_VICTIMS:
                state.is_cut = True
                break
            extent = source.take()
            if extent is None:
                state.reason = _why_no_more(cascade, tier)
                break
            victims = ahead.go(extent, tier, state.used_bytes - to_bytes)
            state.add(victims)
            state.victims += victims
            state.used_bytes -= sum(victim.num_bytes for victim in victims)
            source.freed(list(_with_parent(extent)))
    finally:
        for extent in ahead.touched:
            ledger.reconsider(extent)
    return state


def _why_no_more(cascade: Cascade, tier: str) -> Reason:
    return Reason.NO_ROOM if tier == "host" or cascade.files_of(tier).can_remove else Reason.READ_ONLY


# ---- what is there, and what would be


class _There:
    """The books as they are."""

    def __init__(self, ledger: Ledger, cascade: Cascade, now: float) -> None:
        self.ledger = ledger
        self._eviction = cascade.nvme_eviction
        self._now = now

    def host_blocks(self, extent: Extent) -> int:
        """In some rank."""
        return extent.longest_host_blocks

    def host_floor(self, extent: Extent) -> int | None:
        return self.ledger.host_floor(extent)

    def may_leave(self, extent: Extent, tier: str) -> bool:
        if tier == "disk":
            return self.ledger.may_leave_disk(extent)
        return self._eviction.may_go_now(extent, self._now)

    def goes_to_disk(self, extent: Extent) -> bool:
        """When it leaves NVMe."""
        if not self.ledger.has_disk:
            return False
        return extent.disk is FileState.PRESENT or self._eviction.why_no_demotion(extent, self._now) is None

    def take(self, order: EvictionOrder, now: float) -> Extent | None:
        return order.pop(now)

    def offer(self, order: EvictionOrder, extent: Extent, index: int) -> None:
        pass  # the cascade has seen to it

    def remaining(self, extent: Extent, surplus: int) -> int:
        """How many blocks stay: as many as can, and at most one segment of use goes."""
        longest, floor = self.host_blocks(extent), self.host_floor(extent)
        floor = longest if floor is None else stay_of_segment(extent, floor, longest)
        group = self.ledger.group_of(extent)
        return max(floor, longest - -(-surplus // (group.slot_bytes * group.ranks)))

    def victims_in_host(self, extent: Extent, remaining: int) -> list[Victim]:
        """Two where only the first blocks are on devices as well."""
        longest, slot_bytes = self.host_blocks(extent), self.ledger.group_of(extent).slot_bytes
        victims = []
        for first, end, to in parts_in_host(self.ledger, extent, remaining, longest):
            gone = sum(max(0, min(len(slots), end) - first) for slots in extent.slots)
            victims.append(self._victim(extent, first, end - first, gone * slot_bytes, to))
        return victims

    def victims_in_files(self, extent: Extent, tier: str) -> list[Victim]:
        """Two where only the first blocks are in host memory as well."""
        if tier == "nvme" and self.goes_to_disk(extent):
            return [self._victim(extent, 0, extent.num_blocks, extent.nvme_bytes, "disk")]
        return [
            self._victim(extent, first, end - first, num_bytes, to)
            for first, end, num_bytes, to in parts_of_file(extent, tier, self.ledger.devices.memory_blocks(extent))
        ]

    def _victim(self, extent: Extent, first: int, blocks: int, num_bytes: int, to: str) -> Victim:
        ledger = self.ledger
        group = ledger.group_of(extent)
        first_token, tokens = extent.first_token + first * group.block_tokens, blocks * group.block_tokens
        return Victim(
            group=extent.group,
            key=extent.block_key(first),
            first_token=first_token,
            to=to,
            blocks=blocks,
            tokens=tokens,
            num_bytes=num_bytes,
            created=extent.created,
            last_used=extent.used_at(first),
            hits=extent.hits_at(first),
            seconds=prefill_seconds(tokens, first_token, ledger.prefill_rate(group)) if to == "dropped" else 0.0,
        )


class _Ahead(_There):
    """As they would be when what was taken had gone."""

    def __init__(self, ledger: Ledger, cascade: Cascade, now: float) -> None:
        super().__init__(ledger, cascade, now)
        self.touched: dict[Extent, None] = {}
        self._remaining: dict[Extent, int] = {}
        self._off: set[tuple[Extent, str]] = set()  # and the tier that it has left
        self._gone: set[Extent] = set()  # from the tree

    def host_blocks(self, extent: Extent) -> int:
        return self._remaining.get(extent, extent.longest_host_blocks)

    def has_host_kids(self, branch: Branch) -> bool:
        return any(map(self.host_blocks, self.kids(branch)))

    def kids(self, branch: Branch) -> list[Extent]:
        return [kid for kid in branch.kids if kid not in self._gone]

    def host_floor(self, extent: Extent) -> int | None:
        return None if extent in self._gone else self.ledger.host_floor(extent, self)

    def may_leave(self, extent: Extent, tier: str) -> bool:
        """As the ledger has it, for what would be left."""
        kids = [kid for branch in extent.branch_points for kid in self.kids(branch)]
        if (extent, tier) in self._off or any(self._has_file(kid, tier) for kid in kids):
            return False
        if tier == "nvme":
            return self.ledger.may_file_go(extent) and (not kids or self.goes_to_disk(extent))
        if extent.disk is not FileState.PRESENT or extent.holds or extent.reading:
            return False
        in_memory = self.ledger.devices.memory_blocks(extent)
        is_elsewhere = extent.nvme is FileState.PRESENT or in_memory == extent.num_blocks
        return (is_elsewhere or not kids) and not self.ledger.pins.keeps_disk_file(extent)

    def _has_file(self, extent: Extent, tier: str) -> bool:
        state = extent.nvme if tier == "nvme" else extent.disk
        return state is FileState.PRESENT and (extent, tier) not in self._off

    def take(self, order: EvictionOrder, now: float) -> Extent | None:
        """Not by `pop`, which orders learn from."""
        extent = order.next_victim(now)
        if extent is not None:
            self.touched[extent] = None
            order.withdraw(extent)
        return extent

    def offer(self, order: EvictionOrder, extent: Extent, index: int) -> None:
        self.touched[extent] = None
        order.offer(extent, index)

    def go(self, extent: Extent, tier: str, surplus: int) -> list[Victim]:
        self.touched[extent] = None
        if tier != "host":
            victims = self.victims_in_files(extent, tier)
            self._off.add((extent, tier))
            if not self.ledger.devices.memory_blocks(extent) and victims[0].to == "dropped":
                self._gone.add(extent)
            return victims
        remaining = self.remaining(extent, surplus)
        victims = self.victims_in_host(extent, remaining)
        self._remaining[extent] = remaining
        if victims[-1].to == "dropped" and not remaining:
            self._gone.add(extent)
        return victims


# ---- in which order


class _Source:
    """Victims from the orders in force: of several the one that names the cheapest."""

    def __init__(self, there: _There, tier: str, now: float, orders: list[EvictionOrder]) -> None:
        self._there = there
        self._tier = tier
        self._now = now
        self._orders = orders
        self.skipped: list[Extent] = []
        """Taken from their order, and not to go just now."""

    def take(self) -> Extent | None:
        while True:
            ranked = [
                (rank, number)
                for number, order in enumerate(self._orders)
                if (rank := order.cheapest(self._now)) is not None
            ]
            if not ranked:
                return None
            extent = self._there.take(self._orders[min(ranked)[1]], self._now)
            if extent is not None and _index(self._there, self._tier, extent) is not None:
                return extent
            if extent is not None:
                self.skipped.append(extent)

    def freed(self, extents: list[Extent]) -> None:
        """A victim and what it hung on: it has lost what it was to lose, so it may lose more, or the other may."""
        for one in extents:
            index = _index(self._there, self._tier, one)
            if index is not None:
                self._there.offer(self._order_of(one), one, index)

    def _order_of(self, extent: Extent) -> EvictionOrder:
        ledger = self._there.ledger
        if self._tier == "host":
            return ledger.host_order(ledger.group_of(extent).slot_bytes)
        return ledger.nvme_order if self._tier == "nvme" else ledger.disk_order


class _SourceOfModel(_Source):
    """Those of one model alone, ranked as the orders in force rank them."""

    def __init__(self, there: _There, tier: str, now: float, fingerprint: str) -> None:
        super().__init__(there, tier, now, [])
        self._fingerprint = fingerprint
        self._heap: list[tuple[Rank, int, Extent, int]] = []
        self._numbers = 0
        for extent in there.ledger.tree:
            self._push(extent)

    def take(self) -> Extent | None:
        while self._heap:
            _, _, extent, index = heapq.heappop(self._heap)
            if extent.in_tree and _index(self._there, self._tier, extent) == index:
                return extent
        return None

    def freed(self, extents: list[Extent]) -> None:
        for one in extents:
            self._push(one)

    def _push(self, extent: Extent) -> None:
        if not self._there.ledger.group_of(extent).spec.identity.weights.startswith(self._fingerprint):
            return
        index = _index(self._there, self._tier, extent)
        if index is not None:
            self._numbers += 1
            rank = self._order_of(extent).rank(extent, index, self._now)
            heapq.heappush(self._heap, (rank, self._numbers, extent, index))


def _source(there: _There, cascade: Cascade, tier: str, fingerprint: str, now: float) -> _Source:
    if tier != "host" and not cascade.files_of(tier).can_remove:
        return _Source(there, tier, now, [])
    if fingerprint:
        return _SourceOfModel(there, tier, now, fingerprint)
    ledger = there.ledger
    if tier == "host":
        return _Source(there, tier, now, list(ledger.host_orders.values()))
    return _Source(there, tier, now, [ledger.nvme_order if tier == "nvme" else ledger.disk_order])


def _index(there: _There, tier: str, extent: Extent) -> int | None:
    """The block that goes first, if one may go."""
    if not extent.in_tree:
        return None
    if tier != "host":
        return 0 if there.may_leave(extent, tier) else None
    return None if there.host_floor(extent) is None else there.host_blocks(extent) - 1


def _with_parent(extent: Extent) -> Iterator[Extent]:
    yield extent
    if extent.above is not None and extent.above.owner is not None:
        yield extent.above.owner
