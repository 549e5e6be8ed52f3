"""Evicting from devices by an operator's word, as core/evicting.py does from the other tiers: down to a size in all
pools together, the lowest rank first and what is pinned last. What is nowhere else goes to host memory, as far as there
is room: nothing is displaced there. Its slots are free when it is there, and what it hung on may go then.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from tierkv.core.cascade import Cascade
from tierkv.core.evicting import MAX_VICTIMS, EvictState, Victim
from tierkv.core.extent import Branch, Extent
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason
from tierkv.core.tier_room import EVICTIONS_AT_A_TIME
from tierkv.core.value.order import Rank

_Entry = tuple[bool, Rank, int, Extent, int]
"""Whether it is pinned, its rank, a number that tells equal ones apart, the extent, the device."""


def used_bytes(ledger: Ledger, cascade: Cascade) -> int:
    """What is on its way to host memory is gone already."""
    return sum(pool.resident_bytes for pool in ledger.devices.pools) - cascade.devices.leaving_bytes


def evict(ledger: Ledger, cascade: Cascade, to_bytes: int, fingerprint: str, now: float) -> EvictState:
    """Evict a slice. Ask again until it is finished; a slice may be empty while things are on their way."""
    state = EvictState(used_bytes=used_bytes(ledger, cascade))
    ranked = _Ranked(ledger, fingerprint, now)
    why_no_more = Reason.NO_ROOM
    while state.used_bytes > to_bytes and state.evictions < EVICTIONS_AT_A_TIME:
        taken = ranked.take()
        if taken is None:
            state.reason = None if cascade.devices.is_operator_at_work else why_no_more
            break
        extent, device, floor = taken
        is_safe = cascade.devices.is_safe(extent, device, floor)
        victims = _victims(ledger, cascade, extent, device, floor, ranked.longest(extent, device))
        if is_safe:
            cascade.devices.leave(extent, device, floor, now, Reason.OPERATOR)
        elif not cascade.devices.demote(extent, device, now, Reason.OPERATOR):
            why_no_more = Reason.HOST_FULL
            continue
        state.add(victims)
        ranked.freed(extent, device)
        state.used_bytes = used_bytes(ledger, cascade)
    state.finished = state.used_bytes <= to_bytes or state.reason is not None
    return state


def preview(ledger: Ledger, cascade: Cascade, to_bytes: int, fingerprint: str, now: float) -> EvictState:
    """What `evict` would do, all of its slices together; changes nothing."""
    state = EvictState(used_bytes=used_bytes(ledger, cascade), finished=True)
    ranked = _Ranked(ledger, fingerprint, now)
    room = _Room(ledger, cascade)
    why_no_more = Reason.NO_ROOM
    while state.used_bytes > to_bytes:
        if len(state.victims) >= MAX_VICTIMS:
            state.is_cut = True
            break
        taken = ranked.take()
        if taken is None:
            state.reason = why_no_more
            break
        extent, device, floor = taken
        if not room.take(extent, device, floor, ranked):
            why_no_more = Reason.HOST_FULL
            continue
        victims = _victims(ledger, cascade, extent, device, floor, ranked.longest(extent, device))
        state.add(victims)
        state.victims += victims
        state.used_bytes -= sum(victim.num_bytes for victim in victims)
        ranked.left[extent, device] = floor
        ranked.freed(extent, device)
    return state


@dataclass(slots=True)
class _Room:
    """In host memory, for what a preview would have copied there."""

    ledger: Ledger
    cascade: Cascade
    _wanted: Counter[int] = field(default_factory=Counter)  # slots, by size
    _there: set[tuple[Extent, int]] = field(default_factory=set)
    """Extents and ranks that would be there, as far as a device has them."""

    def take(self, extent: Extent, device: int, floor: int, ranked: _Ranked) -> bool:
        """Whether the blocks from `floor` on may go: they are elsewhere too, or there is room for them."""
        missing = self.cascade.devices.missing_in_host(extent, device)
        missing = {rank: blocks for rank, blocks in missing.items() if (extent, rank) not in self._there}
        is_here_alone = not any(on == extent and at != device for on, at in ranked.left)
        if not missing or (is_here_alone and self.cascade.devices.is_safe(extent, device, floor)) or extent.has_file:
            return True
        wanted = self._wanted.copy()
        wanted[self.ledger.group_of(extent).slot_bytes] += sum(
            blocks - len(extent.slots[rank]) for rank, blocks in missing.items()
        )
        if not self.ledger.pool.has_all(wanted):
            return False
        self._wanted = wanted
        self._there.update((extent, rank) for rank in missing)
        return True


def _victims(
    ledger: Ledger, cascade: Cascade, extent: Extent, device: int, remaining: int, longest: int
) -> list[Victim]:
    group = ledger.group_of(extent)
    return [
        Victim(
            group=extent.group,
            key=extent.block_key(first),
            first_token=extent.first_token + first * group.block_tokens,
            to="host" if to == "dropped" else to,
            blocks=end - first,
            tokens=(end - first) * group.block_tokens,
            num_bytes=num_bytes,
            created=extent.created,
            last_used=extent.used_at(first),
            hits=extent.hits_at(first),
            seconds=0.0,
        )
        for first, end, num_bytes, to in cascade.devices.parts(extent, device, remaining, longest)
    ]


@dataclass(slots=True)
class _Ranked:
    """What may go now, the lowest first."""

    ledger: Ledger
    fingerprint: str
    now: float
    left: dict[tuple[Extent, int], int] = field(default_factory=dict)
    """Extents, by device: how many blocks a preview has left there. What the others hung on may go then."""
    _heap: list[_Entry] = field(default_factory=list)
    _numbers: int = 0

    def __post_init__(self) -> None:
        books = self.ledger.devices
        for extent, own in list(books.copies.items()):
            for device in {on for on, _ in own}:
                self._push(extent, device)

    def take(self) -> tuple[Extent, int, int] | None:
        """Extent, device, and the block from which on its copies there may go."""
        while self._heap:
            _, _, _, extent, device = heapq.heappop(self._heap)
            floor = self._floor(extent, device)
            if floor is not None:
                return extent, device, floor
        return None

    def freed(self, extent: Extent, device: int) -> None:
        """What hung on its parent is gone."""
        if extent.above is not None and extent.above.owner is not None:
            self._push(extent.above.owner, device)

    def longest(self, extent: Extent, device: int) -> int:
        longest = self.ledger.devices.longest(extent, device)
        return min(longest, self.left.get((extent, device), longest))

    def _floor(self, extent: Extent, device: int) -> int | None:
        floor = self.ledger.devices.floor(extent, device, lambda branch: self._has_kids(branch, device))
        return floor if floor is not None and floor < self.longest(extent, device) else None

    def _has_kids(self, branch: Branch, device: int) -> bool:
        if not self.left:
            return self.ledger.devices.has_kids(branch, device)
        return any(self.longest(kid, device) for kid in branch.kids)

    def _push(self, extent: Extent, device: int) -> None:
        ledger = self.ledger
        group = ledger.group_of(extent)
        if self._floor(extent, device) is None or not group.spec.identity.weights.startswith(self.fingerprint):
            return
        order = ledger.devices.order(device, group.slot_bytes, pinned=False)
        rank = order.rank(extent, self.longest(extent, device) - 1, self.now)
        self._numbers += 1
        heapq.heappush(self._heap, (ledger.pinned(extent), rank, self._numbers, extent, device))
