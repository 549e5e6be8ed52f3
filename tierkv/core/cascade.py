"""Movement between the tiers: host -> nvme -> dropped, and back up.

Decides who leaves when room is needed, which sealed extents are written and when, and which blocks are read back; the
storage worker carries it out and reports. All ranks of an extent go together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tierkv.core.admission import Admission
from tierkv.core.extent import Extent
from tierkv.core.grants import Dropped, Evicted, NeverHit
from tierkv.core.instructions import (
    OpFailed,
    Read,
    ReadDone,
    Remove,
    RemoveDone,
    SetAside,
    TierHealth,
    Write,
    WriteDone,
)
from tierkv.core.journal import Account
from tierkv.core.keys import KEY_BYTES
from tierkv.core.ledger import Departure, Group, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import NvmeEvent, NvmeState
from tierkv.core.slab_relief import find_relief, has_cheaper
from tierkv.core.value.order import Rank
from tierkv.errors import BrokenInvariant

IN_VAIN = 10
"""A group that has filled NVMe so many times over without a single hit is told of."""

_TURNED_DOWN = (Reason.WRITE_BUDGET, Reason.WORTH_LESS)
_WRITE_HOLD = "write"
_INODES_OF_A_FILE = 2  # with a folder of its own, as far as is known between two looks at the file system
_FOLDERS_OF_A_WRITE = 2  # inodes that a file may need beside its own
EVICTIONS_AT_A_TIME = 128
"""When much is to go at once, for capacity that was taken: between two of these slices others are answered."""

_FILES_AT_A_TIME = 8  # evicted beyond what is needed when inodes are short
_READ_ONLY_RETRY_SECONDS = 30.0  # nothing is removed there until it can be written again, and then at once


@dataclass(frozen=True, slots=True)
class Room:
    """`slots` that can be had now. `refused` of those asked for are not worth what would have to go for them."""

    slots: int
    refused: int


@dataclass(slots=True, eq=False)
class _WriteOp:
    extent: Extent


@dataclass(slots=True, eq=False)
class _RemoveOp:
    extent: Extent
    rank: int
    aside: Reason | None = None  # the file is kept in quarantine, for this reason


@dataclass(slots=True, eq=False)
class _ReadOp:
    extent: Extent
    rank: int
    first: int
    slots: list[int]
    unclean: bool = False  # what was purged may lie in its slots until they are filled


def _is_below(rank: Rank | None, victim: Rank | None) -> bool:
    return rank is not None and victim is not None and rank < victim


def parts_on_nvme(extent: Extent) -> Iterator[tuple[int, int, int, str]]:
    """What becomes of the blocks of a file that goes: first, end, bytes of the file, and the tier where they still are.
    The last ones first, which are nowhere else."""
    stay, blocks = extent.host_blocks, extent.num_blocks
    bytes_that_stay = extent.nvme_bytes * stay // blocks
    if stay < blocks:
        yield stay, blocks, extent.nvme_bytes - bytes_that_stay, "dropped"
    if stay:
        yield 0, stay, bytes_that_stay, "host"


class Cascade:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.admission = Admission(ledger)
        self._next_op = 1
        self._ops: dict[int, _WriteOp | _RemoveOp | _ReadOp] = {}
        self._num_removes = 0  # of them
        self._write_queue: deque[Extent] = deque()
        self._reads_wanted: OrderedDict[tuple[Extent, int], int] = OrderedDict()  # -> up to how many blocks
        self._failed_writes: dict[Extent, Reason] = {}
        self._lost: dict[Extent, Reason] = {}  # why their files are to go, when the reads of the other ranks have ended
        self._written_bytes: dict[Extent, int] = {}
        self._retries: list[tuple[float, _RemoveOp]] = []
        self._unwritten: dict[Extent, bool] = {}  # -> whether it is written again as soon as its file is removed
        self._to_sweep: dict[Extent, None] = {}  # purged ones whose files a sweep removes
        self.held_back: Callable[[Extent], bool] = lambda extent: False  # not to be written for now
        self._file_owners: dict[bytes, Extent] = {}  # key -> whose file is being written or removed under that name
        self._writes_in_flight = 0
        self._reads_in_flight = 0
        self.nvme_used = 0  # files that exist, or may
        self.nvme_reserved = 0  # files being written
        self.removing_bytes = 0  # part of nvme_used that is on its way out
        self.overhead_bytes = 0
        self.growth_bytes = 0  # part of overhead_bytes: nothing of it is there yet
        self._stranded_bytes = 0  # part of overhead_bytes: files that this start can neither use nor rule out
        self.is_writable = True
        self.why_not_writable: Reason | None = None
        self._spare_since = 0  # removals from this number on are not yet part of that
        self.spare_files: int | None = None  # that the file system takes before its inodes are short; None: any number
        self.is_readable = True  # a disk that does not answer a read is not asked for more
        self.is_worker_up = False
        self.is_open = False  # recovery is over
        self.is_behind = False  # `shrink` has more to evict
        self.progressed: list[Extent] = []  # extents whose file or host copies changed: leases and seals may be due
        self.read_problems: dict[Extent, Reason] = {}  # of those in `progressed`: why less is read than was wanted

    # ---- room in host memory

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
                self.leave_host(extent, remaining, now)
        return self._ledger.pool.used_bytes < before  # or whoever makes room would ask again without end

    def _evict_from_host(self, extent: Extent, slots_needed: int, now: float) -> None:
        """From the tail, as few blocks as will do, at most one recency segment of the extent."""
        ledger = self._ledger
        floor = ledger.host_floor(extent)
        if floor is None:
            return
        longest = extent.longest_host_blocks
        if floor < extent.hot_blocks < longest:
            floor = extent.hot_blocks
        remaining, freed = longest, 0
        if longest == extent.host_blocks:  # so each block frees a slot of every rank
            remaining = max(floor, longest - -(-slots_needed // len(extent.slots)))
            freed = slots_needed
        while remaining > floor and freed < slots_needed:
            remaining -= 1
            freed += sum(len(slots) > remaining for slots in extent.slots)
        self.leave_host(extent, remaining, now)

    def leave_host(self, extent: Extent, remaining: int, now: float, reason: Reason = Reason.EVICTED) -> None:
        ledger = self._ledger
        group = ledger.group_of(extent)
        stays_on_nvme = extent.nvme is NvmeState.PRESENT
        freed = sum(max(0, len(slots) - remaining) for slots in extent.slots) * group.slot_bytes
        blocks = extent.longest_host_blocks - remaining
        ledger.counts.evicted_bytes["host", reason] += freed
        ledger.counts.evicted_blocks["host", reason] += blocks
        ledger.effects.append(
            Evicted(
                group=extent.group,
                key=extent.block_key(remaining),
                tier="host",
                to="nvme" if stays_on_nvme else "dropped",
                blocks=blocks,
                num_bytes=freed,
                reason=reason,
                first_token=extent.first_token + remaining * group.block_tokens,
                tokens=blocks * group.block_tokens,
                created=extent.created,
                last_used=extent.used_at(remaining),
                hits=extent.hits_at(remaining),
                value=ledger.host_order(group.slot_bytes).value(extent, remaining, now),
            )
        )
        if stays_on_nvme:
            for rank in range(group.ranks):
                ledger.cut_host(extent, rank, remaining, reason, to=Account.COPIED)
            if remaining == 0 and self.is_open:
                extent.tokens = None  # the file's header has them
        else:
            if ledger.has_nvme and group.persistent:
                unwritten = reason if self.is_writable else Reason.NVME_DEGRADED
                ledger.counts.dropped_unwritten_bytes[unwritten] += freed
            ledger.cut_extent(extent, remaining, Departure("host", reason, now))
            if remaining == 0:
                self._unwritten.pop(extent, None)
        ledger.reconsider(extent)

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
            self.seal(extent, now)

    # ---- host -> nvme

    def seal(self, extent: Extent, now: float) -> None:
        """Freeze the committed length; a persistent extent goes to the write queue."""
        ledger = self._ledger
        extent.sealed = True
        ledger.unsealed.pop(extent, None)
        if ledger.has_nvme and ledger.group_of(extent).persistent:
            self._admit(extent, now)
        ledger.reconsider(extent)
        self.progressed.append(extent)

    def _admit(self, extent: Extent, now: float) -> None:
        if not self.is_writable:
            self._mark_unwritten(extent)
            self._count_dropped(extent, self.why_not_writable or Reason.NVME_DEGRADED)
            return
        self._unwritten.pop(extent, None)
        if not self.admission.may_write(extent, now):
            extent.why_not_there = Reason.WRITE_BUDGET
            for given_up in self.admission.wait(extent, now):
                self._count_dropped(given_up, Reason.WRITE_BUDGET)
            return
        self._queue_write(extent)
        self._pump_writes(now)  # and no reads: whoever seals is in the middle of a step, and reads make room

    def used_again(self, extent: Extent, now: float) -> None:
        """A lease was granted on it. If admission kept it from NVMe, it may be worth more now."""
        if extent.why_not_there in _TURNED_DOWN and self._may_be_written_again(extent):
            self._admit(extent, now)

    def _admit_waiting(self, now: float) -> None:
        """What the budget has room for meanwhile."""
        while self.is_writable and (extent := self.admission.next_due(self._may_be_written_again, now)) is not None:
            self._queue_write(extent)

    def next_admission(self) -> float | None:
        """When the budget has room for what waits, if the tier could write it."""
        can_write = self.is_open and self.is_worker_up and self.is_writable
        return self.admission.next_wakeup() if can_write else None

    def _queue_write(self, extent: Extent) -> None:
        extent.move(NvmeEvent.ADMIT)
        extent.why_not_there = None
        self._write_queue.append(extent)

    def pump(self, now: float) -> None:
        """Issue what may be issued: reads first, since somebody waits for them."""
        self._pump_reads(now)
        self._pump_writes(now)

    def _pump_writes(self, now: float) -> None:
        if not (self.is_open and self.is_worker_up):
            return
        self._admit_waiting(now)
        blocked: list[Extent] = []
        while self._write_queue and self.is_writable and self._writes_in_flight < self._ledger.limits.inflight_writes:
            extent = self._write_queue[0]
            if extent.nvme is not NvmeState.QUEUED:
                self._write_queue.popleft()
                continue
            if extent.key in self._file_owners or self.held_back(extent):
                blocked.append(self._write_queue.popleft())  # or the older file's removal would take this one's
                continue
            need = self._need(extent)
            files = self._ledger.group_of(extent).ranks + _FOLDERS_OF_A_WRITE
            with self._ledger.group_of(extent).share.asking(nvme_bytes=need - extent.nvme_bytes):
                verdict = self._room_on_nvme(extent, need, files, now)
            if verdict is Reason.PENDING:
                break
            self._write_queue.popleft()
            if verdict is None:
                self._issue_write(extent, need)
            else:
                self._drop_queued(extent, verdict, now)
        self._write_queue.extendleft(reversed(blocked))

    def _need(self, extent: Extent) -> int:
        """Not less than what a worker that died may have left of it."""
        group = self._ledger.group_of(extent)
        return max(extent.nvme_bytes, group.ranks * group.file_bytes(extent.num_blocks))

    def _room_on_nvme(self, extent: Extent, need: int, files: int, now: float) -> Reason | None:
        """None: there is room. PENDING: there will be when removals end. Else why there is none."""
        capacity = self._ledger.limits.nvme_bytes
        if need > capacity - self.overhead_bytes:
            return Reason.LARGER_THAN_TIER
        if self.spare_files is not None and self.spare_files < files:
            return self._room_for_files(files, now)
        need -= extent.nvme_bytes  # which are reserved
        if self._nvme_free() >= need:
            return None
        if self._nvme_free() + self.removing_bytes < need and not self.admission.is_worth_room(extent, now):
            return Reason.WORTH_LESS
        slack = capacity // 64  # evict in batches, not one for each write
        evicted = 0
        while self._nvme_free() + self.removing_bytes < need + slack and self._evict_from_nvme(now):
            evicted += 1
            if evicted >= EVICTIONS_AT_A_TIME:
                slack = 0  # enough for others to wait for
        if self._nvme_free() >= need:
            return None
        if self._nvme_free() + self.removing_bytes >= need or self._writes_in_flight or self.removing_bytes:
            return Reason.PENDING
        return Reason.NVME_FULL

    def _room_for_files(self, files: int, now: float) -> Reason:
        """Inodes are short while bytes may be free: files make room for files, in batches."""
        assert self.spare_files is not None
        wanted = files + _FILES_AT_A_TIME
        while self.spare_files + self._num_removes < wanted and self._evict_from_nvme(now):
            pass
        return Reason.PENDING if self._num_removes or self._writes_in_flight else Reason.NO_INODES

    def _nvme_free(self) -> int:
        return self._ledger.limits.nvme_bytes - self.overhead_bytes - self.nvme_used - self.nvme_reserved

    def _issue_write(self, extent: Extent, need: int) -> None:
        ledger = self._ledger
        group = ledger.group_of(extent)
        extent.move(NvmeEvent.ISSUE)
        self._file_owners[extent.key] = extent
        self.nvme_reserved += need - extent.nvme_bytes
        group.share.nvme_bytes += need - extent.nvme_bytes
        extent.nvme_bytes = need
        ledger.hold(extent, _WRITE_HOLD, extent.num_blocks)
        assert extent.tokens is not None
        ledger.declare(group)
        for rank in range(group.ranks):
            op = self._new_op(_WriteOp(extent))
            extent.ops += (op,)
            ledger.effects.append(
                Write(
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
                    tokens=extent.tokens,
                    slots=list(extent.slots[rank]),
                    created=extent.created,
                    last_used=extent.last_used,
                    hits=extent.hits,
                    extras=dict(extent.extras),
                )
            )
        self._writes_in_flight += 1
        if self.spare_files is not None:
            self.spare_files -= _INODES_OF_A_FILE * group.ranks

    def write_done(self, report: WriteDone, now: float) -> None:
        op = self._ops.get(report.op)
        if not isinstance(op, _WriteOp):
            return  # of a worker that died before its report was read
        self._end_op(report.op)
        counts = self._ledger.counts
        counts.nvme_written_bytes += report.file_bytes
        self.admission.budget.note_written(report.file_bytes, now)
        counts.nvme_write_seconds += report.seconds
        self._written_bytes[op.extent] = self._written_bytes.get(op.extent, 0) + report.file_bytes
        self._note_written(self._ledger.group_of(op.extent), report.file_bytes)
        self._finish_write(op.extent, report.op, now)

    def _note_written(self, group: Group, num_bytes: int) -> None:
        before, group.written_bytes = group.written_bytes, group.written_bytes + num_bytes
        suspicious = IN_VAIN * self._ledger.limits.nvme_bytes
        if not group.was_hit and before <= suspicious < group.written_bytes:
            self._ledger.effects.append(NeverHit(group=group.spec.group, written_bytes=group.written_bytes))

    def _write_failed(self, op: _WriteOp, report: OpFailed, now: float) -> None:
        self._failed_writes[op.extent] = report.reason
        self._finish_write(op.extent, report.op, now)

    def _finish_write(self, extent: Extent, op: int, now: float) -> None:
        extent.end_op(op)
        if extent.ops:
            return
        ledger = self._ledger
        self._writes_in_flight -= 1
        del self._file_owners[extent.key]
        written = self._written_bytes.pop(extent, 0)
        reason = self._failed_writes.pop(extent, None)
        self._book_file(extent, extent.nvme_bytes if reason is not None else written)
        if reason is not None:
            extent.move(NvmeEvent.FAILED)
            self._count_dropped(extent, reason)
            self._mark_unwritten(extent)
            self._issue_removes(extent)
        else:
            extent.move(NvmeEvent.FLUSHED)
            extent.is_stray = False
            ledger.counts.flushed_extents += 1
            if extent.condemned or not extent.in_tree:
                extent.move(NvmeEvent.LOST)
                extent.why_not_there = Reason.REPORTED_BAD
                self._mark_unwritten(extent, at_once=True)  # what is left of it is good
                self._issue_removes(extent)
        ledger.unhold(extent, _WRITE_HOLD)
        self._neighbours_changed(extent)
        self.pump(now)

    def _book_file(self, extent: Extent, num_bytes: int) -> None:
        """What was reserved for a write is a file now, or may be one."""
        self.nvme_reserved -= extent.nvme_bytes
        self.nvme_used += num_bytes
        group = self._ledger.group_of(extent)
        group.nvme_bytes += num_bytes
        group.share.nvme_bytes += num_bytes - extent.nvme_bytes
        extent.nvme_bytes = num_bytes

    def _drop_queued(self, extent: Extent, reason: Reason, now: float) -> None:
        """A queued extent will not be written. What an earlier worker may have written of it is removed."""
        self._count_dropped(extent, reason)
        self.admission.give_back(extent)
        if extent.is_stray:
            extent.move(NvmeEvent.ISSUE)
            self._book_file(extent, extent.nvme_bytes)
            extent.move(NvmeEvent.FAILED)
            self._issue_removes(extent)
        else:
            extent.move(NvmeEvent.DROP)
        self._neighbours_changed(extent)

    def _count_dropped(self, extent: Extent, reason: Reason) -> None:
        ledger = self._ledger
        num_bytes = ledger.group_of(extent).ranks * extent.num_blocks * ledger.group_of(extent).slot_bytes
        ledger.counts.dropped_writes[reason] += 1
        extent.why_not_there = reason
        ledger.effects.append(
            Dropped(group=extent.group, key=extent.key, blocks=extent.num_blocks, num_bytes=num_bytes, reason=reason)
        )

    def _mark_unwritten(self, extent: Extent, *, at_once: bool = False) -> None:
        """Sealed, meant for NVMe, not there for a cause that may pass: tried again when the tier is well again. Not
        `at_once` after a write that failed, for the next one may fail as well, without end."""
        if extent.in_tree:
            self._unwritten[extent] = at_once

    def _may_be_written_again(self, extent: Extent) -> bool:
        return (
            extent.in_tree
            and extent.sealed
            and extent.nvme is NvmeState.ABSENT
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
        for extent in self._write_queue:
            if extent.nvme is NvmeState.QUEUED and extent not in seen:
                seen.add(extent)
                yield extent
        for op in self._ops.values():
            if isinstance(op, _WriteOp) and op.extent not in seen:
                seen.add(op.extent)
                yield op.extent

    def order_writes_by_depth(self) -> None:
        """At shutdown the budget may end at any write: parents go before what hangs on them."""
        self._write_queue = deque(sorted(self._write_queue, key=lambda extent: extent.first_token))

    def drop_all_queued(self, reason: Reason, now: float) -> None:
        queue, self._write_queue = self._write_queue, deque()
        for extent in queue:
            if extent.nvme is NvmeState.QUEUED:
                self._drop_queued(extent, reason, now)
                if reason is not Reason.SHUTDOWN:
                    self._mark_unwritten(extent)

    # ---- leaving nvme

    @property
    def can_remove(self) -> bool:
        """Where nothing can be written no file can be removed: to evict one would be to forget it for nothing."""
        return self.why_not_writable is not Reason.READ_ONLY

    def _evict_from_nvme(self, now: float) -> bool:
        ledger = self._ledger
        if not self.can_remove:
            return False
        victim = ledger.nvme_order.pop(now)
        while victim is not None and not ledger.may_leave_nvme(victim):
            victim = ledger.nvme_order.pop(now)
        if victim is None:
            return False
        self.leave_nvme(victim, now)
        return True

    def leave_nvme(self, victim: Extent, now: float, reason: Reason = Reason.EVICTED) -> None:
        """Its file goes, and with it what is not in host memory."""
        ledger = self._ledger
        stays_in_host = victim.host_blocks
        ledger.counts.evicted_bytes["nvme", reason] += victim.nvme_bytes
        ledger.counts.evicted_blocks["nvme", reason] += victim.num_blocks
        block_tokens = ledger.group_of(victim).block_tokens
        for first, end, num_bytes, to in parts_on_nvme(victim):
            ledger.effects.append(
                Evicted(
                    group=victim.group,
                    key=victim.block_key(first),
                    tier="nvme",
                    to=to,
                    blocks=end - first,
                    num_bytes=num_bytes,
                    reason=reason,
                    first_token=victim.first_token + first * block_tokens,
                    tokens=(end - first) * block_tokens,
                    created=victim.created,
                    last_used=victim.used_at(first),
                    hits=victim.hits_at(first),
                    value=ledger.nvme_order.value(victim, first, now),
                )
            )
        victim.move(NvmeEvent.EVICT)
        victim.why_not_there = reason
        self._issue_removes(victim)
        ledger.cut_extent(victim, stays_in_host, Departure("nvme", reason, now))
        self._neighbours_changed(victim)

    def may_expire(self, extent: Extent) -> bool:
        """Whether nobody uses it just now, nothing hangs on it, and it is neither pinned nor on its way anywhere."""
        if not extent.in_tree or not extent.sealed or extent.holds or extent.reading:
            return False
        if extent.nvme not in (NvmeState.ABSENT, NvmeState.PRESENT) or self._ledger.pinned(extent):
            return False
        return (self.can_remove or extent.nvme is NvmeState.ABSENT) and not any(
            branch.kids for branch in extent.branch_points
        )

    def expire(self, extent: Extent, now: float) -> None:
        """Out of every tier. It `may_expire`."""
        if extent.nvme is not NvmeState.PRESENT:
            self.leave_host(extent, 0, now, Reason.EXPIRED)
            return
        if extent.longest_host_blocks:
            self.leave_host(extent, 0, now, Reason.EXPIRED)
        self.leave_nvme(extent, now, Reason.EXPIRED)

    def shrink(self, now: float, *, at_once: bool = False) -> None:
        """Evict down to capacity: after recovery, `at_once`, or when what lies beside the extents has grown, a slice
        with each event and each tick."""
        if not self.is_open:
            return
        evicted = 0
        self.is_behind = False
        while self._is_beyond_capacity():
            if evicted == EVICTIONS_AT_A_TIME and not at_once:
                self.is_behind = True
                return
            if not self._evict_from_nvme(now):
                return
            evicted += 1

    def _is_beyond_capacity(self) -> bool:
        if self._nvme_free() + self.removing_bytes < 0:
            return True
        return self.spare_files is not None and self.spare_files < 0 and self.spare_files + self._num_removes < 0

    def file_lost(self, extent: Extent, now: float) -> None:
        """Somebody else removed it: what is counted as used follows what is there."""
        if extent.nvme is NvmeState.PRESENT:
            self._ledger.counts.drift_bytes += extent.nvme_bytes
            self.lose_file(extent, Reason.NOT_FOUND, now)

    def lose_file(self, extent: Extent, reason: Reason, now: float) -> None:
        """The file of some rank is not there or not right: the extent's files go, and what only they held."""
        ledger = self._ledger
        ledger.counts.damaged_extents[reason] += 1
        if extent.nvme is not NvmeState.PRESENT:
            return
        extent.move(NvmeEvent.LOST)
        extent.why_not_there = reason
        self._issue_removes(extent, Reason.REPORTED_BAD if reason is Reason.REPORTED_BAD else None)
        self.cut_safely(extent, extent.host_blocks, Departure("nvme", reason, now))
        self.read_problems.setdefault(extent, reason)
        self._mark_unwritten(extent, at_once=True)
        self._neighbours_changed(extent)

    def cut_safely(self, extent: Extent, num_blocks: int, departure: Departure) -> None:
        """Cut an extent that others may hold. It never grows again, lest they find another branch's blocks in it."""
        if num_blocks < extent.num_blocks:
            self._ledger.cut_extent(extent, num_blocks, departure)
        if extent.in_tree and not extent.sealed:
            self.seal(extent, departure.now)

    def condemn(self, extent: Extent, num_blocks: int, reason: Reason, now: float) -> None:
        """Blocks from `num_blocks` on are bad, wherever they are: no tier keeps them."""
        if extent.nvme is NvmeState.PRESENT:
            self.lose_file(extent, reason, now)
        else:
            self._ledger.counts.damaged_extents[reason] += 1
            if extent.nvme is NvmeState.WRITING:
                extent.condemned = True
            elif extent.nvme is NvmeState.QUEUED and num_blocks == 0:
                self._drop_queued(extent, reason, now)
        if extent.in_tree:
            self.cut_safely(extent, min(num_blocks, extent.num_blocks), Departure("host", reason, now))
        self.read_problems.setdefault(extent, reason)
        self._neighbours_changed(extent)

    # ---- purging

    def purge(self, extent: Extent, now: float) -> None:
        """Nothing of it is matched, read or written from here on. A file that is there is left to the sweep, see
        `swept`; one that is being written is removed when that has ended."""
        extent.purged = True
        self._unwritten.pop(extent, None)
        for rank in range(self._ledger.group_of(extent).ranks):
            self._reads_wanted.pop((extent, rank), None)
        if extent.nvme is NvmeState.QUEUED:
            self._drop_queued(extent, Reason.PURGED, now)
        elif extent.nvme is NvmeState.PRESENT:
            extent.move(NvmeEvent.LOST)
            self._file_owners[extent.key] = extent
            self._leaves_share(extent)
            self._to_sweep[extent] = None
        if extent.in_tree:
            self._ledger.cut_extent(extent, 0, None)
        self._neighbours_changed(extent)

    def swept(self, extents: Iterable[Extent], now: float) -> None:
        """Their files are gone. Of two purges that overlap, the first to be swept tells of what both took."""
        for extent in extents:
            if extent in self._to_sweep:
                del self._to_sweep[extent]
                self._file_gone(extent, now)

    def mark_reads(self) -> set[int]:
        """Of the reads in flight, whose slots held something before: what they do not fill is wiped."""
        numbers = {number for number, op in self._ops.items() if isinstance(op, _ReadOp)}
        for op in self._ops.values():
            if isinstance(op, _ReadOp):
                op.unclean = True
        return numbers

    def still_running(self, numbers: set[int]) -> set[int]:
        return numbers & self._ops.keys()

    def is_to_sweep(self, extent: Extent) -> bool:
        return extent in self._to_sweep

    def is_at_rest(self, extent: Extent) -> bool:
        """No operation of the worker's is about it."""
        return not (extent.ops or extent.reading or any(retry.extent is extent for _, retry in self._retries))

    def discard(self, extent: Extent) -> None:
        """Remove the files of an extent that recovery could not use."""
        self._ledger.counts.damaged_extents[Reason.INCOMPLETE_RANKS] += 1
        extent.move(NvmeEvent.LOST)
        self._issue_removes(extent)

    def strand(self, num_bytes: int) -> None:
        """Files that stay where they are, and take room until `unstrand` or the next start."""
        self._stranded_bytes += num_bytes
        self.overhead_bytes += num_bytes

    def unstrand(self, num_bytes: int) -> None:
        """They are gone."""
        self.strand(-num_bytes)

    def _issue_removes(self, extent: Extent, aside: Reason | None = None) -> None:
        """`aside`: the files are right by their checksums and yet were found unusable, so they are kept for a look."""
        self._file_owners[extent.key] = extent
        self._leaves_share(extent)
        extent.condemned = extent.is_stray = False
        for rank in range(self._ledger.group_of(extent).ranks):
            self._issue_remove(extent, rank, aside)

    def nvme_bytes_of(self, group: Group) -> int:
        """In files and reserved, less what is on its way out. Looks at every extent."""
        known = {*self._ledger.tree, *self.extents_in_operations()}
        staying = (NvmeState.QUEUED, NvmeState.WRITING, NvmeState.PRESENT)
        return sum(e.nvme_bytes for e in known if e.group == group.spec.group and e.nvme in staying)

    def _leaves_share(self, extent: Extent) -> None:
        """Its file is on its way out: whoever looks for room counts on that."""
        self.removing_bytes += extent.nvme_bytes
        self._ledger.group_of(extent).share.nvme_bytes -= extent.nvme_bytes

    def _issue_remove(self, extent: Extent, rank: int, aside: Reason | None) -> None:
        op = _RemoveOp(extent, rank, aside)
        number = self._new_op(op)
        extent.ops += (number,)
        if self.is_worker_up:
            self._ledger.effects.append(self._remove_instruction(number, op))

    def _remove_instruction(self, number: int, op: _RemoveOp) -> Remove | SetAside:
        weights = self._ledger.group_of(op.extent).spec.identity.weights
        group, rank, key = op.extent.group, op.rank, op.extent.key
        if op.aside is not None:
            return SetAside(op=number, fingerprint=weights, group=group, rank=rank, key=key, reason=op.aside)
        is_in_host = op.extent.in_tree and op.extent.host_blocks == op.extent.num_blocks
        return Remove(
            op=number,
            fingerprint=weights,
            group=group,
            rank=rank,
            key=key,
            to=Account.COPIED if is_in_host else Account.DROPPED,
            reason=op.extent.why_not_there,
        )

    def remove_done(self, report: RemoveDone, now: float) -> None:
        op = self._ops.get(report.op)
        if not isinstance(op, _RemoveOp):
            return
        self._end_op(report.op)
        if self.spare_files is not None and report.op >= self._spare_since:
            self.spare_files += _INODES_OF_A_FILE
        extent = op.extent
        extent.end_op(report.op)
        if not extent.ops and not any(retry.extent is extent for _, retry in self._retries):
            self._file_gone(extent, now)

    def _file_gone(self, extent: Extent, now: float) -> None:
        del self._file_owners[extent.key]
        self.removing_bytes -= extent.nvme_bytes
        self.nvme_used -= extent.nvme_bytes
        self._ledger.group_of(extent).nvme_bytes -= extent.nvme_bytes
        extent.nvme_bytes = 0
        extent.move(NvmeEvent.REMOVED)
        if self._unwritten.get(extent) and self.is_writable and self._may_be_written_again(extent):
            self._admit(extent, now)
        self._neighbours_changed(extent)
        self.pump(now)

    # ---- nvme -> host

    def want_read(self, extent: Extent, rank: int, blocks: int, now: float) -> None:
        """Have the first `blocks` blocks of a rank in host memory, as soon as room and the drive permit."""
        if not self.is_readable:
            self._cant_be_read(extent)
            return
        wanted = (extent, rank)
        self._reads_wanted[wanted] = max(blocks, self._reads_wanted.get(wanted, 0))
        self._pump_reads(now)

    def _cant_be_read(self, extent: Extent) -> None:
        """Whoever waits for it gets what is in host memory, now."""
        self.read_problems[extent] = Reason.IO_STUCK
        self.progressed.append(extent)

    def is_reading(self, extent: Extent, rank: int) -> bool:
        return rank in extent.reading or (extent, rank) in self._reads_wanted

    def num_reads_in_flight(self) -> int:
        return self._reads_in_flight + len(self._reads_wanted)

    def num_writes_waiting(self) -> int:
        return len(self._write_queue)

    def _pump_reads(self, now: float) -> None:
        if not (self.is_open and self.is_worker_up):
            return
        limit = self._ledger.limits.inflight_reads
        ready = [wanted for wanted in self._reads_wanted if wanted[1] not in wanted[0].reading]
        for extent, rank in ready:
            if self._reads_in_flight >= limit:
                return
            blocks = self._reads_wanted.pop((extent, rank), 0)
            self._issue_read(extent, rank, blocks, now)

    def _issue_read(self, extent: Extent, rank: int, blocks: int, now: float) -> None:
        ledger = self._ledger
        group = ledger.group_of(extent)
        first = len(extent.slots[rank])
        blocks = min(blocks, extent.num_blocks)
        if blocks <= first or extent.nvme is not NvmeState.PRESENT:
            self.progressed.append(extent)
            return
        # Held while room is made for it, or it could be its own victim.
        who = ("read", rank)
        ledger.hold(extent, who, blocks)
        with group.share.asking(host_bytes=(blocks - first) * group.slot_bytes):
            room = self.make_room(group.slot_bytes, blocks - first, now)
        slots = ledger.pool.allocate(group.slot_bytes, room.slots)
        if not slots:
            ledger.unhold(extent, who)
            self.read_problems[extent] = Reason.NO_ROOM
            self.progressed.append(extent)
            return
        op = self._new_op(_ReadOp(extent, rank, first, slots))
        extent.begin_read(rank, op)
        self._reads_in_flight += 1
        ledger.reconsider(extent)
        ledger.effects.append(
            Read(
                op=op,
                fingerprint=group.spec.identity.weights,
                group=extent.group,
                rank=rank,
                key=extent.key,
                parent=extent.parent,
                first_token=extent.first_token,
                block_tokens=group.block_tokens,
                block_bytes=group.block_bytes,
                keys=extent.keys[: (first + len(slots)) * KEY_BYTES],
                first=first,
                slots=list(slots),
            )
        )

    def read_done(self, report: ReadDone, now: float) -> None:
        op = self._ops.get(report.op)
        if not isinstance(op, _ReadOp):
            return
        self._end_op(report.op)
        ledger = self._ledger
        extent, rank = op.extent, op.rank
        group = ledger.group_of(extent)
        extent.end_read(rank)
        ledger.has_let_go = ledger.has_let_go or op.unclean
        self._reads_in_flight -= 1
        is_wanted = (
            extent.in_tree
            and extent.nvme is NvmeState.PRESENT
            and len(extent.slots[rank]) == op.first
            and op.first + report.valid <= extent.num_blocks
        )
        valid = report.valid if is_wanted else 0
        if valid:
            ledger.append_host(extent, rank, op.slots[:valid], source=Account.COPIED)
            ledger.counts.promoted_blocks += valid
            self._remember_tokens(extent, group, report)
        if valid < len(op.slots):
            ledger.release(op.slots[valid:], group.slot_bytes, wipe=extent.purged or op.unclean)
        ledger.counts.nvme_read_bytes += report.valid * group.slot_bytes
        ledger.counts.nvme_read_seconds += report.seconds
        ledger.unhold(extent, ("read", rank))
        if report.reason is not None:
            ledger.counts.failed_reads[report.reason] += 1
            self.read_problems[extent] = report.reason
            self._reads_wanted.pop((extent, rank), None)
        if report.gone:
            self._lost[extent] = report.reason or Reason.NOT_FOUND
        self._lose_what_is_lost(extent, now)
        self._neighbours_changed(extent)
        self.pump(now)

    def _lose_what_is_lost(self, extent: Extent, now: float) -> None:
        """What the other ranks are reading just now is right, and stays as far as every rank has it."""
        if extent in self._lost and not extent.reading:
            self.lose_file(extent, self._lost.pop(extent), now)

    def is_lost(self, extent: Extent) -> bool:
        """Its file is to go, once the reads of the other ranks have ended."""
        return extent in self._lost

    def _remember_tokens(self, extent: Extent, group: Group, report: ReadDone) -> None:
        num_bytes = extent.num_blocks * group.block_tokens * 4
        if extent.tokens is None and len(report.tokens) >= num_bytes:
            extent.tokens = report.tokens[:num_bytes]
            extent.extras = {index: extra for index, extra in report.extras.items() if index < extent.num_blocks}

    # ---- the worker's life and the tier's health

    def op_failed(self, report: OpFailed, now: float) -> None:
        op = self._ops.get(report.op)
        if isinstance(op, _WriteOp):
            self._end_op(report.op)
            self._write_failed(op, report, now)
        elif isinstance(op, _RemoveOp):
            # Its bytes still count until they are gone, so try until they are. For quarantine there is one try.
            op.aside = None
            self._end_op(report.op)
            op.extent.end_op(report.op)
            op.extent.why_not_there = report.reason
            wait = _READ_ONLY_RETRY_SECONDS if report.reason is Reason.READ_ONLY else self._ledger.limits.retry_seconds
            self._retries.append((now + wait, op))
        elif isinstance(op, _ReadOp):
            self.read_done(ReadDone(op=report.op, valid=0, seconds=0.0, reason=report.reason), now)

    def retry(self, now: float) -> None:
        due = [op for at, op in self._retries if at <= now]
        self._retries = [entry for entry in self._retries if entry[0] > now]
        for op in due:
            self._issue_remove(op.extent, op.rank, op.aside)

    def next_retry(self) -> float | None:
        return min((entry[0] for entry in self._retries), default=None)

    def worker_died(self, now: float) -> None:
        """Proven dead: nothing of it touches a slot any more. Writes are queued again, reads wanted again; what it did
        before it died is unknown, so a write that is given up later must be undone on disk."""
        ledger = self._ledger
        ledger.counts.worker_deaths += 1
        self.is_worker_up = False
        again: dict[Extent, None] = {}
        for number, op in list(self._ops.items()):
            if isinstance(op, _ReadOp):
                self._end_op(number)
                op.extent.end_read(op.rank)
                wipe = op.extent.purged or op.unclean
                ledger.release(op.slots, ledger.group_of(op.extent).slot_bytes, wipe=wipe)
                ledger.unhold(op.extent, ("read", op.rank))
                if op.extent.purged:
                    self._lost.pop(op.extent, None)
                    self.progressed.append(op.extent)
                    continue
                self._lose_what_is_lost(op.extent, now)
                wanted = (op.extent, op.rank)
                blocks = op.first + len(op.slots)
                self._reads_wanted[wanted] = max(blocks, self._reads_wanted.get(wanted, 0))
            elif isinstance(op, _WriteOp):
                self._end_op(number)
                again[op.extent] = None
        for extent in again:
            extent.ops = ()
            self._failed_writes.pop(extent, None)
            self._written_bytes.pop(extent, None)
            del self._file_owners[extent.key]
            extent.move(NvmeEvent.WORKER_DIED)  # its bytes stay reserved: there may be a file
            ledger.unhold(extent, _WRITE_HOLD)
            extent.is_stray = True
            if extent.in_tree and not extent.condemned:
                self._write_queue.appendleft(extent)
            else:
                self._mark_unwritten(extent, at_once=True)
                self._drop_queued(extent, Reason.WORKER_DIED, now)
            ledger.reconsider(extent)
        self._reads_in_flight = self._writes_in_flight = 0

    def worker_started(self, now: float) -> None:
        self.is_worker_up = True
        ledger = self._ledger
        for number, op in self._ops.items():
            if isinstance(op, _RemoveOp):
                ledger.effects.append(self._remove_instruction(number, op))
        self.pump(now)

    def health(self, report: TierHealth, now: float) -> None:
        self.overhead_bytes = report.overhead_bytes + self._stranded_bytes
        self.growth_bytes = report.growth_bytes
        was_writable = self.is_writable
        self._count_spare_files(report.spare_inodes)
        self.is_readable = report.readable
        if not report.readable:
            self._stop_reading()
        self.is_writable = report.writable
        self.why_not_writable = None if report.writable else (report.reason or Reason.NVME_DEGRADED)
        if was_writable and not report.writable:
            self.drop_all_queued(self.why_not_writable or Reason.NVME_DEGRADED, now)
        if not was_writable and report.writable:
            self._retries = [(now, op) for _, op in self._retries]
            for extent in list(self._unwritten):
                if not extent.in_tree:
                    del self._unwritten[extent]
                elif self._may_be_written_again(extent):
                    self._admit(extent, now)
                else:
                    self._unwritten[extent] = True
        self.shrink(now)
        self.pump(now)

    def _count_spare_files(self, seen: int | None) -> None:
        """What was under way when the worker looked may have been seen or not: it is counted against us both times."""
        self._spare_since = self._next_op
        writes = sum(isinstance(op, _WriteOp) for op in self._ops.values())
        self.spare_files = None if seen is None else seen - _INODES_OF_A_FILE * writes

    def _stop_reading(self) -> None:
        """What was asked of the disk keeps its slots until it comes back; nobody waits for it, and nothing follows."""
        waiting = [op.extent for op in self._ops.values() if isinstance(op, _ReadOp)]
        waiting += [extent for extent, _ in self._reads_wanted]
        self._reads_wanted.clear()
        for extent in waiting:
            self._cant_be_read(extent)

    def _end_op(self, number: int) -> None:
        self._num_removes -= isinstance(self._ops.pop(number), _RemoveOp)

    def _new_op(self, op: _WriteOp | _RemoveOp | _ReadOp) -> int:
        number = self._next_op
        self._next_op += 1
        self._ops[number] = op
        self._num_removes += isinstance(op, _RemoveOp)
        return number

    def _neighbours_changed(self, extent: Extent) -> None:
        """Whether an extent has a file decides whether it may go, and whether its parent may."""
        ledger = self._ledger
        ledger.settle_pins(extent)
        ledger.reconsider(extent)
        if extent.above is not None and extent.above.owner is not None:
            ledger.reconsider(extent.above.owner)
        self.progressed.append(extent)

    # ---- for the audit

    def reading_bytes(self) -> int:
        """Of the slots that reads in flight fill."""
        reads = [op for op in self._ops.values() if isinstance(op, _ReadOp)]
        return sum(len(op.slots) * self._ledger.group_of(op.extent).slot_bytes for op in reads)

    def slots_being_read(self) -> Iterator[tuple[int, str]]:
        for op in self._ops.values():
            if isinstance(op, _ReadOp):
                yield from ((slot, f"read into {op.extent!r}") for slot in op.slots)

    def extents_in_operations(self) -> set[Extent]:
        retried = {retry.extent for _, retry in self._retries}
        return {op.extent for op in self._ops.values()} | retried | set(self._to_sweep)

    def check_sums(self) -> None:
        """Raises BrokenInvariant when the bytes counted per state are not those of the extents in it."""
        known = set(self._ledger.tree) | self.extents_in_operations()
        used = sum(e.nvme_bytes for e in known if e.nvme in (NvmeState.PRESENT, NvmeState.REMOVING))
        reserved = sum(e.nvme_bytes for e in known if e.nvme in (NvmeState.WRITING, NvmeState.QUEUED))
        removing = sum(e.nvme_bytes for e in known if e.nvme is NvmeState.REMOVING)
        owners = {e.key: e for e in known if e.nvme in (NvmeState.WRITING, NvmeState.REMOVING)}
        if self._file_owners != owners:
            raise BrokenInvariant(f"files being written or removed: {self._file_owners} counted, {owners} there")
        removes = sum(isinstance(op, _RemoveOp) for op in self._ops.values())
        if self._num_removes != removes:
            raise BrokenInvariant(f"files being removed: {self._num_removes} counted, {removes} there")
        counted = (self.nvme_used, self.nvme_reserved, self.removing_bytes)
        if counted != (used, reserved, removing):
            raise BrokenInvariant(f"NVMe used, reserved, removing: {counted} counted, {used, reserved, removing} there")
