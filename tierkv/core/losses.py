"""What goes from every tier at once: because it is bad, has expired, or is purged."""

from __future__ import annotations

from tierkv.core.changes import Changes
from tierkv.core.demotions import Demotions
from tierkv.core.device_tier import DeviceTier
from tierkv.core.disk_eviction import DiskEviction
from tierkv.core.extent import Extent
from tierkv.core.host_room import HostRoom
from tierkv.core.journal import Account
from tierkv.core.ledger import Departure, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.tier_files import TierFiles
from tierkv.core.tier_leaving import Leaving
from tierkv.core.write_queue import WriteQueue

_NOT_OURS = (Reason.NOT_FOUND, Reason.KEY_MISMATCH)
"""Of a file in the disk tier: another node has removed it, or has put its own there."""


class Losses:
    def __init__(
        self,
        ledger: Ledger,
        nvme: TierFiles,
        disk: TierFiles,
        leaving_nvme: Leaving,
        disk_eviction: DiskEviction,
        writes: WriteQueue,
        demotions: Demotions,
        host: HostRoom,
        devices: DeviceTier,
        changes: Changes,
    ) -> None:
        self._ledger = ledger
        self._nvme = nvme
        self._disk = disk
        self._leaving_nvme = leaving_nvme
        self._disk_eviction = disk_eviction
        self._writes = writes
        self._demotions = demotions
        self._host = host
        self._devices = devices
        self._changes = changes

    # ---- expired

    def may_expire(self, extent: Extent) -> bool:
        """Whether nobody uses it just now, nothing hangs on it, and it is neither pinned nor on its way anywhere."""
        if not extent.in_tree or not extent.sealed or extent.holds or extent.reading:
            return False
        for files in (self._nvme, self._disk):
            state = files.books.state(extent)
            if state not in (FileState.ABSENT, FileState.PRESENT):
                return False
            if state is FileState.PRESENT and not files.can_remove:
                return False
        return not self._ledger.pinned(extent) and not extent.has_kids

    def expire(self, extent: Extent, now: float) -> None:
        """Out of every tier. It `may_expire`."""
        self._devices.leave_all(extent, now, Reason.EXPIRED)
        if extent.longest_host_blocks:
            self._host.leave(extent, 0, now, Reason.EXPIRED)
        if extent.nvme is FileState.PRESENT:
            self._leaving_nvme.leave(extent, now, Reason.EXPIRED)
        if extent.disk is FileState.PRESENT:
            self._disk_eviction.leave(extent, now, Reason.EXPIRED)

    # ---- bad

    def file_lost(self, extent: Extent, now: float) -> None:
        """Somebody else removed it: what is counted as used follows what is there."""
        if extent.nvme is FileState.PRESENT:
            self._ledger.counts.drift_bytes += extent.nvme_bytes
            self.lose_file(extent, Reason.NOT_FOUND, now)

    def lose_file(self, extent: Extent, reason: Reason, now: float, aside: Reason | None = None) -> None:
        """The file of some rank on NVMe is not there or not right: the extent's files there go, and what only they
        held. `aside`: they are kept for a look."""
        self._ledger.counts.damaged_extents[reason] += 1
        if extent.nvme is not FileState.PRESENT:
            return
        self._demotions.cancel(extent, reason)
        aside = Reason.REPORTED_BAD if reason is Reason.REPORTED_BAD else aside
        self._nvme.lose(extent, FileEvent.LOST, reason, aside)
        self._file_is_lost(extent, "nvme", reason, now)
        self._writes.mark_unwritten(extent, at_once=True)
        self._changes.note(extent)

    def source_is_damaged(self, extent: Extent, reason: Reason, now: float) -> None:
        """Found while its file on NVMe was copied to the disk tier."""
        self.lose_file(extent, reason, now, None if reason is Reason.NOT_FOUND else reason)

    def lose_disk_copy(self, extent: Extent, reason: Reason, now: float) -> int:
        """The file of some rank in the disk tier is not there or not right. Where it is gone, or somebody else's, that
        is all. The bytes of the files that may be there and are of no use any more."""
        if reason not in _NOT_OURS:
            self._ledger.counts.damaged_extents[reason] += 1
        if extent.disk is not FileState.PRESENT:
            return 0
        left = 0
        if reason in _NOT_OURS:
            left = self._disk.forget(extent)
            target = Account.COPIED if extent.has_file else Account.DROPPED
            self._disk.books.post(extent, Account.DISK, target, left, reason)
        else:
            aside = Reason.REPORTED_BAD if reason is Reason.REPORTED_BAD else None
            self._disk.lose(extent, FileEvent.LOST, reason, aside)
        self._file_is_lost(extent, "disk", reason, now)
        self._changes.note(extent)
        return left

    def _file_is_lost(self, extent: Extent, tier: str, reason: Reason, now: float) -> None:
        if not extent.has_file:
            self.cut_safely(extent, self._ledger.devices.memory_blocks(extent), Departure(tier, reason, now))
            self._changes.read_problems.setdefault(extent, reason)

    def cut_safely(self, extent: Extent, num_blocks: int, departure: Departure) -> None:
        """Cut an extent that others may hold. It never grows again, lest they find another branch's blocks in it."""
        if num_blocks < extent.num_blocks:
            self._ledger.cut_extent(extent, num_blocks, departure)
        if extent.in_tree and not extent.sealed:
            self._writes.seal(extent, departure.now)

    def condemn(self, extent: Extent, num_blocks: int, reason: Reason, now: float) -> None:
        """Blocks from `num_blocks` on are bad, wherever they are: no tier keeps them."""
        self._condemn_on_disk(extent, reason, now)
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

    def _condemn_on_disk(self, extent: Extent, reason: Reason, now: float) -> None:
        self._demotions.cancel(extent, reason)
        if extent.disk is FileState.PRESENT:
            self.lose_disk_copy(extent, reason, now)
        elif extent.disk is FileState.WRITING:
            self._disk.condemn(extent)

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
        self._demotions.cancel(extent, Reason.PURGED)
        if extent.disk is FileState.PRESENT:
            self._disk.leave_to_sweep(extent)
        if extent.in_tree:
            self._ledger.cut_extent(extent, 0, None)
        self._changes.note(extent)
