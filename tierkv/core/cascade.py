"""Movement between the tiers: host -> nvme -> disk -> dropped, and back up.

The front door of what decides who leaves when room is needed, which sealed extents are written and when, and which
blocks are read back. The workers carry it out and report. All ranks of an extent go together.

    HostRoom       who leaves host memory               TierFiles    the files of a tier, and how it is
    WriteQueue     host memory -> NVMe, by Admission    TierRoom     room in a tier of files
    NvmeEviction   who leaves NVMe, and where to        Leaving      what becomes of what leaves such a tier
    Demotions      NVMe -> disk tier                    Reads        files -> host memory
    DiskEviction   who leaves the disk tier             Losses       what goes from every tier at once
    FoundOnDisk    what other nodes put there           Changes      who is to be told
    BreakEven      what is worth reading from disk    DeviceTier   the pools of GPUs, above host memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count

from tierkv.core.admission import Admission
from tierkv.core.break_even import BreakEven
from tierkv.core.changes import Changes
from tierkv.core.demotions import Demotions
from tierkv.core.device_tier import DeviceTier
from tierkv.core.disk_eviction import DiskEviction
from tierkv.core.extent import Extent
from tierkv.core.found_on_disk import FoundOnDisk
from tierkv.core.host_room import HostRoom, Room
from tierkv.core.instructions import OpFailed, PurgeScope, ReadDone, RemoveDone, StillUsed, TierHealth, WriteDone
from tierkv.core.ledger import Group, Ledger
from tierkv.core.losses import Losses
from tierkv.core.nvme_eviction import NvmeEviction
from tierkv.core.reads import Reads
from tierkv.core.reasons import Reason
from tierkv.core.tier_books import DiskBooks, NvmeBooks
from tierkv.core.tier_files import TierFiles
from tierkv.core.tier_leaving import Leaving
from tierkv.core.tier_room import TierRoom
from tierkv.core.value.order import Rank
from tierkv.core.write_queue import WriteQueue


class Cascade:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        next_op = count(1).__next__
        self.changes = changes = Changes(ledger)
        self.admission = Admission(ledger)
        self.nvme = nvme = TierFiles(ledger, NvmeBooks(ledger), next_op)
        self.disk = disk = TierFiles(ledger, DiskBooks(ledger), next_op)
        leaving_nvme = Leaving(ledger, nvme, changes)
        self.nvme_eviction = NvmeEviction(ledger, nvme, leaving_nvme)
        self._nvme_room = TierRoom(ledger, nvme, self.nvme_eviction.evict)
        self.disk_eviction = DiskEviction(ledger, disk, Leaving(ledger, disk, changes))
        self._disk_room = TierRoom(ledger, disk, self.disk_eviction.evict)
        self.writes = WriteQueue(ledger, nvme, self._nvme_room, self.admission, changes)
        self.demotions = Demotions(ledger, nvme, disk, self._disk_room, leaving_nvme, self.writes, changes)
        self.nvme_eviction.demote = self.demotions.begin
        self.nvme_eviction.why_no_demotion = self.demotions.why_not
        self._host = HostRoom(ledger, nvme, self.writes)
        self.devices = DeviceTier(ledger, self._host, self.writes, changes, next_op)
        self._host.drop_kid = self.devices.drop_only_copy
        self.losses = Losses(
            ledger,
            nvme,
            disk,
            leaving_nvme,
            self.disk_eviction,
            self.writes,
            self.demotions,
            self._host,
            self.devices,
            changes,
        )
        self.reads = Reads(ledger, nvme, disk, self._host, self.losses, changes, next_op)
        self.break_even = BreakEven(ledger, disk, self.reads)
        self.found = FoundOnDisk(ledger, disk, nvme, self.disk_eviction, self.demotions, self.losses, changes)
        self.demotions.lose_source = self.losses.source_is_damaged
        self.demotions.on_files = self.found.demoted

    def hold_back(self, on_nvme: Callable[[Group], bool], on_disk: Callable[[Group], bool]) -> None:
        """Nothing of these groups is written to the tier, or taken from what is found there, for now."""
        self.writes.held_back = lambda extent: on_nvme(self._ledger.group_of(extent))
        self.demotions.held_back = lambda extent: on_disk(self._ledger.group_of(extent))
        self.found.is_covered = on_disk

    # ---- room

    def make_room(
        self, slot_bytes: int, count: int, now: float, rank_of_new: Callable[[int], Rank | None] = lambda index: None
    ) -> Room:
        """In host memory, see HostRoom."""
        return self._host.make_room(slot_bytes, count, now, rank_of_new)

    def make_ready(self, slot_bytes: int, count: int, now: float, rank_of_new: Rank | None) -> None:
        self._host.make_ready(slot_bytes, count, now, rank_of_new)

    def leave_host(self, extent: Extent, remaining: int, now: float, reason: Reason = Reason.EVICTED) -> None:
        self._host.leave(extent, remaining, now, reason)

    def send_off(self, victim: Extent, tier: str, now: float, reason: Reason) -> None:
        """From a tier of files, which it may leave."""
        if tier == "disk":
            self.disk_eviction.leave(victim, now, reason)
        else:
            self.nvme_eviction.send_off(victim, now, reason)

    def files_of(self, tier: str) -> TierFiles:
        return self.disk if tier == "disk" else self.nvme

    def shrink(self, now: float, *, at_once: bool = False) -> None:
        self._nvme_room.shrink(now, at_once=at_once)
        self._disk_room.shrink(now)

    @property
    def is_behind(self) -> bool:
        """`shrink` has more to evict."""
        return self._nvme_room.is_behind or self._disk_room.is_behind

    # ---- down and up

    def seal(self, extent: Extent, now: float) -> None:
        self.writes.seal(extent, now)

    def pump(self, now: float) -> None:
        """Issue what may be issued: reads first, since somebody waits for them."""
        self.reads.pump(now)
        self.writes.pump(now)
        self.demotions.pump(now)

    def want_read(self, extent: Extent, rank: int, blocks: int, now: float) -> None:
        """From files, or where there are none that can be read, from a device."""
        is_in_files = extent.has_file and self.reads.is_readable(extent)
        if not is_in_files and self._ledger.devices.longest_of_rank(extent, rank) > len(extent.slots[rank]):
            self.devices.fetch(extent, rank, blocks, now)
        else:
            self.reads.want(extent, rank, blocks, now)

    def is_coming(self, extent: Extent, rank: int) -> bool:
        """To host memory, from a disk that answers or from a device."""
        return self.devices.is_fetching(extent, rank) or (
            self.reads.is_readable(extent) and self.reads.is_reading(extent, rank)
        )

    def retry(self, now: float) -> None:
        self.nvme.retry(now)
        self.disk.retry(now)

    def next_retry(self) -> float | None:
        times = [time for time in (self.nvme.next_retry(), self.disk.next_retry()) if time is not None]
        return min(times, default=None)

    # ---- reports of the workers

    def write_done(self, report: WriteDone, now: float) -> None:
        self.writes.write_done(report, now)
        self.pump(now)

    def demoted(self, report: WriteDone, now: float) -> None:
        self.demotions.write_done(report, now)
        self.pump(now)

    def read_done(self, report: ReadDone, now: float) -> None:
        if self.reads.done(report, now):
            self.pump(now)

    def remove_done(self, report: RemoveDone, now: float) -> None:
        gone = self.nvme.remove_done(report)
        if gone is not None:
            self.writes.file_gone(gone.extent, now)
            self.pump(now)

    def removed_from_disk(self, report: RemoveDone | StillUsed, now: float) -> None:
        gone = self.disk.remove_done(report)
        if gone is not None:
            self.found.removed(gone, now)
            self.changes.note(gone.extent)
            self.pump(now)

    def op_failed(self, report: OpFailed, now: float) -> None:
        self.nvme.remove_failed(report, now)
        if self.nvme.writing(report.op) is not None:
            self.writes.write_failed(report.op, report.reason)
            self.pump(now)
        self.read_done(ReadDone(op=report.op, valid=0, seconds=0.0, reason=report.reason), now)

    def op_failed_on_disk(self, report: OpFailed, now: float) -> None:
        self.disk.remove_failed(report, now)
        if self.disk.writing(report.op) is not None:
            self.demotions.write_failed(report.op, report.reason, now)
            self.pump(now)
        self.read_done(ReadDone(op=report.op, valid=0, seconds=0.0, reason=report.reason), now)

    def worker_died(self, now: float) -> None:
        self._ledger.counts.worker_deaths += 1
        self.nvme.is_worker_up = False
        self.reads.worker_died(self.nvme, now)
        self.writes.worker_died()

    def disk_worker_died(self, now: float) -> None:
        self._ledger.counts.disk_worker_deaths += 1
        self.disk.is_worker_up = False
        self.reads.worker_died(self.disk, now)
        self.demotions.worker_died(now)

    def worker_started(self, now: float) -> None:
        self.nvme.worker_started()
        self.pump(now)

    def disk_worker_started(self, now: float) -> None:
        self.disk.worker_started()
        self.pump(now)

    def health(self, report: TierHealth, now: float) -> None:
        nvme = self.nvme
        was_writable = nvme.is_writable
        nvme.health(report, now)
        if not nvme.is_readable:
            self.reads.stop(nvme)
        if was_writable and not nvme.is_writable:
            self.writes.give_up_all(nvme.why_not_writable or Reason.NVME_DEGRADED)
        if not was_writable and nvme.is_writable:
            self.writes.tier_is_well_again(now)
        self.shrink(now)
        self.pump(now)

    def disk_health(self, report: TierHealth, now: float) -> None:
        disk = self.disk
        disk.health(report, now)
        if not disk.is_readable:
            self.reads.stop(disk)
        if not disk.is_writable:
            self.demotions.give_up_all(Reason.DISK_DEGRADED, now)
        self.shrink(now)
        self.pump(now)

    # ---- purging

    def purge(self, extent: Extent) -> None:
        """Nothing of it is matched, read or written from here on."""
        self.reads.want_no_more(extent)
        self.losses.purge(extent)

    def swept(self, files: TierFiles, extents: Iterable[Extent], scope: PurgeScope, now: float) -> None:
        """Their files in this tier are gone, and all else there that is in scope."""
        if files is self.disk:
            self.found.purged(scope)
        for extent in files.swept(extents):
            if files is self.nvme:
                self.writes.file_gone(extent, now)
            else:
                self.changes.note(extent)
            self.pump(now)

    def is_to_sweep(self, extent: Extent) -> bool:
        return self.nvme.is_to_sweep(extent) or self.disk.is_to_sweep(extent)

    def is_retried(self, extent: Extent) -> bool:
        """A removal of its files has failed, and is to be tried again."""
        return self.nvme.is_retried(extent) or self.disk.is_retried(extent)

    def is_at_rest(self, extent: Extent) -> bool:
        """No operation of a worker's is about it."""
        return self.nvme.is_at_rest(extent) and self.disk.is_at_rest(extent) and not extent.reading

    # ---- for the audit

    def slots_being_read(self) -> Iterator[tuple[int, str]]:
        return self.reads.slots()

    def extents_in_operations(self) -> set[Extent]:
        return self.extents_with_moving_files() | self.devices.extents()

    def extents_with_moving_files(self) -> set[Extent]:
        return self.nvme.extents_in_operations() | self.disk.extents_in_operations() | self.reads.extents()

    def staying_bytes_of(self, group: Group) -> tuple[int, int]:
        """In files and reserved, on NVMe and in the disk tier, less what is on its way out. Looks at every extent."""
        return self.nvme.staying_bytes_of(group), self.disk.staying_bytes_of(group)
