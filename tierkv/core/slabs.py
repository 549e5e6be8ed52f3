"""Slots in the arena, or in the pool of a device. A slab holds slots of one size; it goes to the size that needs it and
comes back when empty.

    arena   | slab: slots of 372,736 bytes | slab: slots of 8,192 | unassigned | ...
    slot    an address; its generation counts how often its memory was given up, so that a late reader notices

Slots are handed out in ascending order, so that blocks stored together lie together and copy in one piece.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Mapping, MutableSequence
from itertools import takewhile

from tierkv.errors import BrokenInvariant

PAGE_BYTES = 4096


class _Slab:
    __slots__ = ("base", "free", "pinned", "slot_bytes", "used")

    def __init__(self, base: int, slab_bytes: int, slot_bytes: int) -> None:
        self.base = base
        self.slot_bytes = slot_bytes
        self.free = [base + index * slot_bytes for index in range(slab_bytes // slot_bytes)]  # sorted
        self.used: set[int] = set()
        self.pinned = False  # stays with its size although it may be empty


class SlabPool:
    """`capacity_bytes` is the arena; `limit_bytes` what of it may be in use now (less after a front restart, while
    engines of the last incarnation still hold its arena). Its first address is `base`, a multiple of the page."""

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        generations: MutableSequence[int],
        *,
        page_bytes: int = PAGE_BYTES,
        base: int = 0,
    ) -> None:
        self.base = base
        self.capacity_bytes = capacity_bytes
        self.slab_bytes = min(slab_bytes, capacity_bytes) // page_bytes * page_bytes
        self.page_bytes = page_bytes
        self.limit_bytes = capacity_bytes
        self._generations = generations
        count = capacity_bytes // self.slab_bytes if self.slab_bytes else 0
        self._unassigned = [base + index * self.slab_bytes for index in range(count)]
        self._slabs: dict[int, _Slab] = {}  # base -> slab
        self._touched: set[int] = set()  # bases of slabs that were ever handed out
        self._open: dict[int, list[int]] = {}  # slot size -> heap of bases with (perhaps) a free slot
        self._free_slots: dict[int, int] = {}
        self.used_bytes = 0

    def slot_bytes(self, block_bytes: int) -> int:
        return -(-block_bytes // self.page_bytes) * self.page_bytes

    def fits(self, slot_bytes: int) -> bool:
        return 0 < slot_bytes <= self.slab_bytes

    def available(self, slot_bytes: int) -> int:
        """Slots of this size that can be had without giving anything up."""
        if not self.fits(slot_bytes):
            return 0
        return self._free_slots.get(slot_bytes, 0) + self._assignable() * (self.slab_bytes // slot_bytes)

    def has_all(self, wanted: Mapping[int, int]) -> bool:
        """Whether so many slots of each size can be had together, without giving anything up."""
        slabs = 0
        for slot_bytes, count in wanted.items():
            if count and not self.fits(slot_bytes):
                return False
            missing = count - self._free_slots.get(slot_bytes, 0)
            if missing > 0:
                slabs += -(-missing // (self.slab_bytes // slot_bytes))
        return slabs <= self._assignable()

    def allocate(self, slot_bytes: int, count: int) -> list[int]:
        """Up to `count` slots, in ascending order."""
        slots: list[int] = []
        while len(slots) < count:
            slab = self._slab_with_room(slot_bytes)
            if slab is None:
                break
            lowest = slab.free[: count - len(slots)]
            del slab.free[: len(lowest)]
            slab.used.update(lowest)
            slots += lowest
            if not slab.free:
                heapq.heappop(self._open[slot_bytes])  # this slab; its next free slot puts it back
        self._free_slots[slot_bytes] = self._free_slots.get(slot_bytes, 0) - len(slots)
        self.used_bytes += len(slots) * slot_bytes
        slots.sort()  # a slab that is new here may lie below one that had room left
        return slots

    def release(self, slots: list[int]) -> None:
        """Give memory up. The generation moves first, so that whoever still reads can tell."""
        generations, page_bytes = self._generations, self.page_bytes
        for base, inside in self.by_slab(slots):
            slab = self._slabs.get(base)
            if slab is None or not slab.used.issuperset(inside) or len(set(inside)) < len(inside):
                raise BrokenInvariant(f"among slots {inside} is one that is freed twice")
            for slot in inside:
                generations[slot // page_bytes] += 1
            slab.used.difference_update(inside)
            was_full = not slab.free
            if len(inside) == 1:
                insort(slab.free, inside[0])
            else:
                slab.free += inside
                slab.free.sort()
            self._free_slots[slab.slot_bytes] += len(inside)
            self.used_bytes -= len(inside) * slab.slot_bytes
            if not slab.used and not slab.pinned:
                self._give_back(slab)
            elif was_full:
                heapq.heappush(self._open[slab.slot_bytes], base)

    def retire(self, slots: list[int]) -> None:
        """Move the generations of slots that stay in use for now: their content is about to be overwritten."""
        for slot in slots:
            self._generations[slot // self.page_bytes] += 1

    def take_free(self) -> list[tuple[int, list[int]]]:
        """(slot size, slots) of all free memory that may hold something from before; from now on in use. A slab that no
        size has at the time is one slot."""
        taken = []
        for slab in self._slabs.values():
            if slab.free:
                taken.append((slab.slot_bytes, self._use_all(slab)))
        for base in [base for base in self._unassigned if base in self._touched]:
            slab = self._slabs[base] = _Slab(base, self.slab_bytes, self.slab_bytes)
            self._free_slots[self.slab_bytes] = self._free_slots.get(self.slab_bytes, 0) + 1
            taken.append((self.slab_bytes, self._use_all(slab)))
        self._unassigned = [base for base in self._unassigned if base not in self._slabs]
        heapq.heapify(self._unassigned)
        return taken

    def _use_all(self, slab: _Slab) -> list[int]:
        slots, slab.free = slab.free, []
        slab.used.update(slots)
        self._free_slots[slab.slot_bytes] -= len(slots)
        self.used_bytes += len(slots) * slab.slot_bytes
        return slots

    def pin_tails(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what lies behind the last slot of each slab: of no slot now, perhaps of one before. The
        slabs stay with their size until `unpin_tails`."""
        tails = []
        for slab in self._slabs.values():
            rest = self.slab_bytes % slab.slot_bytes
            if rest and not slab.pinned:
                slab.pinned = True
                tails.append((slab.base + self.slab_bytes - rest, rest))
        return tails

    def unpin_tails(self, tails: list[tuple[int, int]]) -> None:
        for offset, _ in tails:
            slab = self._slabs[self.base_of(offset)]
            slab.pinned = False
            if not slab.used:
                self._give_back(slab)

    def by_slab(self, slots: list[int]) -> Iterator[tuple[int, list[int]]]:
        """(base of a slab, slots in it), for stretches of `slots` that lie in one."""
        start = 0
        while start < len(slots):
            base = self.base_of(slots[start])
            end = base + self.slab_bytes
            rest = slots[start:] if start else slots
            if min(rest) < base or max(rest) >= end:  # more than one slab: rarely, so most calls take no loop
                rest = list(takewhile(range(base, end).__contains__, rest))
            yield base, rest
            start += len(rest)

    def base_of(self, slot: int) -> int:
        """The slab that a slot lies in."""
        return slot - (slot - self.base) % self.slab_bytes

    def generation(self, slot: int) -> int:
        return self._generations[slot // self.page_bytes]

    def generations(self, slots: list[int]) -> list[int]:
        current, page_bytes = self._generations, self.page_bytes
        return [current[slot // page_bytes] for slot in slots]

    def slabs_of_other_sizes(self, slot_bytes: int) -> list[tuple[int, int]]:
        """(base, used slots) of slabs that another size holds, emptiest first."""
        others = [slab for slab in self._slabs.values() if slab.slot_bytes != slot_bytes]
        return [(slab.base, len(slab.used)) for slab in sorted(others, key=lambda s: len(s.used) * s.slot_bytes)]

    def count_used_bytes(self) -> int:
        """What `used_bytes` ought to be: the slots in use, counted."""
        return sum(len(slab.used) * slab.slot_bytes for slab in self._slabs.values())

    def used_slots(self) -> set[int]:
        return set().union(*(slab.used for slab in self._slabs.values()))

    def _assignable(self) -> int:
        allowed = self.limit_bytes // self.slab_bytes if self.slab_bytes else 0
        return max(0, min(len(self._unassigned), allowed - len(self._slabs)))

    def _slab_with_room(self, slot_bytes: int) -> _Slab | None:
        bases = self._open.setdefault(slot_bytes, [])
        while bases:
            slab = self._slabs.get(bases[0])
            if slab is not None and slab.slot_bytes == slot_bytes and slab.free:
                return slab
            heapq.heappop(bases)
        if not self._assignable() or not self.fits(slot_bytes):
            return None
        slab = _Slab(heapq.heappop(self._unassigned), self.slab_bytes, slot_bytes)
        self._slabs[slab.base] = slab
        self._touched.add(slab.base)
        self._free_slots[slot_bytes] = self._free_slots.get(slot_bytes, 0) + len(slab.free)
        heapq.heappush(bases, slab.base)
        return slab

    def _give_back(self, slab: _Slab) -> None:
        del self._slabs[slab.base]
        self._free_slots[slab.slot_bytes] -= len(slab.free)
        heapq.heappush(self._unassigned, slab.base)
