"""Warm-up: bring extents from NVMe and the disk tier back to host memory, what saves most first, within a budget.

It gives way. It uses room that is free and leaves some of that: nothing is evicted for a guess. It reads in small
pieces and begins none while somebody waits for a read; where requests come, it has one under way, so that a request
waits for that one at most and finds a core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import dataclass, field

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason
from tierkv.core.warmup_plan import SLICE, WarmupPlan, WarmupScope

__all__ = ["WarmupJob", "WarmupScope", "WarmupState", "advance", "begin"]

PIECE_BYTES = 4 * 2**20
READS_ALONE = 4
READS_BESIDE = 1
"""So many reads of a piece are under way at most, of all warm-ups: while nobody asks for anything, and else."""

ALONE_SECONDS = 1.0
"""Nobody has asked for so long: nobody does."""

SPARE_SHARE = 32
"""One part in so many of host memory is left free for requests that store or promote meanwhile."""

STEP_SECONDS = 0.05
"""After so long a slice of the plan is made even if somebody always waits: 2 % of the time."""

_GROWTH_PAUSE_SECONDS = 5.0  # an arena that has not grown for so long is not growing


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupState:
    """`already_bytes` of what was wanted were in host memory before; `total_bytes` are both together when it is done.
    `disk_bytes` of those that were promoted came from the disk tier. `reason` says what ended the job early.
    `is_yielding`: it reads nothing now, as somebody waits for a read."""

    done_extents: int
    total_extents: int
    promoted_bytes: int
    already_bytes: int
    total_bytes: int
    budget_bytes: int
    failed_extents: int
    is_yielding: bool
    finished: bool
    reason: Reason | None
    disk_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Bringing:
    """An extent of which the first `target` blocks are to be in host memory. A piece up to block `until` is read now,
    or was the last to be; `blocks` of all ranks together were there before it."""

    extent: Extent
    target: int
    until: int = 0
    blocks: int = 0
    has_failed: bool = False
    is_from_disk: bool = False


@dataclass(slots=True, eq=False)
class WarmupJob:
    plan: WarmupPlan
    budget_bytes: int
    why_no_more: Reason
    """When the budget is used up."""
    running: dict[Extent, _Bringing] = field(default_factory=dict)
    partial: deque[_Bringing] = field(default_factory=deque)  # between two pieces
    done: int = 0
    promoted_bytes: int = 0
    disk_bytes: int = 0
    already_bytes: int = 0
    planned_bytes: int = 0
    failed: int = 0
    is_skimming: bool = False  # through what is in memory already, slice by slice
    is_yielding: bool = False
    finished: bool = False
    reason: Reason | None = None

    @property
    def is_busy(self) -> bool:
        """`step` has something to do."""
        return not self.finished and (self.plan.is_busy or self.is_skimming)

    def step(self) -> None:
        """A slice of what nobody waits for; `advance` follows."""
        if self.plan.is_busy:
            self.plan.step()

    def state(self) -> WarmupState:
        return WarmupState(
            done_extents=self.done,
            total_extents=self.plan.extents,
            promoted_bytes=self.promoted_bytes,
            already_bytes=self.already_bytes,
            total_bytes=min(self.plan.num_bytes, self.budget_bytes),
            budget_bytes=self.budget_bytes,
            failed_extents=self.failed,
            is_yielding=self.is_yielding,
            finished=self.finished,
            reason=self.reason,
            disk_bytes=self.disk_bytes,
        )


def begin(ledger: Ledger, cascade: Cascade, scope: WarmupScope) -> WarmupJob:
    budget_bytes = scope.budget_bytes or ledger.limits.host_bytes
    why_no_more = Reason.BUDGET if scope.budget_bytes else Reason.NO_ROOM
    plan = WarmupPlan(ledger, scope, budget_bytes, cascade.reads.slowness)
    job = WarmupJob(plan, budget_bytes, why_no_more)
    while job.plan.is_busy and job.plan.looked_at < SLICE:
        job.step()
    return job


def advance(
    job: WarmupJob,
    ledger: Ledger,
    cascade: Cascade,
    now: float,
    *,
    most_reads: int,
    failed: Container[Extent],
) -> None:
    """Take note of finished reads, of which those of `failed` could not be read, and ask for the next ones until there
    are `most_reads`: none while somebody else waits for one."""
    _note_finished(job, ledger, cascade, failed)
    if not cascade.nvme.is_readable:
        job.running.clear()  # nobody knows when these come back
        _stop(job, Reason.IO_STUCK)
    job.is_yielding = not most_reads
    job.is_skimming = False
    if cascade.nvme.is_ready and not job.plan.is_busy:
        while cascade.reads.num_in_flight < most_reads and _begin_piece(job, ledger, cascade, now):
            pass
    if job.running or job.partial or job.is_busy or (job.plan.has_left and job.reason is None):
        return
    job.finished, job.is_yielding = True, False
    if job.plan.has_more and job.reason is None:
        job.reason = job.why_no_more


def _stop(job: WarmupJob, reason: Reason) -> None:
    job.reason = job.reason or reason
    job.partial.clear()


def _note_finished(job: WarmupJob, ledger: Ledger, cascade: Cascade, failed: Container[Extent]) -> None:
    for extent, piece in list(job.running.items()):
        piece.has_failed = piece.has_failed or extent in failed
        if any(cascade.reads.is_reading(extent, rank) for rank in range(len(extent.slots))):
            continue
        del job.running[extent]
        if extent.in_tree:
            gained = max(0, sum(map(len, extent.slots)) - piece.blocks) * ledger.group_of(extent).slot_bytes
            job.promoted_bytes += gained
            job.disk_bytes += gained * piece.is_from_disk
        is_whole = extent.in_tree and extent.host_blocks >= piece.target
        if is_whole or not extent.in_tree or extent.host_blocks < piece.until:  # or it failed, or was evicted meanwhile
            job.done += 1
            job.failed += piece.has_failed and not is_whole
        else:
            job.partial.append(piece)


def _begin_piece(job: WarmupJob, ledger: Ledger, cascade: Cascade, now: float) -> bool:
    """Whether another one may be tried."""
    piece = job.partial.popleft() if job.partial else _take(job, ledger)
    if piece is None:
        return False
    extent = piece.extent
    if not _is_there(extent):
        job.done += 1
        return True
    piece.until = _until(piece, ledger)
    if piece.until <= extent.host_blocks:
        job.partial.appendleft(piece)
        is_growing = ledger.pool.limit_bytes < ledger.pool.capacity_bytes
        if not is_growing or now - ledger.host_limit_since > _GROWTH_PAUSE_SECONDS:
            _stop(job, Reason.NO_ROOM)
        return False
    piece.blocks = sum(map(len, extent.slots))
    piece.is_from_disk = cascade.reads.source(extent) is cascade.disk
    job.running[extent] = piece
    for rank, slots in enumerate(extent.slots):
        if len(slots) < piece.until:
            cascade.want_read(extent, rank, piece.until, now)
    return True


def _take(job: WarmupJob, ledger: Ledger) -> _Bringing | None:
    """The next of which something is to be brought. None: there is no more, it would not fit the budget, or so many
    were looked at that others should have a turn."""
    for _ in range(SLICE):
        extent = job.plan.take() if job.reason is None else None
        if extent is None:
            return None
        piece = _look_at(job, extent, ledger)
        if piece is not None:
            return piece
    job.is_skimming = True
    return None


def _look_at(job: WarmupJob, extent: Extent, ledger: Ledger) -> _Bringing | None:
    """What of it is to be brought; None when it is nothing."""
    group = ledger.groups.get(extent.group)
    if group is None or not _is_there(extent) or not ledger.pool.fits(group.slot_bytes):
        job.done += 1
        return None
    of_block = group.ranks * group.slot_bytes
    target = min(extent.num_blocks, (job.budget_bytes - job.planned_bytes) // of_block)
    if target < extent.num_blocks:
        job.reason = job.why_no_more
    there = sum(min(target, len(slots)) for slots in extent.slots) * group.slot_bytes
    is_missing = there < target * of_block
    if is_missing and not _can_be_hit(job, extent):
        job.done += 1
        return None
    job.planned_bytes += target * of_block
    job.already_bytes += there
    if is_missing:
        return _Bringing(extent, target)
    job.done += target == extent.num_blocks
    return None


def _is_there(extent: Extent) -> bool:
    return extent.in_tree and extent.has_file


def _can_be_hit(job: WarmupJob, extent: Extent) -> bool:
    """All that it hangs on is in memory, or on its way."""
    while extent.above is not None and extent.above.owner is not None:
        parent = extent.above.owner
        is_coming = parent in job.running or any(piece.extent is parent for piece in job.partial)
        if not is_coming and parent.host_blocks <= extent.above.index:
            return False
        extent = parent
    return not extent.is_orphan


def _until(piece: _Bringing, ledger: Ledger) -> int:
    """Up to which block the next piece goes: the whole one, or as much as there is room for."""
    extent = piece.extent
    group = ledger.group_of(extent)
    first = extent.host_blocks
    until = min(piece.target, first + max(1, PIECE_BYTES // (group.ranks * group.slot_bytes)))
    room = ledger.pool.available(group.slot_bytes) - _spare_bytes(ledger) // group.slot_bytes
    if sum(max(0, until - len(slots)) for slots in extent.slots) > room:
        until = min(until, first + max(0, room) // group.ranks)
    return until


def _spare_bytes(ledger: Ledger) -> int:
    return ledger.limits.host_bytes // SPARE_SHARE
