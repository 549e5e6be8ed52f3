"""The books of the GPU tier: whose slots lie in which device's pool.

    tickets, landings, staged blocks    a device slot each, beside a host slot: its twin, which goes where that goes
    extents                             per device and rank a length from the first block, like their host slots
    doomed slots, uploads, wipes        as in host memory

Few extents of many have copies on a device, so that these stand in a table beside them. Addresses are those of
core/addresses.py. A pool lives as long as its worker: when that has died, all that the pool held is forgotten here, and
its generations move, so that nobody takes what lies at an address of the next pool for what was at it in this one.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from typing import TYPE_CHECKING

from tierkv.core.addresses import pool_bases
from tierkv.core.extent import Branch, Doomed, Extent
from tierkv.core.journal import Account
from tierkv.core.reasons import Reason
from tierkv.core.slabs import SlabPool
from tierkv.core.value.order import EvictionOrder
from tierkv.core.wipes import Wipe, wipes_of

if TYPE_CHECKING:
    from tierkv.core.ledger import Ledger

_GPU, _COPIED = Account.GPU.value, Account.COPIED.value

Place = tuple[int, int]
"""A device and a rank."""


FEW_SLABS = 8
"""A pool of fewer would be one block size's, or two's: it is cut finer than host memory, into at most as many as that
for each of its slabs. What fits in no slab there any more is kept in host memory."""


class DevicePool:
    """Of one device. `slots` are None while no worker has a pool there."""

    def __init__(self, device: int, base: int, asked_bytes: int) -> None:
        self.device = device
        self.base = base
        self.asked_bytes = asked_bytes
        self.end = base + asked_bytes
        self.slots: SlabPool | None = None
        self.resident_bytes = 0  # of extents
        self.orders: dict[tuple[int, bool], EvictionOrder] = {}  # slot size, and whether of what is pinned
        self.wipes: deque[Wipe] = deque()
        self.wiping_bytes = 0

    @property
    def is_open(self) -> bool:
        return self.slots is not None

    @property
    def capacity_bytes(self) -> int:
        """That there really are, in whole slabs."""
        return 0 if self.slots is None else self.slots.capacity_bytes

    def holds(self, address: int) -> bool:
        return self.base <= address < self.end

    def available(self, slot_bytes: int) -> int:
        return 0 if self.slots is None else self.slots.available(slot_bytes)

    def in_pool(self, addresses: Iterable[int]) -> list[int]:
        """As the device's worker knows them."""
        return [address - self.base for address in addresses]


