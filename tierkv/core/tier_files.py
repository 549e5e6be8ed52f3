"""The files of one tier below memory: what they take, who is writing or removing which, and how the tier is.

    used + reserved + overhead <= capacity
    used       files that are there, or may be; `removing_bytes` of them are on their way out
    leaving    part of used: files that stay until they are copied to the tier below
    reserved   files being written
    overhead   what lies beside them, and what this start can neither use nor rule out

A name belongs to one extent from the begin of a write, or of a removal, until its end: nobody else's file of that name
is written meanwhile. All ranks of an extent go together, with an operation each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from tierkv.core.extent import Extent
from tierkv.core.file_ops import Ended, Gone, Outcome, RemoveOp, WriteOp
from tierkv.core.instructions import AnyInstruction, OpFailed, Remove, RemoveDone, SetAside, StillUsed, TierHealth
from tierkv.core.journal import Account
from tierkv.core.ledger import Group, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.tier_books import TierBooks
from tierkv.errors import BrokenInvariant

_INODES_OF_A_FILE = 2  # with a folder of its own, as far as is known between two looks at the file system
_READ_ONLY_RETRY_SECONDS = 30.0  # nothing is removed there until it can be written again, and then at once

MakeWrite = Callable[[int, int], AnyInstruction]
"""The instruction with this operation's number, for this rank."""


