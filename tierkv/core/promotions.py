"""Promotions to devices: what a lease from a device has hit in host memory is copied into the pool, for the next one.

Hottest first, as many at a time as leave the bus to others. Something goes for it only if it is worth less by far; what
has just left a device comes back with its next hit and not before.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.grants import Segment
from tierkv.core.instructions import OnDevice, Upload
from tierkv.core.ledger import Group, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.value.order import Rank

ADVANTAGE = 2.0
"""What comes into a full pool has to be worth more than what goes for it by this factor. The exchange costs a copy over
the bus, and what it gains is one copy over the bus saved with each use of the one, less one with each use of the other:
between two that are used nearly as often it never pays, and they would change places with every hit."""

HITS = 2
"""Of an extent, before something goes for it: the first may be the last."""

PROMOTING_BYTES = 256 * 2**20
PROMOTING_OPS = 16
"""Under way to a device at one time: some ten milliseconds of its bus, so that landings are not kept waiting."""

MOST_WANTED = 1_024
"""Promotions of one device that wait for their turn; of more, the coldest are forgotten."""


class Allocate(Protocol):
    """Slots for up to `wanted` blocks; see DeviceTier."""

    def __call__(
        self,
        device: int,
        group: Group,
        wanted: int,
        now: float,
        rank_of_new: Callable[[int], Rank | None],
        advantage: float,
    ) -> list[int]: ...


@dataclass(slots=True, eq=False)
class Promotion:
    extent: Extent
    device: int
    rank: int
    first: int
    slots: list[int]
    num_bytes: int
    unclean: bool = False  # what was purged may lie in its slots until they are filled

    @property
    def who(self) -> tuple[str, int, int]:
        return "upload", self.device, self.rank


_Wanted = tuple[Extent, int, int]
"""Extent, device, rank."""


class Promotions:
    def __init__(self, ledger: Ledger, changes: Changes, next_op: Callable[[], int], allocate: Allocate) -> None:
        self._ledger = ledger
        self._books = ledger.devices
        self._changes = changes
        self._next_op = next_op
        self._allocate = allocate
        self._ops: dict[int, Promotion] = {}
        self._wanted: dict[_Wanted, tuple[int, int]] = {}  # up to how many blocks, and the number of the right entry
        self._queues: dict[int, list[tuple[float, int, _Wanted]]] = {}  # by device, the hottest first
        self._numbers = count()
        self._bytes: Counter[int] = Counter()  # under way, by device
        self._count: Counter[int] = Counter()

    def note_hit(self, path: list[Segment], devices: dict[int, int], now: float) -> None:
        """A lease has found these; `devices` are those that its ranks' holders have mapped."""
        ledger, books = self._ledger, self._books
        for segment in path:
            extent = segment.extent
            for rank, device in devices.items():
                until = min(segment.blocks, len(extent.slots[rank]))
                if until <= len(books.slots(extent, device, rank)):
                    continue
                has_room = books.pools[device].available(ledger.group_of(extent).slot_bytes) > 0
                if has_room or self._may_displace(extent):
                    self._want((extent, device, rank), until, now)
        self.pump(now)

    def _may_displace(self, extent: Extent) -> bool:
        return extent.hits >= HITS or self._ledger.pinned(extent)

    def _want(self, key: _Wanted, blocks: int, now: float) -> None:
        extent, device, _ = key
        order = self._books.order(device, self._ledger.group_of(extent).slot_bytes, pinned=False)
        orphan_last, value = order.rank(extent, 0, now)
        heat = float("inf") if self._ledger.pinned(extent) else value if orphan_last else 0.0
        number = next(self._numbers)
        self._wanted[key] = blocks, number
        queue = self._queues.setdefault(device, [])
        heapq.heappush(queue, (-heat, number, key))
        if len(queue) > 2 * MOST_WANTED:
            ranked = sorted(entry for entry in queue if self._is_right(entry))
            for *_, one in ranked[MOST_WANTED:]:
                del self._wanted[one]
            self._queues[device] = ranked[:MOST_WANTED]

    def _is_right(self, entry: tuple[float, int, _Wanted]) -> bool:
        known = self._wanted.get(entry[2])
        return known is not None and known[1] == entry[1]

    def pump(self, now: float) -> None:
        """Begin what may be begun."""
        for device, queue in self._queues.items():
            while queue and self._count[device] < PROMOTING_OPS:
                if self._bytes[device] >= PROMOTING_BYTES:
                    break
                entry = heapq.heappop(queue)
                if self._is_right(entry):
                    blocks, _ = self._wanted.pop(entry[2])
                    self._promote(*entry[2], blocks, now)

    def _promote(self, extent: Extent, device: int, rank: int, blocks: int, now: float) -> None:
        ledger, books = self._ledger, self._books
        first = len(books.slots(extent, device, rank))
        until = min(blocks, len(extent.slots[rank]))
        if not extent.in_tree or until <= first or ("upload", device, rank) in extent.holds:
            return
        group = ledger.group_of(extent)
        promotion = Promotion(extent, device, rank, first, [], 0)
        # Held while room is made for it, or it could be its own victim.
        ledger.hold(extent, promotion.who, until)
        wanted = until - first
        if not self._may_displace(extent):
            wanted = min(wanted, books.pools[device].available(group.slot_bytes))
        rank_of, advantage = self._rank_of_promoted(extent, device, first, now)
        promotion.slots = self._allocate(device, group, wanted, now, rank_of, advantage)
        if not promotion.slots:
            ledger.unhold(extent, promotion.who)
            return
        op = self._next_op()
        promotion.num_bytes = len(promotion.slots) * group.slot_bytes
        self._ops[op] = promotion
        self._count[device] += 1
        self._bytes[device] += promotion.num_bytes
        books.filling[extent, device] += 1
        ledger.reconsider(extent)
        upload = Upload(
            op=op,
            block_bytes=group.block_bytes,
            host=list(extent.slots[rank][first : first + len(promotion.slots)]),
            slots=books.pools[device].in_pool(promotion.slots),
        )
        ledger.effects.append(OnDevice(device, upload))

    def _rank_of_promoted(
        self, extent: Extent, device: int, first: int, now: float
    ) -> tuple[Callable[[int], Rank | None], float]:
        """What its blocks from `first` on rank, and by how much that has to be more: where ranks are no values, a
        factor of them says nothing."""
        if self._ledger.pinned(extent):
            return lambda index: None, ADVANTAGE
        order = self._books.order(device, self._ledger.group_of(extent).slot_bytes, pinned=False)
        is_value = order.rank_of_new(extent.kind, self._ledger.seconds_per_byte(extent)) is not None
        return lambda index: order.rank(extent, first + index, now), ADVANTAGE if is_value else 1.0

    def ended(self, op: int, problem: Reason | None) -> bool:
        """Whether it is about one of them."""
        one = self._ops.pop(op, None)
        if one is None:
            return False
        ledger, books, extent = self._ledger, self._books, one.extent
        self._count[one.device] -= 1
        self._bytes[one.device] -= one.num_bytes
        books.filling[extent, one.device] -= 1
        if not books.filling[extent, one.device]:
            del books.filling[extent, one.device]
        ledger.has_let_go = ledger.has_let_go or one.unclean
        is_wanted = (
            problem is None
            and extent.in_tree
            and len(books.slots(extent, one.device, one.rank)) == one.first
            and one.first + len(one.slots) <= extent.num_blocks
        )
        if is_wanted:
            books.append(extent, one.device, one.rank, one.slots)
            ledger.counts.uploaded_blocks += len(one.slots)
        else:
            wipe = extent.purged or one.unclean
            books.release(one.slots, ledger.group_of(extent).slot_bytes, wipe=wipe)
        ledger.unhold(extent, one.who)
        self._changes.note(extent)
        return True

    def worker_died(self, device: int) -> None:
        """Its pool is no more."""
        for key in [key for key in self._wanted if key[1] == device]:
            del self._wanted[key]
        self._queues.pop(device, None)
        for op, promotion in [(op, one) for op, one in self._ops.items() if one.device == device]:
            del self._ops[op]
            self._ledger.has_let_go = self._ledger.has_let_go or promotion.unclean
            self._ledger.unhold(promotion.extent, promotion.who)
        del self._bytes[device], self._count[device]

    @property
    def under_way(self) -> dict[int, Promotion]:
        """By operation."""
        return self._ops

    @property
    def num_waiting(self) -> int:
        return len(self._wanted)
