"""Room in host memory: who leaves it when room is needed, and what becomes of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierkv.core.extent import Extent
from tierkv.core.journal import Account
from tierkv.core.ledger import Departure, Ledger
from tierkv.core.left import stay_of_segment, stay_of_tail
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.slab_relief import find_relief, has_cheaper
from tierkv.core.tier_files import TierFiles
from tierkv.core.tier_leaving import tell_evicted
from tierkv.core.value.order import Rank
from tierkv.core.write_queue import WriteQueue


@dataclass(frozen=True, slots=True)
class Room:
    """`slots` that can be had now. `refused` of those asked for are not worth what would have to go for them."""

    slots: int
    refused: int


class HostRoom:
    def __init__(self, ledger: Ledger, nvme: TierFiles, writes: WriteQueue) -> None:
        self._ledger = ledger
        self._nvme = nvme
        self._writes = writes
        self.drop_kid: Callable[[int, float], bool] = lambda slot_bytes, now: False
        """Have something dropped that is not in host memory and hangs on what is; whether there was anything."""

    def make_room(
        self, slot_bytes: int, count: int, now: float, rank_of_new: Callable[[int], Rank | None] = lambda index: None
    ) -> Room:
        """Evict until `count` slots of this size can be had, or nothing more may go. What is to come into the last slot
        is refused instead while it ranks below the next victim: `rank_of_new(index)`, None where it must come in."""
        ledger = self._ledger
        order = ledger.host_order(slot_bytes)
        wanted = count
        may_relieve = True
        while (have := ledger.pool.available(slot_bytes)) < count:
            if ledger.wiping_bytes >= (count - have) * slot_bytes:
                break  # there will be room in a moment: nobody's blocks go for it
            may_relieve = may_relieve and self._relieve(slot_bytes, now)
            if may_relieve:
                continue
            if _is_below(rank_of_new(count - 1), order.cheapest(now)):
                count -= 1
                continue
            if not (
                self._evict_next(slot_bytes, count - have, now)
                or self._drop_oldest_staged(slot_bytes)
                or self._take_slab(slot_bytes, None, now)
                or self.drop_kid(slot_bytes, now)
            ):
                self._seal_for_room(slot_bytes, now)
                break
        return Room(min(count, ledger.pool.available(slot_bytes)), wanted - count)

    def make_ready(self, slot_bytes: int, count: int, now: float, rank_of_new: Rank | None) -> None:
        """Like `make_room`, ahead of the asking: takes only what is next in the order anyway."""
        pool = self._ledger.pool
        order = self._ledger.host_order(slot_bytes)
        may_relieve = True
        while (have := pool.available(slot_bytes)) < count:
            may_relieve = may_relieve and self._relieve(slot_bytes, now)
            if may_relieve:
                continue
            if _is_below(rank_of_new, order.cheapest(now)) or not self._evict_next(slot_bytes, count - have, now):
                return

    def _relieve(self, slot_bytes: int, now: float) -> bool:
        """Take a slab of another size in which all is older than what this one would have to give up. Else a size that
        came late would live on one slab beside another's old blocks for ever."""
        rank = self._ledger.host_order(slot_bytes).cheapest(now)
        if rank is None or not has_cheaper(self._ledger, slot_bytes, rank, now):
            return False
        return self._take_slab(slot_bytes, rank, now)

    def _evict_next(self, slot_bytes: int, slots_needed: int, now: float) -> bool:
        victim = self._ledger.host_order(slot_bytes).pop(now)
        if victim is not None:
            self._evict_from_host(victim, slots_needed, now)
        return victim is not None

    def _take_slab(self, slot_bytes: int, below: Rank | None, now: float) -> bool:
        if not self._ledger.pool.fits(slot_bytes):
            return False
        relief = find_relief(self._ledger, slot_bytes, below, now)
        before = self._ledger.pool.used_bytes
        for extent, remaining in relief.cuts if relief is not None else ():
            if extent.longest_host_blocks > remaining:
                self.leave(extent, remaining, now)
        return self._ledger.pool.used_bytes < before  # or whoever makes room would ask again without end

    def _evict_from_host(self, extent: Extent, slots_needed: int, now: float) -> None:
        """From the tail, as few blocks as will do, at most one recency segment of the extent."""
        ledger = self._ledger
        floor = ledger.host_floor(extent)
        if floor is None:
            return
        longest = extent.longest_host_blocks
        floor = stay_of_segment(extent, floor, longest)
        remaining = stay_of_tail([len(slots) for slots in extent.slots], floor, slots_needed)
        self.leave(extent, remaining, now)

    def leave(self, extent: Extent, remaining: int, now: float, reason: Reason = Reason.EVICTED) -> None:
        """Its host copies from block `remaining` on go, and with them what is in no file and on no device."""
        ledger = self._ledger
        group = ledger.group_of(extent)
        for first, end, to in parts_in_host(ledger, extent, remaining, extent.longest_host_blocks):
            freed = sum(max(0, min(len(slots), end) - first) for slots in extent.slots) * group.slot_bytes
            ledger.counts.evicted_bytes["host", reason] += freed
            ledger.counts.evicted_blocks["host", reason] += end - first
            value = ledger.host_order(group.slot_bytes).value(extent, first, now)
            tell_evicted(ledger, extent, first, end, tier="host", to=to, num_bytes=freed, reason=reason, value=value)
            if to == "dropped":
                self._drop(extent, first, freed, Departure("host", reason, now))
                continue
            for rank in range(group.ranks):
                ledger.cut_host(extent, rank, remaining, reason, to=Account.COPIED)
            if remaining == 0 and extent.has_file and self._nvme.is_open:
                extent.tokens = None  # the file's header has them
        ledger.reconsider(extent)

    def _drop(self, extent: Extent, num_blocks: int, num_bytes: int, departure: Departure) -> None:
        ledger = self._ledger
        if ledger.has_nvme and ledger.group_of(extent).persistent:
            unwritten = departure.reason if self._nvme.is_writable else Reason.NVME_DEGRADED
            ledger.counts.dropped_unwritten_bytes[unwritten] += num_bytes
        ledger.cut_extent(extent, num_blocks, departure)
        if num_blocks == 0:
            self._writes.forget_unwritten(extent)

    def _drop_oldest_staged(self, slot_bytes: int) -> bool:
        ledger = self._ledger
        for block in ledger.staged.values():
            if ledger.groups[block.group].slot_bytes == slot_bytes:
                ledger.drop_staged(block.key)
                return True
        return False

    def _seal_for_room(self, slot_bytes: int, now: float) -> None:
        """What still grows can't be evicted before it is on NVMe: get it on its way, for the next who needs room."""
        ledger = self._ledger
        for extent in [e for e in ledger.unsealed if ledger.group_of(e).slot_bytes == slot_bytes and not e.holds]:
            self._writes.seal(extent, now)


def parts_in_host(ledger: Ledger, extent: Extent, remaining: int, longest: int) -> list[tuple[int, int, str]]:
    """What becomes of the host copies of blocks [remaining, longest): first, end, and the tier where they still are.
    The last ones first, which are nowhere else."""
    if extent.has_file:
        return [(remaining, longest, "nvme" if extent.nvme is FileState.PRESENT else "disk")]
    stay = min(longest, max(remaining, ledger.devices.blocks(extent)))
    parts = [(stay, longest, "dropped"), (remaining, stay, "gpu")]
    return [(first, end, to) for first, end, to in parts if first < end]


def _is_below(rank: Rank | None, victim: Rank | None) -> bool:
    return rank is not None and victim is not None and rank < victim