class TierFiles:
    """`next_op` numbers operations, those of other tiers too."""

    def __init__(self, ledger: Ledger, books: TierBooks, next_op: Callable[[], int]) -> None:
        self._ledger = ledger
        self.books = books
        self._next_op = next_op
        self._ops: dict[int, WriteOp | RemoveOp] = {}
        self._ops_of: dict[Extent, tuple[int, ...]] = {}
        self.num_removes = 0  # of them
        self._outcomes: dict[Extent, Outcome] = {}
        self._kept: dict[Extent, dict[int, float]] = {}  # of removals, until the last rank's has ended
        self._used_at: dict[bytes, float] = {}  # by another node, as it said: its clock may be ahead of ours
        self._leaving: dict[Extent, None] = {}
        self._retries: list[tuple[float, RemoveOp]] = []
        self._to_sweep: dict[Extent, None] = {}  # purged ones whose files a sweep removes
        self._owners: dict[bytes, Extent] = {}  # key -> whose file is being written or removed under that name
        self._strays: set[Extent] = set()  # a worker that died may have left a file of these
        self._condemned: set[Extent] = set()  # their file must go as soon as it is written
        self.writes_in_flight = 0
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.removing_bytes = 0
        self.leaving_bytes = 0
        self.overhead_bytes = 0
        self.growth_bytes = 0  # part of overhead_bytes: nothing of it is there yet
        self.stranded_bytes = 0  # part of overhead_bytes: files that this start can neither use nor rule out
        self.is_writable = True
        self.why_not_writable: Reason | None = None
        self._spare_since = 0  # removals from this number on are not yet part of that
        self.spare_files: int | None = None  # that the file system takes before its inodes are short; None: any number
        self.is_readable = True  # a disk that does not answer a read is not asked for more
        self.why_not_readable = Reason.IO_STUCK
        self.is_worker_up = False
        self.is_open = False  # recovery is over

    # ---- room

    @property
    def free_bytes(self) -> int:
        return self.books.capacity_bytes - self.overhead_bytes - self.used_bytes - self.reserved_bytes

    @property
    def can_read(self) -> bool:
        """Something may be asked of the worker that concerns a file known to be there. One that has the disk tier
        answers while it still looks for others."""
        return self.is_worker_up and (self.is_open or self.books.reads_early)

    @property
    def is_ready(self) -> bool:
        """Something may be asked of the worker."""
        return self.is_open and self.is_worker_up

    @property
    def going_bytes(self) -> int:
        """Of what is used, what is on its way out."""
        return self.removing_bytes + self.leaving_bytes

    @property
    def num_going(self) -> int:
        """Files."""
        return self.num_removes + sum(self._ledger.group_of(extent).ranks for extent in self._leaving)

    @property
    def can_remove(self) -> bool:
        """Where nothing can be written no file can be removed: to evict one would be to forget it for nothing."""
        return self.why_not_writable is not Reason.READ_ONLY

    def need(self, extent: Extent) -> int:
        """Not less than what a worker that died may have left of it."""
        group = self._ledger.group_of(extent)
        return max(self.books.size(extent), group.ranks * group.file_bytes(extent.num_blocks))

    # ---- files come

    def found(self, extent: Extent, num_bytes: int) -> None:
        """It has files that are whole and its own."""
        self.books.move(extent, FileEvent.RECOVERED)
        self.books.set_size(extent, num_bytes)
        self.books.count_file(extent, num_bytes)
        self.books.count_share(extent, num_bytes)
        self.used_bytes += num_bytes

    def owns_name(self, extent: Extent) -> bool:
        """A file of its name is being written or removed: the older file's removal would take a new one's."""
        return extent.key in self._owners

    def owns_key(self, key: bytes) -> bool:
        return key in self._owners

    def begin_write(self, extent: Extent, make: MakeWrite) -> None:
        """There is room for it."""
        group = self._ledger.group_of(extent)
        need = self.need(extent)
        growth = need - self.books.size(extent)
        self.books.move(extent, FileEvent.ISSUE)
        self._owners[extent.key] = extent
        self.reserved_bytes += growth
        self.books.count_share(extent, growth)
        self.books.set_size(extent, need)
        self.books.declare(group)
        self._outcomes[extent] = Outcome()
        for rank in range(group.ranks):
            op = self._new_op(WriteOp(extent, rank))
            self._ledger.effects.append(self.books.addressed(make(op, rank)))
        self.writes_in_flight += 1
        if self.spare_files is not None:
            self.spare_files -= _INODES_OF_A_FILE * group.ranks

    def writing(self, op: int) -> Extent | None:
        """Whose file the operation writes. None: it is none, or one of a worker that died before its report was
        read."""
        known = self._ops.get(op)
        return known.extent if isinstance(known, WriteOp) else None

    def end_write(self, number: int, num_bytes: int, reason: Reason | None = None) -> Ended | None:
        """Of one rank. None: those of others are under way. `finish_write` or `abandon_write` is to follow."""
        op = self._end_op(number)
        extent = op.extent
        outcome = self._outcomes[extent]
        if reason is None:
            outcome.by_rank[op.rank] = num_bytes
        outcome.reason = reason or outcome.reason
        if extent in self._ops_of:
            return None
        del self._outcomes[extent]
        self.writes_in_flight -= 1
        del self._owners[extent.key]
        return Ended(extent, outcome.by_rank, outcome.reason)

    def finish_write(self, ended: Ended) -> bool:
        """Whether its files are there to stay."""
        extent = ended.extent
        if ended.reason is not None:
            self._book_file(extent, self.books.size(extent))
            self.books.move(extent, FileEvent.FAILED)
            self.issue_removes(extent, ended.reason)
            return False
        self._book_file(extent, sum(ended.by_rank.values()))
        self.books.move(extent, FileEvent.FLUSHED)
        self._strays.discard(extent)
        return True

    def abandon_write(self, extent: Extent) -> None:
        """It has failed, and nothing of it is to be removed."""
        reserved = self.books.size(extent)
        self.reserved_bytes -= reserved
        self.books.count_share(extent, -reserved)
        self.books.set_size(extent, 0)
        self._condemned.discard(extent)
        self._strays.discard(extent)
        self.books.move(extent, FileEvent.ABANDONED)

    def _book_file(self, extent: Extent, num_bytes: int) -> None:
        """What was reserved for a write is a file now, or may be one."""
        reserved = self.books.size(extent)
        self.reserved_bytes -= reserved
        self.used_bytes += num_bytes
        self.books.post(extent, Account.COPIED, self.books.tier, num_bytes)
        self.books.count_file(extent, num_bytes)
        self.books.count_share(extent, num_bytes - reserved)
        self.books.set_size(extent, num_bytes)

    def give_up_write(self, extent: Extent, reason: Reason) -> None:
        """It is queued and will not be written. What an earlier worker may have written of it is removed."""
        if extent not in self._strays:
            self.books.move(extent, FileEvent.DROP)
            return
        self.books.move(extent, FileEvent.ISSUE)
        self._book_file(extent, self.books.size(extent))
        self.books.move(extent, FileEvent.FAILED)
        self.issue_removes(extent, reason, unless_used_since=self._unless_used_since(extent))

    def condemn(self, extent: Extent) -> None:
        """Its file goes as soon as it is written."""
        self._condemned.add(extent)

    def is_condemned(self, extent: Extent) -> bool:
        return extent in self._condemned

    def extents_written(self) -> Iterator[Extent]:
        """By operations under way, one for each of them."""
        return (op.extent for op in self._ops.values() if isinstance(op, WriteOp))

    # ---- files go

    def begin_leaving(self, extent: Extent) -> None:
        """Its file is copied to the tier below, and goes then: whoever looks for room counts on that."""
        self._leaving[extent] = None
        self.leaving_bytes += self.books.size(extent)
        self.books.count_share(extent, -self.books.size(extent))

    def end_leaving(self, extent: Extent) -> bool:
        """It goes now, or does not go. Whether it was to."""
        if extent not in self._leaving:
            return False
        del self._leaving[extent]
        self.leaving_bytes -= self.books.size(extent)
        self.books.count_share(extent, self.books.size(extent))
        return True

    def lose(self, extent: Extent, event: FileEvent, reason: Reason | None, aside: Reason | None = None) -> None:
        """A file that is there is to go: by EVICT, unless somebody else uses it, or LOST."""
        self.end_leaving(extent)
        unless_used_since = self._unless_used_since(extent) if event is FileEvent.EVICT else math.inf
        self.books.move(extent, event)
        if reason is not None:
            self.books.note_why(extent, reason)
        self.issue_removes(extent, reason, aside, unless_used_since)

    def _unless_used_since(self, extent: Extent) -> float:
        return max(self.books.unless_used_since(extent), self._used_at.pop(extent.key, 0.0))

    def forget(self, extent: Extent) -> int:
        """Its files are gone, or are not its own any more: nothing is to be removed. The bytes that they took."""
        size = self.books.size(extent)
        self.books.move(extent, FileEvent.FORGOTTEN)
        self.used_bytes -= size
        self.books.count_file(extent, -size)
        self.books.count_share(extent, -size)
        self.books.set_size(extent, 0)
        return size

    def issue_removes(
        self,
        extent: Extent,
        reason: Reason | None,
        aside: Reason | None = None,
        unless_used_since: float = math.inf,
    ) -> None:
        """`aside`: the files are right by their checksums and yet were found unusable, so they are kept for a look."""
        self._owners[extent.key] = extent
        self._leaves_share(extent)
        self._condemned.discard(extent)
        self._strays.discard(extent)
        for rank in range(self._ledger.group_of(extent).ranks):
            self._issue_remove(RemoveOp(extent, rank, reason, aside, unless_used_since))

    def _leaves_share(self, extent: Extent) -> None:
        """Its file is on its way out: whoever looks for room counts on that."""
        self.removing_bytes += self.books.size(extent)
        self.books.count_share(extent, -self.books.size(extent))

    def _issue_remove(self, op: RemoveOp) -> None:
        number = self._new_op(op)
        if self.is_worker_up:
            self._ledger.effects.append(self.books.addressed(self._remove_instruction(number, op)))

    def _remove_instruction(self, number: int, op: RemoveOp) -> Remove | SetAside:
        weights = self._ledger.group_of(op.extent).spec.identity.weights
        group, rank, key = op.extent.group, op.rank, op.extent.key
        if op.aside is not None:
            return SetAside(op=number, fingerprint=weights, group=group, rank=rank, key=key, reason=op.aside)
        return Remove(
            op=number,
            fingerprint=weights,
            group=group,
            rank=rank,
            key=key,
            to=Account.COPIED if self._is_elsewhere(op.extent) else Account.DROPPED,
            reason=op.reason,
            unless_used_since=op.unless_used_since,
        )

    def _is_elsewhere(self, extent: Extent) -> bool:
        in_memory = self._ledger.devices.memory_blocks(extent)
        return extent.in_tree and (extent.has_file or in_memory == extent.num_blocks)

    def remove_done(self, report: RemoveDone | StillUsed) -> Gone | None:
        """What has become of the extent's files, when this was the last of them."""
        op = self._ops.get(report.op)
        if not isinstance(op, RemoveOp):
            return None
        extent = self._end_op(report.op).extent
        if isinstance(report, StillUsed):
            self._kept.setdefault(extent, {})[op.rank] = report.last_used
        elif self.spare_files is not None and report.op >= self._spare_since:
            self.spare_files += _INODES_OF_A_FILE
        if not self.is_at_rest(extent):
            return None
        kept, size = self._kept.pop(extent, {}), self.books.size(extent)
        is_kept = len(kept) == self._ledger.group_of(extent).ranks
        if kept:
            self._used_at[extent.key] = max(kept.values())
        if is_kept:
            self._keep(extent)
        else:
            self._file_gone(extent, op.reason)
        return Gone(extent, kept, is_kept, size)

    def _keep(self, extent: Extent) -> None:
        size = self.books.size(extent)
        del self._owners[extent.key]
        self.removing_bytes -= size
        self.books.count_share(extent, size)
        self.books.move(extent, FileEvent.KEPT)

    def _file_gone(self, extent: Extent, reason: Reason | None) -> None:
        size = self.books.size(extent)
        target = Account.COPIED if self._is_elsewhere(extent) else Account.DROPPED
        self.books.post(extent, self.books.tier, Account.PURGED if extent.purged else target, size, reason)
        del self._owners[extent.key]
        self.removing_bytes -= size
        self.used_bytes -= size
        self.books.count_file(extent, -size)
        self.books.set_size(extent, 0)
        self.books.move(extent, FileEvent.REMOVED)

    def remove_failed(self, report: OpFailed, now: float) -> None:
        """Its bytes still count until they are gone, so try until they are. For quarantine there is one try."""
        op = self._ops.get(report.op)
        if not isinstance(op, RemoveOp):
            return
        self._end_op(report.op)
        op.aside, op.reason = None, report.reason
        self.books.note_why(op.extent, report.reason)
        wait = _READ_ONLY_RETRY_SECONDS if report.reason is Reason.READ_ONLY else self._ledger.limits.retry_seconds
        self._retries.append((now + wait, op))

    def retry(self, now: float) -> None:
        due = [op for at, op in self._retries if at <= now]
        self._retries = [entry for entry in self._retries if entry[0] > now]
        for op in due:
            self._issue_remove(op)

    def next_retry(self) -> float | None:
        return min((entry[0] for entry in self._retries), default=None)

    def leave_to_sweep(self, extent: Extent) -> None:
        """Its files are there, and a purge's sweep removes them: `swept` tells of it."""
        self.end_leaving(extent)
        self.books.move(extent, FileEvent.LOST)
        self._owners[extent.key] = extent
        self._leaves_share(extent)
        self._to_sweep[extent] = None

    def swept(self, extents: Iterable[Extent]) -> list[Extent]:
        """Their files are gone. Of two purges that overlap, the first to be swept tells of what both took."""
        gone = [extent for extent in extents if extent in self._to_sweep]
        for extent in gone:
            del self._to_sweep[extent]
            self._file_gone(extent, Reason.PURGED)
        return gone

    def is_to_sweep(self, extent: Extent) -> bool:
        return extent in self._to_sweep

    def is_at_rest(self, extent: Extent) -> bool:
        """None of its files is being written or removed one by one."""
        return extent not in self._ops_of and not self.is_retried(extent)

    def is_retried(self, extent: Extent) -> bool:
        """A removal has failed, and is to be tried again."""
        return any(retry.extent is extent for _, retry in self._retries)

    def strand(self, num_bytes: int) -> None:
        """Files that stay where they are, and take room until `unstrand` or the next start."""
        self.stranded_bytes += num_bytes
        self.overhead_bytes += num_bytes

    def unstrand(self, num_bytes: int) -> None:
        """They are gone."""
        self.strand(-num_bytes)

    # ---- the worker's life and the tier's health

    def worker_died(self) -> list[Extent]:
        """Those that were being written: queued again, and what became of their files is unknown. Their bytes stay
        reserved, for there may be a file. Removals are asked for again by `worker_started`."""
        self.is_worker_up = False
        again = list(self._outcomes)
        for number in [number for number, op in self._ops.items() if isinstance(op, WriteOp)]:
            self._end_op(number)
        self._outcomes.clear()
        for extent in again:
            del self._owners[extent.key]
            self.books.move(extent, FileEvent.WORKER_DIED)
            self._strays.add(extent)
        self.writes_in_flight = 0
        return again

    def worker_started(self) -> None:
        self.is_worker_up = True
        for number, op in self._ops.items():
            if isinstance(op, RemoveOp):
                self._ledger.effects.append(self.books.addressed(self._remove_instruction(number, op)))

    def health(self, report: TierHealth, now: float) -> None:
        self.overhead_bytes = report.overhead_bytes + self.stranded_bytes
        self.growth_bytes = report.growth_bytes
        was_writable = self.is_writable
        self._count_spare_files(report.spare_inodes)
        self.is_readable = report.readable
        is_away = report.reason not in (None, Reason.IO_STUCK, Reason.READ_ONLY)
        self.why_not_readable = self.books.why_degraded if is_away else Reason.IO_STUCK
        self.is_writable = report.writable
        self.why_not_writable = None if report.writable else (report.reason or self.books.why_degraded)
        if not was_writable and report.writable:
            self._retries = [(now, op) for _, op in self._retries]

    def _count_spare_files(self, seen: int | None) -> None:
        """What was under way when the worker looked may have been seen or not: it is counted against us both times."""
        self._spare_since = self._next_op()
        writes = sum(isinstance(op, WriteOp) for op in self._ops.values())
        self.spare_files = None if seen is None else seen - _INODES_OF_A_FILE * writes

    # ---- operations

    def _new_op(self, op: WriteOp | RemoveOp) -> int:
        number = self._next_op()
        self._ops[number] = op
        self._ops_of[op.extent] = (*self._ops_of.get(op.extent, ()), number)
        self.num_removes += isinstance(op, RemoveOp)
        return number

    def _end_op(self, number: int) -> WriteOp | RemoveOp:
        op = self._ops.pop(number)
        self.num_removes -= isinstance(op, RemoveOp)
        left = tuple(other for other in self._ops_of[op.extent] if other != number)
        if left:
            self._ops_of[op.extent] = left
        else:
            del self._ops_of[op.extent]
        return op

    # ---- for the audit

    def extents_in_operations(self) -> set[Extent]:
        retried = {retry.extent for _, retry in self._retries}
        return {op.extent for op in self._ops.values()} | retried | set(self._to_sweep)

    def staying_bytes_of(self, group: Group) -> int:
        """In files and reserved, less what is on its way out. Looks at every extent."""
        known = {*self._ledger.tree, *self.extents_in_operations()}
        staying = (FileState.QUEUED, FileState.WRITING, FileState.PRESENT)
        return sum(
            self.books.size(e)
            for e in known
            if e.group == group.spec.group and self.books.state(e) in staying and e not in self._leaving
        )

    def check_sums(self) -> None:
        """Raises BrokenInvariant when the bytes counted per state are not those of the extents in it."""
        books, tier = self.books, self.books.tier
        known = set(self._ledger.tree) | self.extents_in_operations()
        used = sum(books.size(e) for e in known if books.state(e) in (FileState.PRESENT, FileState.REMOVING))
        reserved = sum(books.size(e) for e in known if books.state(e) in (FileState.WRITING, FileState.QUEUED))
        removing = sum(books.size(e) for e in known if books.state(e) is FileState.REMOVING)
        owners = {e.key: e for e in known if books.state(e) in (FileState.WRITING, FileState.REMOVING)}
        if self._owners != owners:
            raise BrokenInvariant(f"{tier} files being written or removed: {self._owners} counted, {owners} there")
        leaving = sum(books.size(e) for e in self._leaving if books.state(e) is FileState.PRESENT)
        if self.leaving_bytes != leaving:
            raise BrokenInvariant(f"{tier} leaving: {self.leaving_bytes} counted, {leaving} there")
        removes = sum(isinstance(op, RemoveOp) for op in self._ops.values())
        if self.num_removes != removes:
            raise BrokenInvariant(f"{tier} files being removed: {self.num_removes} counted, {removes} there")
        counted = (self.used_bytes, self.reserved_bytes, self.removing_bytes)
        if counted != (used, reserved, removing):
            raise BrokenInvariant(
                f"{tier} used, reserved, removing: {counted} counted, {used, reserved, removing} there"
            )
