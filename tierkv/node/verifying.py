"""Verifications: each worker looks at the files of its tier. Each reply is progress; who stops asking, stops it.

One at a time. When the storage worker dies in the middle of one, the next one begins anew. The disk tier may be away
for as long as it likes: then its files are not looked at, and the last reply says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierkv.core.instructions import AnyInstruction, CancelScrub, Scrub, ScrubProgress
from tierkv.node.control import WorkerName
from tierkv.node.jobs import ABANDONED_SECONDS
from tierkv.wire.messages import DamagedEntry, Error, ErrorCode, Reply, Verify, VerifyReply

MAX_DAMAGED_PER_REPLY = 10_000

TIERS = {WorkerName.STORAGE: "nvme", WorkerName.DISK: "disk"}

Order = tuple[WorkerName, AnyInstruction]


@dataclass(slots=True)
class _Part:
    """What one worker does of it."""

    op: int
    checked: int = 0
    total: int = 0
    checked_bytes: int = 0
    finished: bool = False
    problem: str = ""


@dataclass(slots=True)
class _Scrubbing:
    job: bytes
    repair: bool
    asked: float
    parts: dict[WorkerName, _Part] = field(default_factory=dict)
    damaged: dict[tuple[str, str], str] = field(default_factory=dict)  # (tier, path) -> reason
    untold: list[tuple[str, str]] = field(default_factory=list)
    told: list[tuple[str, str]] = field(default_factory=list)  # with the reply to request `told_to`
    told_to: int = -1
    set_aside: set[tuple[WorkerName, bytes, int, bytes]] = field(default_factory=set)

    @property
    def finished(self) -> bool:
        return all(part.finished for part in self.parts.values())


class Verifications:
    """`why_disk_away()` says why the files of the disk tier can't be looked at; empty where they can. Orders are for
    the worker that is named with them."""

    def __init__(self, workers: tuple[WorkerName, ...], why_disk_away: Callable[[], str]) -> None:
        self._workers = workers
        self._why_disk_away = why_disk_away
        self._current: _Scrubbing | None = None
        self._last_op = 0

    def ask(self, request: Verify, now: float) -> tuple[Reply, list[Order]]:
        orders: list[Order] = []
        current = self._current
        if request.cancel:
            if current is None or current.job != request.job:
                return finished_verification(request.id), []
            orders = self._end()
            for part in current.parts.values():
                part.finished = True
        elif current is None or (current.job != request.job and current.finished):
            current = self._current = _Scrubbing(request.job, request.repair, now)
            orders = list(self._begin(current))
        elif current.job != request.job:
            problem = "another verification is running; wait for its end"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="job"), []
        current.asked = now
        return _tell(request.id, current), orders

    def _begin(self, current: _Scrubbing) -> Iterator[Order]:
        for worker in self._workers:
            current.parts[worker] = part = _Part(self._new_op())
            why = self._why_disk_away() if worker is WorkerName.DISK else ""
            if why:
                part.finished, part.problem = True, f"the disk tier is not looked at: {why}"
            else:
                yield worker, Scrub(op=part.op, repair=current.repair)

    def report(self, report: ScrubProgress, worker: WorkerName) -> None:
        current = self._current
        part = None if current is None else current.parts.get(worker)
        if current is None or part is None or part.op != report.op:
            return
        part.checked, part.total, part.checked_bytes = report.checked, report.total, report.checked_bytes
        part.finished = report.finished
        current.set_aside.update((worker, *one) for one in report.set_aside)
        for path, reason in report.damaged:
            file = (TIERS[worker], path)
            if file not in current.damaged:
                current.damaged[file] = reason
                current.untold.append(file)

    def worker_started(self, worker: WorkerName) -> list[Order]:
        part = self._current.parts.get(worker) if self._current is not None else None
        if self._current is None or part is None or part.finished:
            return []
        part.op = self._new_op()
        return [(worker, Scrub(op=part.op, repair=self._current.repair))]

    def worker_died(self, worker: WorkerName) -> None:
        part = self._current.parts.get(worker) if self._current is not None else None
        if part is not None and not part.finished and worker is WorkerName.DISK:
            part.finished, part.problem = True, "the worker of the disk tier has died in between; verify again"

    def expire(self, now: float) -> list[Order]:
        if self._current is None or self._current.asked + ABANDONED_SECONDS > now:
            return []
        return self._end()

    def next_deadline(self) -> float | None:
        return self._current.asked + ABANDONED_SECONDS if self._current is not None else None

    def _new_op(self) -> int:
        self._last_op += 1
        return self._last_op

    def _end(self) -> list[Order]:
        current, self._current = self._current, None
        if current is None:
            return []
        return [(worker, CancelScrub(op=part.op)) for worker, part in current.parts.items() if not part.finished]


def _tell(request_id: int, job: _Scrubbing) -> VerifyReply:
    if request_id != job.told_to:  # or it is asked again, as its reply went down with a connection
        job.told, job.untold = job.untold[:MAX_DAMAGED_PER_REPLY], job.untold[MAX_DAMAGED_PER_REPLY:]
        job.told_to = request_id
    parts = job.parts.values()
    return VerifyReply(
        id=request_id,
        checked_files=sum(part.checked for part in parts),
        total_files=sum(part.total for part in parts),
        checked_bytes=sum(part.checked_bytes for part in parts),
        damaged_files=len(job.damaged),
        damaged=tuple(DamagedEntry(path, job.damaged[tier, path], tier) for tier, path in job.told),
        finished=job.finished and not job.untold,
        set_aside_files=len(job.set_aside),
        problem="; ".join(part.problem for part in parts if part.problem),
    )


def finished_verification(request_id: int) -> VerifyReply:
    """Of a job that is over, or of a node without a data directory."""
    return VerifyReply(
        id=request_id, checked_files=0, total_files=0, checked_bytes=0, damaged_files=0, damaged=(), finished=True
    )
