"""Host memory -> NVMe: what is sealed is written, as admission, room and the drive permit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from tierkv.core.admission import Admission
from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.file_ops import Ended
from tierkv.core.grants import Dropped, NeverHit
from tierkv.core.instructions import Write, WriteDone
from tierkv.core.ledger import Group, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.tier_files import TierFiles
from tierkv.core.tier_room import TierRoom

IN_VAIN = 10
"""A group that has filled NVMe so many times over without a single hit is told of."""

_TURNED_DOWN = (Reason.WRITE_BUDGET, Reason.WORTH_LESS)
_HOLD = "write"


class WriteQueue:
    def __init__(
        self, ledger: Ledger, files: TierFiles, room: TierRoom, admission: Admission, changes: Changes
    ) -> None:
        self._ledger = ledger
        self._files = files
        self._room = room
        self._admission = admission
        self._changes = changes
        self._queue: deque[Extent] = deque()
        self._sizes: dict[Extent, int] = {}  # in host memory, of those that wait
        self.num_bytes = 0
        """Of host memory, that wait."""
        self._unwritten: dict[Extent, bool] = {}  # -> whether it is written again as soon as its file is removed
        self.held_back: Callable[[Extent], bool] = lambda extent: False
        """Not to be written for now."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def num_waiting(self) -> int:
        """Extents."""
        return len(self._sizes)

    # ---- into the queue

    def seal(self, extent: Extent, now: float) -> None:
        """Freeze the committed length; a persistent extent goes to the write queue."""
        ledger = self._ledger
        extent.sealed = True
        ledger.unsealed.pop(extent, None)
        if ledger.has_nvme and ledger.group_of(extent).persistent:
            self._admit(extent, now)
        ledger.reconsider(extent)
        self._changes.progressed.append(extent)

    def _admit(self, extent: Extent, now: float) -> None:
        files = self._files
        if not files.is_writable:
            self.mark_unwritten(extent)
            self._count_dropped(extent, files.why_not_writable or Reason.NVME_DEGRADED)
            return
        self._unwritten.pop(extent, None)
        if not self._admission.may_write(extent, now):
            extent.why_not_there = Reason.WRITE_BUDGET
            for given_up in self._admission.wait(extent, now):
                self._count_dropped(given_up, Reason.WRITE_BUDGET)
            return
        self._enqueue(extent)
        self.pump(now)  # and no reads: whoever seals is in the middle of a step, and reads make room

    def used_again(self, extent: Extent, now: float) -> None:
        """A lease was granted on it. If admission kept it from NVMe, it may be worth more now; and so may one that was
        brought back from the disk tier."""
        is_back = extent.disk is FileState.PRESENT and self._files.is_writable
        if (is_back or extent.why_not_there in _TURNED_DOWN) and self._may_be_written_again(extent):
            self._admit(extent, now)

    def write_pinned(self, extent: Extent, now: float) -> None:
        """It has no file on NVMe, and is to have one."""
        if self._files.is_writable and self._may_be_written_again(extent):
            self._admit(extent, now)

    def _admit_waiting(self, now: float) -> None:
        """What the budget has room for meanwhile."""
        may_be_written = self._may_be_written_again
        while self._files.is_writable and (extent := self._admission.next_due(may_be_written, now)) is not None:
            self._enqueue(extent)

    def next_admission(self) -> float | None:
        """When the budget has room for what waits, if the tier could write it."""
        files = self._files
        can_write = files.is_ready and files.is_writable
        return self._admission.next_wakeup() if can_write else None

    def _enqueue(self, extent: Extent) -> None:
        extent.move(FileEvent.ADMIT)
        extent.why_not_there = None
        self._queue.append(extent)
        self._waits(extent)

    def _waits(self, extent: Extent) -> None:
        group = self._ledger.group_of(extent)
        size = self._sizes[extent] = group.ranks * extent.num_blocks * group.slot_bytes
        self.num_bytes += size

    def _waits_no_more(self, extent: Extent) -> None:
        self.num_bytes -= self._sizes.pop(extent, 0)

    # ---- out of it

    def pump(self, now: float) -> None:
        """Issue what may be issued."""
        files = self._files
        if not files.is_ready:
            return
        self._admit_waiting(now)
        blocked: list[Extent] = []
        while self._queue and files.is_writable and files.writes_in_flight < self._ledger.limits.inflight_writes:
            extent = self._queue[0]
            if extent.nvme is not FileState.QUEUED:
                self._queue.popleft()
                continue
            if files.owns_name(extent) or self.held_back(extent):
                blocked.append(self._queue.popleft())  # or the older file's removal would take this one's
                continue
            growth = files.need(extent) - extent.nvme_bytes
            with self._ledger.group_of(extent).share.asking(nvme_bytes=growth):
                verdict = self._room.find(extent, now, lambda new: self._admission.is_worth_room(new, now))
            if verdict is Reason.PENDING:
                break
            self._queue.popleft()
            if verdict is None:
                self._issue(extent)
            else:
                self.give_up(extent, verdict)
        self._queue.extendleft(reversed(blocked))

    def _issue(self, extent: Extent) -> None:
        ledger = self._ledger
        group = ledger.group_of(extent)
        tokens = extent.tokens
        assert tokens is not None

        def make(op: int, rank: int) -> Write:
            return Write(
                op=op,
                fingerprint=group.spec.identity.weights,
                group=extent.group,
                rank=rank,
                key=extent.key,
                parent=extent.parent,
                first_token=extent.first_token,
                block_tokens=group.block_tokens,
                block_bytes=group.block_bytes,
                keys=extent.keys,
                tokens=tokens,
                slots=list(extent.slots[rank]),
                created=extent.created,
                last_used=extent.last_used,
                hits=extent.hits,
                extras=dict(extent.extras),
            )

        self._waits_no_more(extent)
        self._files.begin_write(extent, make)
        ledger.hold(extent, _HOLD, extent.num_blocks)

    def write_done(self, report: WriteDone, now: float) -> None:
        extent = self._files.writing(report.op)
        if extent is None:
            return
        counts = self._ledger.counts
        counts.nvme_written_bytes += report.file_bytes
        self._admission.budget.note_written(report.file_bytes, now)
        counts.nvme_write_seconds += report.seconds
        self._note_written(self._ledger.group_of(extent), report.file_bytes)
        self._finish(self._files.end_write(report.op, report.file_bytes))

    def _note_written(self, group: Group, num_bytes: int) -> None:
        before, group.written_bytes = group.written_bytes, group.written_bytes + num_bytes
        suspicious = IN_VAIN * self._ledger.limits.nvme_bytes
        if not group.was_hit and before <= suspicious < group.written_bytes:
            self._ledger.effects.append(NeverHit(group=group.spec.group, written_bytes=group.written_bytes))

    def write_failed(self, op: int, reason: Reason) -> None:
        self._finish(self._files.end_write(op, 0, reason))

    def _finish(self, ended: Ended | None) -> None:
        if ended is None:
            return
        ledger, files, extent = self._ledger, self._files, ended.extent
        if ended.reason is not None:
            self._count_dropped(extent, ended.reason)
            self.mark_unwritten(extent)
        if files.finish_write(ended):
            ledger.counts.flushed_extents += 1
            if files.is_condemned(extent) or not extent.in_tree:
                self.mark_unwritten(extent, at_once=True)  # what is left of it is good
                files.lose(extent, FileEvent.LOST, Reason.REPORTED_BAD)
        ledger.unhold(extent, _HOLD)
        self._changes.note(extent)

    # ---- what is not written

    def give_up(self, extent: Extent, reason: Reason) -> None:
        """A queued extent will not be written."""
        self._waits_no_more(extent)
        self._count_dropped(extent, reason)
        self._admission.give_back(extent)
        self._files.give_up_write(extent, reason)
        self._changes.note(extent)

    def _count_dropped(self, extent: Extent, reason: Reason) -> None:
        ledger = self._ledger
        num_bytes = ledger.group_of(extent).ranks * extent.num_blocks * ledger.group_of(extent).slot_bytes
        ledger.counts.dropped_writes[reason] += 1
        extent.why_not_there = reason
        ledger.effects.append(
            Dropped(group=extent.group, key=extent.key, blocks=extent.num_blocks, num_bytes=num_bytes, reason=reason)
        )

    def mark_unwritten(self, extent: Extent, *, at_once: bool = False) -> None:
        """Sealed, meant for NVMe, not there for a cause that may pass: tried again when the tier is well again. Not
        `at_once` after a write that failed, for the next one may fail as well, without end."""
        if extent.in_tree:
            self._unwritten[extent] = at_once

    def forget_unwritten(self, extent: Extent) -> None:
        self._unwritten.pop(extent, None)

    def file_gone(self, extent: Extent, now: float) -> None:
        """Its files are removed. If it should have some, they are written now."""
        if self._unwritten.get(extent) and self._files.is_writable and self._may_be_written_again(extent):
            self._admit(extent, now)
        self._changes.note(extent)

    def tier_is_well_again(self, now: float) -> None:
        for extent in list(self._unwritten):
            if not extent.in_tree:
                del self._unwritten[extent]
            elif self._may_be_written_again(extent):
                self._admit(extent, now)
            else:
                self._unwritten[extent] = True

    def _may_be_written_again(self, extent: Extent) -> bool:
        return (
            extent.in_tree
            and extent.sealed
            and extent.nvme is FileState.ABSENT
            and self._ledger.group_of(extent).persistent
            and extent.tokens is not None
            and extent.host_blocks == extent.num_blocks
        )

    def dirty_extents(self) -> Iterator[Extent]:
        """What is meant to be on NVMe and is not flushed."""
        ledger = self._ledger
        if not ledger.has_nvme:
            return
        for extent in ledger.unsealed:
            if ledger.group_of(extent).persistent:
                yield extent
        seen: set[Extent] = set()
        for extent in self._queue:
            if extent.nvme is FileState.QUEUED and extent not in seen:
                seen.add(extent)
                yield extent
        for extent in self._files.extents_written():
            if extent not in seen:
                seen.add(extent)
                yield extent

    def order_by_depth(self) -> None:
        """At shutdown the budget may end at any write: parents go before what hangs on them."""
        self._queue = deque(sorted(self._queue, key=lambda extent: extent.first_token))

    def give_up_all(self, reason: Reason) -> None:
        queue, self._queue = self._queue, deque()
        for extent in queue:
            if extent.nvme is FileState.QUEUED:
                self.give_up(extent, reason)
                if reason is not Reason.SHUTDOWN:
                    self.mark_unwritten(extent)

    def worker_died(self) -> None:
        """What it did before it died is unknown: a write that is given up later must be undone on disk."""
        ledger = self._ledger
        for extent in self._files.worker_died():
            ledger.unhold(extent, _HOLD)
            if extent.in_tree and not self._files.is_condemned(extent):
                self._queue.appendleft(extent)
                self._waits(extent)
            else:
                self.mark_unwritten(extent, at_once=True)
                self.give_up(extent, Reason.WORKER_DIED)
            ledger.reconsider(extent)
