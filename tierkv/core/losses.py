"""What goes from every tier at once: because it is bad, has expired, or is purged."""

from __future__ import annotations

from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.host_room import HostRoom
from tierkv.core.ledger import Departure, Ledger
from tierkv.core.nvme_eviction import NvmeEviction
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.tier_files import TierFiles
from tierkv.core.write_queue import WriteQueue


class Losses:
    def __init__(
        self,
        ledger: Ledger,
        nvme: TierFiles,
        eviction: NvmeEviction,
        writes: WriteQueue,
        host: HostRoom,
        changes: Changes,
    ) -> None:
        self._ledger = ledger
        self._nvme = nvme
        self._eviction = eviction
        self._writes = writes
        self._host = host
        self._changes = changes

    # ---- expired

    def may_expire(self, extent: Extent) -> bool:
        """Whether nobody uses it just now, nothing hangs on it, and it is neither pinned nor on its way anywhere."""
        if not extent.in_tree or not extent.sealed or extent.holds or extent.reading:
            return False
        if extent.nvme not in (FileState.ABSENT, FileState.PRESENT) or self._ledger.pinned(extent):
            return False
        return (self._nvme.can_remove or extent.nvme is FileState.ABSENT) and not any(
            branch.kids for branch in extent.branch_points
        )

    def expire(self, extent: Extent, now: float) -> None:
        """Out of every tier. It `may_expire`."""
        if extent.nvme is not FileState.PRESENT:
            self._host.leave(extent, 0, now, Reason.EXPIRED)
            return
        if extent.longest_host_blocks:
            self._host.leave(extent, 0, now, Reason.EXPIRED)
        self._eviction.leave(extent, now, Reason.EXPIRED)

    # ---- bad

    def file_lost(self, extent: Extent, now: float) -> None:
        """Somebody else removed it: what is counted as used follows what is there."""
        if extent.nvme is FileState.PRESENT:
            self._ledger.counts.drift_bytes += extent.nvme_bytes
            self.lose_file(extent, Reason.NOT_FOUND, now)

    def lose_file(self, extent: Extent, reason: Reason, now: float) -> None:
        """The file of some rank is not there or not right: the extent's files go, and what only they held."""
        ledger = self._ledger
        ledger.counts.damaged_extents[reason] += 1
        if extent.nvme is not FileState.PRESENT:
            return
        self._nvme.lose(extent, FileEvent.LOST, reason, Reason.REPORTED_BAD if reason is Reason.REPORTED_BAD else None)
        self.cut_safely(extent, extent.host_blocks, Departure("nvme", reason, now))
        self._changes.read_problems.setdefault(extent, reason)
        self._writes.mark_unwritten(extent, at_once=True)
        self._changes.note(extent)

    def cut_safely(self, extent: Extent, num_blocks: int, departure: Departure) -> None:
        """Cut an extent that others may hold. It never grows again, lest they find another branch's blocks in it."""
        if num_blocks < extent.num_blocks:
            self._ledger.cut_extent(extent, num_blocks, departure)
        if extent.in_tree and not extent.sealed:
            self._writes.seal(extent, departure.now)

    def condemn(self, extent: Extent, num_blocks: int, reason: Reason, now: float) -> None:
        """Blocks from `num_blocks` on are bad, wherever they are: no tier keeps them."""
        if extent.nvme is FileState.PRESENT:
            self.lose_file(extent, reason, now)
        else:
            self._ledger.counts.damaged_extents[reason] += 1
            if extent.nvme is FileState.WRITING:
                self._nvme.condemn(extent)
            elif extent.nvme is FileState.QUEUED and num_blocks == 0:
                self._writes.give_up(extent, reason)
        if extent.in_tree:
            self.cut_safely(extent, min(num_blocks, extent.num_blocks), Departure("host", reason, now))
        self._changes.read_problems.setdefault(extent, reason)
        self._changes.note(extent)

    def discard(self, extent: Extent) -> None:
        """Remove the files of an extent that recovery could not use."""
        self._ledger.counts.damaged_extents[Reason.INCOMPLETE_RANKS] += 1
        self._nvme.lose(extent, FileEvent.LOST, None)

    # ---- purged

    def purge(self, extent: Extent) -> None:
        """Nothing of it is matched, read or written from here on. A file that is there is left to the sweep; one that
        is being written is removed when that has ended."""
        extent.purged = True
        self._writes.forget_unwritten(extent)
        if extent.nvme is FileState.QUEUED:
            self._writes.give_up(extent, Reason.PURGED)
        elif extent.nvme is FileState.PRESENT:
            self._nvme.leave_to_sweep(extent)
        if extent.in_tree:
            self._ledger.cut_extent(extent, 0, None)
        self._changes.note(extent)
