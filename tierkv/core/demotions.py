"""NVMe -> disk tier: an extent that is to leave NVMe is copied, whole and as it is, and its file on NVMe goes then.

    begin   queued; its bytes on NVMe count as on their way out
    issue   there is room on the disk, and few enough are under way
    done    the copy is flushed: the file on NVMe goes, unless somebody has used the extent meanwhile

Where the disk does not keep up, so that much of host memory waits for NVMe, what should leave NVMe is dropped instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.file_ops import Ended
from tierkv.core.instructions import Demote, WriteDone
from tierkv.core.ledger import Ledger
from tierkv.core.nvme_eviction import told_reason
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.tier_files import TierFiles
from tierkv.core.tier_leaving import Leaving
from tierkv.core.tier_room import TierRoom
from tierkv.core.tier_speed import TierSpeed
from tierkv.core.write_queue import WriteQueue

BEHIND_SHARE = 8
"""One part in so many of host memory may wait for NVMe before the disk counts as too slow; and as many writes as NVMe
takes at a time, whatever they come to."""

MOST_NAMES = 4_096
"""Names on the disk that are known to be another node's."""

_DAMAGED = frozenset(
    {
        Reason.CHECKSUM,
        Reason.SHORT_FILE,
        Reason.BAD_HEADER,
        Reason.IDENTITY_MISMATCH,
        Reason.LAYOUT_MISMATCH,
        Reason.KEY_MISMATCH,
        Reason.NOT_FOUND,
    }
)
"""What is wrong with the file on NVMe, not with the disk."""

_TRIED_ALONE = _DAMAGED | {Reason.NAME_TAKEN}


@dataclass(frozen=True, slots=True)
class _Begun:
    last_used: float  # at that time
    reason: Reason


