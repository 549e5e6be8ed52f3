"""Long work that an operator asked for: warm-ups and verifications. Each reply is progress; who stops asking, stops it.

A warm-up is the core's. A verification is the storage worker's, one at a time; when the worker dies in the middle of
one, the next worker begins it anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.core.instructions import AnyInstruction, CancelScrub, Scrub, ScrubProgress
from tierkv.wire.messages import DamagedEntry, Error, ErrorCode, Reply, Verify, VerifyReply

ABANDONED_SECONDS = 30.0
MAX_WARMUPS = 16
MAX_DAMAGED_PER_REPLY = 10_000


@dataclass(slots=True)
class Warmups:
    """When somebody last asked about each warm-up."""

    _asked: dict[bytes, float] = field(default_factory=dict)

    def is_full(self, job: bytes) -> bool:
        return job not in self._asked and len(self._asked) >= MAX_WARMUPS

    def asked(self, job: bytes, now: float) -> None:
        self._asked[job] = now

    def forget(self, job: bytes) -> None:
        self._asked.pop(job, None)

    def take_abandoned(self, now: float) -> list[bytes]:
        jobs = [job for job, asked in self._asked.items() if asked + ABANDONED_SECONDS <= now]
        for job in jobs:
            del self._asked[job]
        return jobs

    def next_deadline(self) -> float | None:
        return min((asked + ABANDONED_SECONDS for asked in self._asked.values()), default=None)


@dataclass(slots=True)
class _Scrubbing:
    job: bytes
    op: int
    repair: bool
    asked: float
    checked: int = 0
    total: int = 0
    checked_bytes: int = 0
    finished: bool = False
    damaged: dict[str, str] = field(default_factory=dict)
    untold: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # with the reply to request `told_to`
    told_to: int = -1
    set_aside: set[tuple[bytes, int, bytes]] = field(default_factory=set)


class Verifications:
    """Instructions that come back are for the storage worker."""

    def __init__(self) -> None:
        self._current: _Scrubbing | None = None
        self._last_op = 0

    def ask(self, request: Verify, now: float) -> tuple[Reply, list[AnyInstruction]]:
        instructions: list[AnyInstruction] = []
        current = self._current
        if request.cancel:
            if current is None or current.job != request.job:
                return _finished(request.id), []
            instructions = self._end()
            current.finished = True
        elif current is None or (current.job != request.job and current.finished):
            current = self._current = _Scrubbing(request.job, self._new_op(), request.repair, now)
            instructions = [Scrub(op=current.op, repair=current.repair)]
        elif current.job != request.job:
            problem = "another verification is running; wait for its end"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="job"), []
        current.asked = now
        return _tell(request.id, current), instructions

    def report(self, report: ScrubProgress) -> None:
        current = self._current
        if current is None or current.op != report.op:
            return
        current.checked, current.total, current.checked_bytes = report.checked, report.total, report.checked_bytes
        current.finished = report.finished
        current.set_aside.update(report.set_aside)
        for path, reason in report.damaged:
            if path not in current.damaged:
                current.damaged[path] = reason
                current.untold.append(path)

    def worker_started(self) -> list[AnyInstruction]:
        if self._current is None or self._current.finished:
            return []
        self._current.op = self._new_op()
        return [Scrub(op=self._current.op, repair=self._current.repair)]

    def expire(self, now: float) -> list[AnyInstruction]:
        if self._current is None or self._current.asked + ABANDONED_SECONDS > now:
            return []
        return self._end()

    def next_deadline(self) -> float | None:
        return self._current.asked + ABANDONED_SECONDS if self._current is not None else None

    def _new_op(self) -> int:
        self._last_op += 1
        return self._last_op

    def _end(self) -> list[AnyInstruction]:
        current, self._current = self._current, None
        return [] if current is None or current.finished else [CancelScrub(op=current.op)]


def _tell(request_id: int, job: _Scrubbing) -> VerifyReply:
    if request_id != job.told_to:  # or it is asked again, as its reply went down with a connection
        job.told, job.untold = job.untold[:MAX_DAMAGED_PER_REPLY], job.untold[MAX_DAMAGED_PER_REPLY:]
        job.told_to = request_id
    return VerifyReply(
        id=request_id,
        checked_files=job.checked,
        total_files=job.total,
        checked_bytes=job.checked_bytes,
        damaged_files=len(job.damaged),
        damaged=tuple(DamagedEntry(path, job.damaged[path]) for path in job.told),
        finished=job.finished and not job.untold,
        set_aside_files=len(job.set_aside),
    )


def _finished(request_id: int) -> VerifyReply:
    return VerifyReply(
        id=request_id, checked_files=0, total_files=0, checked_bytes=0, damaged_files=0, damaged=(), finished=True
    )


def nothing_to_verify(request_id: int) -> VerifyReply:
    """Of a node without a data directory."""
    return _finished(request_id)
