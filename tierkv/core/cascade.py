"""Movement between the tiers: host -> nvme -> dropped, and back up.

The front door of what decides who leaves when room is needed, which sealed extents are written and when, and which
blocks are read back. The storage worker carries it out and reports. All ranks of an extent go together.

    HostRoom       who leaves host memory                 TierFiles    the files of a tier, and how it is
    WriteQueue     host memory -> NVMe, with Admission    TierRoom     room in a tier of files
    NvmeEviction   who leaves NVMe                        Reads        files -> host memory
    Losses         what goes from every tier at once      Changes      who is to be told
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count

from tierkv.core.admission import Admission
from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.host_room import HostRoom, Room
from tierkv.core.instructions import OpFailed, ReadDone, RemoveDone, TierHealth, WriteDone
from tierkv.core.ledger import Ledger
from tierkv.core.losses import Losses
from tierkv.core.nvme_eviction import NvmeEviction
from tierkv.core.reads import Reads
from tierkv.core.reasons import Reason
from tierkv.core.tier_books import NvmeBooks
from tierkv.core.tier_files import TierFiles
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
        self._nvme_eviction = NvmeEviction(ledger, nvme, changes)
        self._nvme_room = TierRoom(ledger, nvme, self._nvme_eviction.evict)
        self.writes = WriteQueue(ledger, nvme, self._nvme_room, self.admission, changes)
        self._host = HostRoom(ledger, nvme, self.writes)
        self.losses = Losses(ledger, nvme, self._nvme_eviction, self.writes, self._host, changes)
        self.reads = Reads(ledger, nvme, self._host, self.losses, changes, next_op)

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

    def leave_nvme(self, victim: Extent, now: float, reason: Reason = Reason.EVICTED) -> None:
        self._nvme_eviction.leave(victim, now, reason)

    def shrink(self, now: float, *, at_once: bool = False) -> None:
        self._nvme_room.shrink(now, at_once=at_once)

    @property
    def is_behind(self) -> bool:
        """`shrink` has more to evict."""
        return self._nvme_room.is_behind

    # ---- down and up

    def seal(self, extent: Extent, now: float) -> None:
        self.writes.seal(extent, now)

    def pump(self, now: float) -> None:
        """Issue what may be issued: reads first, since somebody waits for them."""
        self.reads.pump(now)
        self.writes.pump(now)

    def want_read(self, extent: Extent, rank: int, blocks: int, now: float) -> None:
        self.reads.want(extent, rank, blocks, now)

    # ---- reports of the storage worker

    def write_done(self, report: WriteDone, now: float) -> None:
        self.writes.write_done(report, now)
        self.pump(now)

    def read_done(self, report: ReadDone, now: float) -> None:
        if self.reads.done(report, now):
            self.pump(now)

    def remove_done(self, report: RemoveDone, now: float) -> None:
        extent = self.nvme.remove_done(report)
        if extent is not None:
            self.writes.file_gone(extent, now)
            self.pump(now)

    def op_failed(self, report: OpFailed, now: float) -> None:
        self.nvme.remove_failed(report, now)
        if self.nvme.writing(report.op) is not None:
            self.writes.write_failed(report.op, report.reason)
            self.pump(now)
        self.read_done(ReadDone(op=report.op, valid=0, seconds=0.0, reason=report.reason), now)

    def worker_died(self, now: float) -> None:
        self._ledger.counts.worker_deaths += 1
        self.nvme.is_worker_up = False
        self.reads.worker_died(now)
        self.writes.worker_died()

    def worker_started(self, now: float) -> None:
        self.nvme.worker_started()
        self.pump(now)

    def health(self, report: TierHealth, now: float) -> None:
        nvme = self.nvme
        was_writable = nvme.is_writable
        nvme.health(report, now)
        if not nvme.is_readable:
            self.reads.stop()
        if was_writable and not nvme.is_writable:
            self.writes.give_up_all(nvme.why_not_writable or Reason.NVME_DEGRADED)
        if not was_writable and nvme.is_writable:
            self.writes.tier_is_well_again(now)
        self.shrink(now)
        self.pump(now)

    # ---- purging

    def purge(self, extent: Extent) -> None:
        """Nothing of it is matched, read or written from here on."""
        self.reads.want_no_more(extent)
        self.losses.purge(extent)

    def swept(self, extents: Iterable[Extent], now: float) -> None:
        """Their files are gone."""
        for extent in self.nvme.swept(extents):
            self.writes.file_gone(extent, now)
            self.pump(now)

    def is_at_rest(self, extent: Extent) -> bool:
        """No operation of the worker's is about it."""
        return self.nvme.is_at_rest(extent) and not extent.reading

    # ---- for the audit

    def slots_being_read(self) -> Iterator[tuple[int, str]]:
        return self.reads.slots()

    def extents_in_operations(self) -> set[Extent]:
        return self.nvme.extents_in_operations() | self.reads.extents()