class Demotions:
    def __init__(
        self,
        ledger: Ledger,
        nvme: TierFiles,
        disk: TierFiles,
        room: TierRoom,
        leaving_nvme: Leaving,
        writes: WriteQueue,
        changes: Changes,
    ) -> None:
        self._ledger = ledger
        self._nvme = nvme
        self._disk = disk
        self._room = room
        self._leaving_nvme = leaving_nvme
        self._writes = writes
        self._changes = changes
        self._queue: deque[Extent] = deque()
        self._begun: dict[Extent, _Begun] = {}
        self._taken: dict[bytes, None] = {}
        self._paused_until = 0.0
        self.speed = TierSpeed()
        self.lose_source: Callable[[Extent, Reason, float], None] = lambda extent, reason, now: None
        """Its file on NVMe was found damaged."""
        self.on_files: Callable[[Extent, Ended], None] = lambda extent, ended: None
        """Told which files there are after a demotion has ended."""
        self.held_back: Callable[[Extent], bool] = lambda extent: False

    def __len__(self) -> int:
        """Under way or waiting."""
        return len(self._begun)

    # ---- into the queue

    def why_not(self, extent: Extent, now: float) -> Reason | None:
        """Why it can't be demoted now."""
        if not self._disk.is_writable or now < self._paused_until or not self._ledger.limits.disk_bytes:
            return Reason.DISK_DEGRADED
        if self._is_behind:
            return Reason.DISK_BEHIND
        if extent.disk is not FileState.ABSENT:
            return Reason.PENDING  # an older copy of it is on its way out
        return Reason.NAME_TAKEN if extent.key in self._taken else None

    def begin(self, extent: Extent, now: float, reason: Reason) -> Reason | None:
        """None: it is on its way. Else why not."""
        why_not = self.why_not(extent, now)
        if why_not is not None:
            return why_not
        self._nvme.begin_leaving(extent)
        self._begun[extent] = _Begun(extent.last_used, reason)
        extent.move_on_disk(FileEvent.ADMIT)
        self._queue.append(extent)
        self._ledger.reconsider(extent)
        return None

    @property
    def _is_behind(self) -> bool:
        limits, waiting = self._ledger.limits, self._writes
        return waiting.num_bytes > limits.host_bytes // BEHIND_SHARE and waiting.num_waiting > limits.inflight_writes

    # ---- out of it

    def pump(self, now: float) -> None:
        """Issue what may be issued, and drop what the disk won't take in time."""
        disk = self._disk
        if self._is_behind:
            self.give_up_all(Reason.DISK_BEHIND, now)
        if not disk.is_ready:
            return
        blocked: list[Extent] = []
        while self._queue and disk.is_writable and disk.writes_in_flight < self._ledger.limits.disk_inflight:
            extent = self._queue[0]
            if extent.disk is not FileState.QUEUED:
                self._queue.popleft()
                continue
            if disk.owns_name(extent) or self.held_back(extent):
                blocked.append(self._queue.popleft())
                continue
            growth = disk.need(extent) - extent.disk_bytes
            with self._ledger.group_of(extent).share.asking(disk_bytes=growth):
                verdict = self._room.find(extent, now, lambda new: self._is_worth_room(new, now))
            if verdict is Reason.PENDING:
                break
            self._queue.popleft()
            if verdict is None:
                disk.begin_write(extent, partial(self._demote, extent))
            else:
                self._give_up(extent, verdict, now)
        self._queue.extendleft(reversed(blocked))

    def _is_worth_room(self, extent: Extent, now: float) -> bool:
        """Whether it is worth what would have to leave the disk for it, or pinned."""
        if self._ledger.pins.concerns(extent):
            return True
        order = self._ledger.disk_order
        cheapest = order.cheapest(now)
        return cheapest is None or order.rank(extent, 0, now) >= cheapest

    def _demote(self, extent: Extent, op: int, rank: int) -> Demote:
        group = self._ledger.group_of(extent)
        return Demote(
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
            created=extent.created,
            last_used=extent.last_used,
            hits=extent.hits,
        )

    # ---- how they end

    def write_done(self, report: WriteDone, now: float) -> None:
        if self._disk.writing(report.op) is None:
            return
        counts = self._ledger.counts
        counts.disk_written_bytes += report.file_bytes
        counts.disk_write_seconds += report.seconds
        self.speed.note(report.file_bytes, report.seconds, self._disk.writes_in_flight, now)
        self._finish(self._disk.end_write(report.op, report.file_bytes), now)

    def write_failed(self, op: int, reason: Reason, now: float) -> None:
        self._finish(self._disk.end_write(op, 0, reason), now)

    def _finish(self, ended: Ended | None, now: float) -> None:
        if ended is None:
            return
        extent, disk = ended.extent, self._disk
        begun = self._begun.pop(extent)
        was_leaving = self._nvme.end_leaving(extent)
        if ended.reason is not None:
            self._failed(ended, now)
        else:
            disk.finish_write(ended)
            self._ledger.counts.demoted_extents += 1
            self.on_files(extent, ended)
            if disk.is_condemned(extent) or not extent.in_tree:
                reason = Reason.PURGED if extent.purged else Reason.REPORTED_BAD
                disk.lose(extent, FileEvent.LOST, reason)
            elif was_leaving and extent.last_used <= begun.last_used and self._ledger.may_leave_nvme(extent):
                self._leaving_nvme.leave(extent, now, begun.reason)
        self._changes.note(extent)

    def _failed(self, ended: Ended, now: float) -> None:
        """A demotion that fails leaves no file of its own, but of other ranks there may be some."""
        extent, reason = ended.extent, ended.reason
        assert reason is not None
        if self._disk.is_condemned(extent) and ended.by_rank:
            self._disk.finish_write(ended)
        else:
            self._disk.abandon_write(extent)
            self.on_files(extent, ended)
        if reason in _DAMAGED and extent.in_tree:
            self.lose_source(extent, reason, now)
        elif reason is Reason.NAME_TAKEN:
            self._taken[extent.key] = None
            if len(self._taken) > MOST_NAMES:
                del self._taken[next(iter(self._taken))]
        if reason not in _TRIED_ALONE:
            self._paused_until = now + self._ledger.limits.retry_seconds

    def name_is_free(self, key: bytes) -> None:
        """The file of another node that had it is gone."""
        self._taken.pop(key, None)

    def _give_up(self, extent: Extent, why_not: Reason, now: float) -> None:
        """It is queued and won't be demoted. It leaves NVMe all the same, unless something hangs on it."""
        begun = self._begun.pop(extent)
        was_leaving = self._nvme.end_leaving(extent)
        self._disk.give_up_write(extent, why_not)
        if was_leaving and self._ledger.may_leave_nvme(extent) and not extent.has_kids:
            self._ledger.counts.dropped_demotions[why_not] += 1
            self._leaving_nvme.leave(extent, now, told_reason(begun.reason, why_not))
        self._changes.note(extent)

    def give_up_all(self, why_not: Reason, now: float) -> None:
        """Those that are not under way. Nobody counts on the others, that may take for ever."""
        for extent in self._begun:
            if extent.disk is FileState.WRITING:
                self._nvme.end_leaving(extent)
        queue, self._queue = self._queue, deque()
        for extent in queue:
            if extent.disk is FileState.QUEUED and extent in self._begun:
                self._give_up(extent, why_not, now)

    def cancel(self, extent: Extent, reason: Reason) -> None:
        """What was to be copied is gone."""
        if extent.disk is FileState.QUEUED:
            del self._begun[extent]
            self._nvme.end_leaving(extent)
            self._disk.give_up_write(extent, reason)

    def worker_died(self, now: float) -> None:
        for extent in self._disk.worker_died():
            if extent.in_tree and not self._disk.is_condemned(extent) and extent.nvme is FileState.PRESENT:
                self._queue.appendleft(extent)
            else:
                self.cancel(extent, Reason.PURGED if extent.purged else Reason.WORKER_DIED)
                self._changes.note(extent)
