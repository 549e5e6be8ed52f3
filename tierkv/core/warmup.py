"""Warm-up: bring extents from NVMe back to host memory by last use, parents first, within a budget.

It only uses room that is free: nothing is evicted to make room for a guess.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import NvmeState

_GROWTH_PAUSE_SECONDS = 5.0  # an arena that has not grown for so long is not growing
_READS_AHEAD = 4  # a job leaves the rest of the drive to those who wait for an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupState:
    """`already_bytes` of what was wanted were in host memory before. `reason` says what ended the job early."""

    done_extents: int
    total_extents: int
    promoted_bytes: int
    already_bytes: int
    budget_bytes: int
    failed_extents: int
    finished: bool
    reason: Reason | None


@dataclass(slots=True, eq=False)
class WarmupJob:
    todo: deque[Extent]
    budget_bytes: int
    total: int
    running: dict[Extent, int] = field(default_factory=dict)  # -> host bytes it had when its reads began
    done: int = 0
    promoted_bytes: int = 0
    already_bytes: int = 0
    planned_bytes: int = 0
    failed: int = 0
    finished: bool = False
    reason: Reason | None = None

    def state(self) -> WarmupState:
        return WarmupState(
            done_extents=self.done,
            total_extents=self.total,
            promoted_bytes=self.promoted_bytes,
            already_bytes=self.already_bytes,
            budget_bytes=self.budget_bytes,
            failed_extents=self.failed,
            finished=self.finished,
            reason=self.reason,
        )


def plan(ledger: Ledger, budget_bytes: int, fingerprint: str) -> WarmupJob:
    """The extents on NVMe of reachable prefixes, most recently used first, each behind its ancestors."""
    wanted = [
        extent
        for extent in ledger.tree
        if extent.nvme is NvmeState.PRESENT and ledger.group_of(extent).spec.identity.weights.startswith(fingerprint)
    ]
    wanted.sort(key=lambda extent: (-extent.last_used, extent.first_token))
    order: dict[Extent, None] = {}
    for extent in wanted:
        for step in reversed(_path_to_root(extent)):
            order.setdefault(step, None)
    todo = deque(extent for extent in order if extent.nvme is NvmeState.PRESENT)
    return WarmupJob(todo, budget_bytes or ledger.limits.host_bytes, len(todo))


def advance(job: WarmupJob, ledger: Ledger, cascade: Cascade, now: float) -> None:
    """Take note of finished reads and ask for the next ones."""
    for extent, before in list(job.running.items()):
        if any(cascade.is_reading(extent, rank) for rank in range(len(extent.slots))):
            continue
        del job.running[extent]
        job.done += 1
        job.promoted_bytes += max(0, _host_bytes(ledger, extent) - before)
        job.failed += not extent.in_tree or extent.host_blocks < extent.num_blocks
    while job.todo and len(job.running) < _READS_AHEAD and job.reason is None:
        if not _start(job, job.todo[0], ledger, cascade, now):
            break
    job.finished = not job.running and (not job.todo or job.reason is not None)


def _start(job: WarmupJob, extent: Extent, ledger: Ledger, cascade: Cascade, now: float) -> bool:
    """False: not now. `job.reason` says so when it is not later either."""
    if not extent.in_tree or extent.nvme is not NvmeState.PRESENT:  # its group may not even be known any more
        job.todo.popleft()
        job.done += 1
        return True
    group = ledger.group_of(extent)
    missing = sum(extent.num_blocks - len(slots) for slots in extent.slots)
    size = extent.num_blocks * group.ranks * group.slot_bytes
    if missing and job.planned_bytes + size > job.budget_bytes:
        job.reason = Reason.BUDGET
        return False
    if missing > ledger.pool.available(group.slot_bytes):
        is_growing = ledger.pool.limit_bytes < ledger.pool.capacity_bytes
        if not is_growing or now - ledger.host_limit_since > _GROWTH_PAUSE_SECONDS:
            job.reason = Reason.NO_ROOM
        return False
    job.todo.popleft()
    job.planned_bytes += size
    job.already_bytes += size - missing * group.slot_bytes
    if not missing:
        job.done += 1
        return True
    job.running[extent] = _host_bytes(ledger, extent)
    for rank in range(group.ranks):
        if len(extent.slots[rank]) < extent.num_blocks:
            cascade.want_read(extent, rank, extent.num_blocks, now)
    return True


def _host_bytes(ledger: Ledger, extent: Extent) -> int:
    return sum(map(len, extent.slots)) * ledger.group_of(extent).slot_bytes if extent.in_tree else 0


def _path_to_root(extent: Extent) -> list[Extent]:
    path = [extent]
    while extent.above is not None and extent.above.owner is not None:
        extent = extent.above.owner
        path.append(extent)
    return path if extent.parent == extent.group else []
