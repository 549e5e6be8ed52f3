"""Evicting from devices by an operator's word, as core/evicting.py does from the other tiers: down to a size in all
pools together, the lowest rank first and what is pinned last. What is nowhere else goes to host memory, and its slots
are free when it is there; where it can't go there it stays."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
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
    """Evict a slice. Ask again until it is finished."""
    state = EvictState(used_bytes=used_bytes(ledger, cascade))
    ranked = _Ranked(ledger, fingerprint, now)
    while state.used_bytes > to_bytes and state.evictions < EVICTIONS_AT_A_TIME:
        taken = ranked.take()
        if taken is None:
            state.reason = Reason.NO_ROOM
            break
        extent, device, floor = taken
        victims = _victims(ledger, cascade, extent, device, floor)
        if cascade.devices.is_safe(extent, device, floor):
            cascade.devices.leave(extent, device, floor, now, Reason.OPERATOR)
        elif not cascade.devices.demote(extent, device, now, Reason.OPERATOR):
            continue
        state.add(victims)
        ranked.freed(extent, device)
        state.used_bytes = used_bytes(ledger, cascade)
    state.finished = state.used_bytes <= to_bytes or state.reason is not None
    return state


def preview(ledger: Ledger, cascade: Cascade, to_bytes: int, fingerprint: str, now: float) -> EvictState:
    """What `evict` would do, as far as host memory has room for what has to go there; changes nothing."""
    state = EvictState(used_bytes=used_bytes(ledger, cascade), finished=True)
    ranked = _Ranked(ledger, fingerprint, now)
    while state.used_bytes > to_bytes:
        if len(state.victims) >= MAX_VICTIMS:
            state.is_cut = True
            break
        taken = ranked.take()
        if taken is None:
            state.reason = Reason.NO_ROOM
            break
        extent, device, floor = taken
        victims = _victims(ledger, cascade, extent, device, floor)
        state.add(victims)
        state.victims += victims
        state.used_bytes -= sum(victim.num_bytes for victim in victims)
        ranked.gone[extent, device] = None
        ranked.freed(extent, device)
    return state


def _victims(ledger: Ledger, cascade: Cascade, extent: Extent, device: int, remaining: int) -> list[Victim]:
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
        for first, end, num_bytes, to in cascade.devices.parts(extent, device, remaining)
    ]


@dataclass(slots=True)
class _Ranked:
    """What may go now, the lowest first."""

    ledger: Ledger
    fingerprint: str
    now: float
    gone: dict[tuple[Extent, int], None] = field(default_factory=dict)
    """What a preview has taken: what it hung on may go then."""
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

    def _floor(self, extent: Extent, device: int) -> int | None:
        if (extent, device) in self.gone:
            return None
        return self.ledger.devices.floor(extent, device, lambda branch: self._has_kids(branch, device))

    def _has_kids(self, branch: Branch, device: int) -> bool:
        if not self.gone:
            return self.ledger.devices.has_kids(branch, device)
        return any(self.ledger.devices.longest(kid, device) for kid in self._kids_left(branch, device))

    def _kids_left(self, branch: Branch, device: int) -> Iterator[Extent]:
        yield from (kid for kid in branch.kids if (kid, device) not in self.gone)

    def _push(self, extent: Extent, device: int) -> None:
        ledger = self.ledger
        group = ledger.group_of(extent)
        if self._floor(extent, device) is None or not group.spec.identity.weights.startswith(self.fingerprint):
            return
        order = ledger.devices.order(device, group.slot_bytes, pinned=False)
        rank = order.rank(extent, ledger.devices.longest(extent, device) - 1, self.now)
        self._numbers += 1
        heapq.heappush(self._heap, (ledger.pinned(extent), rank, self._numbers, extent, device))