class DeviceBooks:
    def __init__(self, ledger: Ledger, generations: MutableSequence[int]) -> None:
        limits = ledger.limits
        self._ledger = ledger
        self._generations = generations
        bases = pool_bases(limits.host_bytes, limits.slab_bytes, limits.device_bytes)
        self.pools = [
            DevicePool(device, base, asked)
            for device, (base, asked) in enumerate(zip(bases, limits.device_bytes, strict=False))
        ]
        self.first_address = bases[0] if self.pools else sys.maxsize
        """Below are the arena's."""
        self.mapped: dict[bytes, int] = {}  # session -> the device whose pool its process has mapped
        self.copies: dict[Extent, dict[Place, tuple[int, ...]]] = {}
        self.twins: dict[int, int] = {}  # a host slot -> the device slot that has the same block, or will
        self.filling: Counter[tuple[Extent, int]] = Counter()  # extents, by device: uploads under way
        self._kids: Counter[tuple[Branch, int]] = Counter()  # how many extents there have copies on a device
        self._dooming: set[Extent] = set()  # with doomed slots on a device

    def mapped_by(self, holders: Mapping[int, bytes]) -> dict[int, int]:
        """By rank, the devices whose pools their holders have mapped."""
        return {rank: self.mapped[holder] for rank, holder in holders.items() if holder in self.mapped}

    # ---- pools

    def open(self, device: int, num_bytes: int) -> None:
        pool, limits = self.pools[device], self._ledger.limits
        num_bytes = min(num_bytes, pool.asked_bytes)
        slab_bytes = _slab_bytes(num_bytes, limits.slab_bytes, limits.page_bytes)
        num_bytes -= num_bytes % slab_bytes if slab_bytes else num_bytes  # or the tier could never be full
        pool.slots = SlabPool(num_bytes, slab_bytes, self._generations, page_bytes=limits.page_bytes, base=pool.base)

    def close(self, device: int) -> list[Extent]:
        """Its memory is no more. Returns the extents that had copies in it."""
        pool = self.pools[device]
        if pool.slots is not None:
            pool.slots.retire(list(pool.slots.used_slots()))
        self.mapped = {session: mapped for session, mapped in self.mapped.items() if mapped != device}
        self.twins = {host: twin for host, twin in self.twins.items() if not pool.holds(twin)}
        extents = [extent for extent, own in self.copies.items() if any(on == device for on, _ in own)]
        for extent in extents:
            for place in [place for place in self.copies[extent] if place[0] == device]:
                self._take_off(extent, place, 0, Reason.DEVICE_DOWN, Account.DROPPED)
        for extent in list(self._dooming):
            extent.doomed = tuple(doomed for doomed in extent.doomed if not pool.holds(doomed.slots[0]))
            self.settle_doomed(extent)
        for key in [key for key in self.filling if key[1] == device]:
            del self.filling[key]
        pool.slots = None
        pool.orders.clear()
        pool.wipes.clear()
        pool.wiping_bytes = 0
        for extent in extents:
            self._ledger.reconsider(extent)
        return extents

    def pool_at(self, address: int) -> DevicePool:
        return next(pool for pool in self.pools if pool.holds(address))

    @property
    def wiping_bytes(self) -> int:
        return sum(pool.wiping_bytes for pool in self.pools)

    def release(self, slots: list[int], slot_bytes: int, *, wipe: bool) -> None:
        """Give slots of one pool up, as Ledger.release does."""
        pool = self.pool_at(slots[0])
        assert pool.slots is not None, f"slots {slots} of a pool that is no more"
        if not wipe:
            pool.slots.release(slots)
            return
        self._ledger.has_let_go = True
        pool.slots.retire(slots)
        self._wipe(pool, wipes_of(slots, slot_bytes))

    def wipe_free(self) -> None:
        """Have all free memory of all pools zeroed that was in use before."""
        for pool in self.pools:
            if pool.slots is None:
                continue
            for slot_bytes, slots in pool.slots.take_free():
                self._wipe(pool, wipes_of(slots, slot_bytes))
            tails = pool.slots.pin_tails()
            self._wipe(pool, [Wipe([], tails, tails)] if tails else [])

    @staticmethod
    def _wipe(pool: DevicePool, wipes: Iterable[Wipe]) -> None:
        for wipe in wipes:
            pool.wipes.append(wipe)
            pool.wiping_bytes += wipe.num_bytes

    # ---- twins

    def pair(self, host_slots: list[int], device_slots: list[int]) -> None:
        self.twins.update(zip(host_slots, device_slots, strict=True))

    def part(self, host_slots: Iterable[int]) -> list[int]:
        """The device slots of those that have one: nobody's from now on."""
        return [twin for slot in host_slots if (twin := self.twins.pop(slot, None)) is not None]

    def release_twins(self, host_slots: Iterable[int], slot_bytes: int, *, wipe: bool) -> None:
        slots = self.part(host_slots)
        for pool in self.pools if slots else ():
            mine = [slot for slot in slots if pool.holds(slot)]
            if mine:
                self.release(mine, slot_bytes, wipe=wipe)

    def adopt_twins(self, extent: Extent, rank: int, first: int, host_slots: list[int]) -> None:
        """Host slots have become the extent's, of its blocks from `first` on: so do their twins, as far as they
        continue what it has on the device."""
        for index, slot in enumerate(host_slots, first):
            twin = self.twins.pop(slot, None)
            if twin is None:
                continue
            device = self.pool_at(twin).device
            if len(self.slots(extent, device, rank)) == index:
                self.append(extent, device, rank, [twin])
            else:
                self.release([twin], self._ledger.group_of(extent).slot_bytes, wipe=extent.purged)

    # ---- copies of extents

    def slots(self, extent: Extent, device: int, rank: int) -> tuple[int, ...]:
        own = self.copies.get(extent)
        return own.get((device, rank), ()) if own is not None else ()

    def places(self, extent: Extent) -> dict[Place, tuple[int, ...]]:
        return self.copies.get(extent, {})

    def lengths(self, extent: Extent, device: int) -> list[int]:
        """Blocks on the device, of each rank that has some there."""
        return [len(slots) for (on, _), slots in self.places(extent).items() if on == device]

    def longest(self, extent: Extent, device: int) -> int:
        """Blocks on the device in some rank."""
        return max(self.lengths(extent, device), default=0)

    def longest_of_rank(self, extent: Extent, rank: int) -> int:
        """Blocks of the rank on some device."""
        return max((len(slots) for (_, of), slots in self.places(extent).items() if of == rank), default=0)

    def in_memory(self, extent: Extent, rank: int) -> int:
        """Blocks of the rank that host memory has, or some device."""
        host = len(extent.slots[rank])
        return max(host, self.longest_of_rank(extent, rank)) if extent in self.copies else host

    def memory_blocks(self, extent: Extent) -> int:
        """That every rank has in host memory or on a device."""
        if extent not in self.copies:
            return extent.host_blocks
        return min(self.in_memory(extent, rank) for rank in range(len(extent.slots)))

    def blocks(self, extent: Extent) -> int:
        """That every rank has on a device."""
        if extent not in self.copies:
            return 0
        return min(self.longest_of_rank(extent, rank) for rank in range(len(extent.slots)))

    def is_whole(self, extent: Extent) -> bool:
        """Nothing else is needed to have all of it."""
        return extent in self.copies and self.blocks(extent) == extent.num_blocks

    def blocks_without(self, extent: Extent, device: int, remaining: int) -> int:
        """That every rank has in memory once the device has given up those from `remaining` on."""
        lengths = [len(slots) for slots in extent.slots]
        for (on, rank), slots in self.places(extent).items():
            lengths[rank] = max(lengths[rank], min(len(slots), remaining) if on == device else len(slots))
        return min(lengths)

    def append(self, extent: Extent, device: int, rank: int, slots: list[int]) -> None:
        before = self.longest(extent, device)
        own = self.copies.setdefault(extent, {})
        own[device, rank] = (*own.get((device, rank), ()), *slots)
        self._post(extent, _COPIED, _GPU, len(slots), "")
        self._changed(extent, device, before, len(slots))

    def cut(
        self, extent: Extent, place: Place, num_blocks: int, reason: Reason | None, *, to: str = Account.DROPPED
    ) -> None:
        """Give up a rank's copies on a device from `num_blocks` on: at once, or when the last who holds them lets
        go. `reconsider` follows."""
        slots = self._take_off(extent, place, num_blocks, reason, to)
        if not slots:
            return
        waits_for = {who for who, blocks in extent.holds.items() if blocks > num_blocks}
        if waits_for:
            extent.doomed += (Doomed(slots, waits_for),)
            self._dooming.add(extent)
        else:
            self.release(slots, self._ledger.group_of(extent).slot_bytes, wipe=extent.purged)

    def cut_all(self, extent: Extent, num_blocks: int, reason: Reason | None, *, to: str = Account.DROPPED) -> None:
        for place in list(self.places(extent)):
            self.cut(extent, place, num_blocks, reason, to=to)

    def settle_doomed(self, extent: Extent) -> None:
        """Some of its doomed slots have gone."""
        if not any(doomed.slots[0] >= self.first_address for doomed in extent.doomed):
            self._dooming.discard(extent)

    def _take_off(self, extent: Extent, place: Place, num_blocks: int, reason: Reason | None, to: str) -> list[int]:
        own = self.copies[extent]
        slots = list(own[place][num_blocks:])
        if not slots:
            return slots
        before = self.longest(extent, place[0])
        own[place] = own[place][:num_blocks]
        if not own[place]:
            del own[place]
            if not own:
                del self.copies[extent]
        self._post(extent, _GPU, to, len(slots), reason or "")
        self._changed(extent, place[0], before, -len(slots))
        return slots

    def _post(self, extent: Extent, source: str, target: str, num_slots: int, reason: str) -> None:
        num_bytes = num_slots * self._ledger.group_of(extent).slot_bytes
        self._ledger.postings[extent.group, source, target, reason] += num_bytes

    def _changed(self, extent: Extent, device: int, before: int, change: int) -> None:
        ledger, group = self._ledger, self._ledger.group_of(extent)
        group.gpu_slots += change
        pool = self.pools[device]
        pool.resident_bytes += change * group.slot_bytes
        after = self.longest(extent, device)
        if not after:
            for order in pool.orders.values():
                order.withdraw(extent)
        if extent.above is not None and (before > 0) != (after > 0):
            key = extent.above, device
            self._kids[key] += 1 if after > 0 else -1
            if not self._kids[key]:
                del self._kids[key]
            if extent.above.owner is not None:
                ledger.reconsider(extent.above.owner)

    # ---- who may go

    def order(self, device: int, slot_bytes: int, *, pinned: bool) -> EvictionOrder:
        orders = self.pools[device].orders
        if (slot_bytes, pinned) not in orders:
            orders[slot_bytes, pinned] = self._ledger.new_order()
        return orders[slot_bytes, pinned]

    def has_kids(self, branch: Branch, device: int) -> bool:
        """Whether some that hang there have copies on the device."""
        return self._kids[branch, device] > 0

    def floor(self, extent: Extent, device: int, has_kids: Callable[[Branch], bool] | None = None) -> int | None:
        """The block from which on its copies on the device may go, if need be to host memory; None: none may."""
        longest = self.longest(extent, device)
        if not extent.in_tree or not longest or self.filling[extent, device]:
            return None
        floor = extent.held_blocks
        for branch in extent.branch_points:
            if self._kids[branch, device] if has_kids is None else has_kids(branch):
                floor = max(floor, branch.index + 1)
        return floor if floor < longest else None

    def reconsider(self, extent: Extent) -> None:
        """Offer it to the orders of the devices that have copies of it, or take it back."""
        own = self.copies.get(extent)
        if own is None:
            return
        slot_bytes = self._ledger.group_of(extent).slot_bytes
        is_pinned = self._ledger.pinned(extent)
        for device in {on for on, _ in own}:
            self.order(device, slot_bytes, pinned=not is_pinned).withdraw(extent)
            order = self.order(device, slot_bytes, pinned=is_pinned)
            if self.floor(extent, device) is None:
                order.withdraw(extent)
            else:
                order.offer(extent, self.longest(extent, device) - 1)

    # ---- for the audit

    def owned_by_extents(self) -> Iterator[tuple[int, str]]:
        for extent, own in self.copies.items():
            for slots in own.values():
                yield from ((slot, repr(extent)) for slot in slots)

    @property
    def kids(self) -> Counter[tuple[Branch, int]]:
        return self._kids


def _slab_bytes(num_bytes: int, of_host: int, page_bytes: int) -> int:
    """Of a pool of that size; 0 if it has not one page."""
    slab_bytes, least = of_host, max(of_host // FEW_SLABS, page_bytes)
    while num_bytes // slab_bytes < FEW_SLABS and slab_bytes // 2 >= least and not slab_bytes % (2 * page_bytes):
        slab_bytes //= 2
    return min(slab_bytes, num_bytes // page_bytes * page_bytes)
