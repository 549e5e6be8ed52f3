"""Reports of evictions, and audits: asked of the storage worker, and of the core, piece by piece until they are there.

Whoever asks, asks again; what nobody asks about any more is forgotten. When the worker dies in between, the next one is
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from blake3 import blake3

from tierkv.core.eviction_report import EvictionReport
from tierkv.core.grants import GroupSpec
from tierkv.core.instructions import (
    AnyInstruction,
    AnyReport,
    CountFiles,
    Difference,
    FilesCounted,
    JournalRead,
    ReadJournal,
    Reckon,
    Reckoned,
)
from tierkv.core.recount import HostRecount
from tierkv.node.control import WorkerName
from tierkv.node.core_calls import CoreCalls
from tierkv.node.disk_count import DiskCount
from tierkv.node.jobs import ABANDONED_SECONDS
from tierkv.node.tier_audit import core_differences, seen_twice
from tierkv.node.waiting import Asker
from tierkv.storage.differences import Differences
from tierkv.wire.messages import (
    Audit,
    AuditReply,
    Error,
    ErrorCode,
    Evictions,
    EvictionsReply,
    GroupLabel,
    Reply,
    Request,
)

MAX_JOBS = 16


@dataclass(slots=True, kw_only=True)
class _Job:
    """`order` is what the worker was asked and has not answered."""

    asked: float
    order: AnyInstruction | None = None
    report: EvictionReport | None = None
    recount: HostRecount | None = None
    found: list[Difference] = field(default_factory=list)  # in host memory
    host_bytes: int = 0
    counted: FilesCounted | None = None
    suspected: list[Difference] | None = None  # of the front's own sums, at the first count of the files
    first: FilesCounted | None = None
    disk: DiskCount | None = None
    reckoned: Reckoned | None = None
    problem: str = ""


class JournalReports:
    """`began` is when the node did, in its own time."""

    def __init__(self, core: CoreCalls, *, has_nvme: bool, disk_dir: str = "", began: float) -> None:
        self._core = core
        self._disk_dir = disk_dir
        self._state = core.state
        self._has_nvme = has_nvme
        self._began = began
        self._jobs: dict[bytes, _Job] = {}
        self._ops = count(1)
        self._in_memory = Differences(None)  # the table of a node without a data directory
        self.handlers: dict[type[Request], Callable[[Any, Asker, float], Reply | None]] = {
            Evictions: self._evictions,
            Audit: self._audit,
        }

    # ---- what was evicted

    def _evictions(self, request: Evictions, _asker: Asker, now: float) -> Reply:
        since = now - request.seconds
        if not self._has_nvme:
            report = self._core.journal.report(since, now, by_prefix=request.by_prefix, began=self._began)
            return self._evictions_reply(request.id, report)
        job = self._jobs.get(request.job)
        if job is None:
            job = self._begin(request.job, now)
            if job is None:
                return _too_many(request.id)
            self._core.journal.flush(now)
            self._order(job, ReadJournal(next(self._ops), since, now, request.by_prefix), now)
        job.asked = now
        if job.order is not None:
            return EvictionsReply(id=request.id, finished=False)
        del self._jobs[request.job]
        if job.report is None:
            return EvictionsReply(id=request.id, finished=True, problem=job.problem)
        return self._evictions_reply(request.id, job.report)

    def _evictions_reply(self, request_id: int, report: EvictionReport) -> Reply:
        wanted = {line.group for line in report.lines}
        return EvictionsReply(
            id=request_id,
            finished=True,
            since=report.since,
            until=report.until,
            lines=report.lines,
            buckets=report.buckets,
            groups=tuple(label(usage.spec) for usage in self._state.usage() if usage.spec.group in wanted),
            damaged=report.damaged,
            not_written=self._core.journal.all_dropped(report.not_written),
            in_memory=report.in_memory,
            lacks=report.lacks,
        )

    # ---- audits

    def _audit(self, request: Audit, _asker: Asker, now: float) -> Reply:
        if bool(request.resolve) != bool(request.resolution.strip()):
            problem = "a difference is resolved by its number and the words for it"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="resolution")
        job = self._jobs.get(request.job)
        if job is None:
            job = self._begin(request.job, now)
            if job is None:
                return _too_many(request.id)
            self._begin_audit(job, request, now)
        job.asked = now
        self._go_on(job, now)
        reply = self._audit_reply(request.id, job)
        if reply.finished:
            del self._jobs[request.job]
        return reply

    def _begin_audit(self, job: _Job, request: Audit, now: float) -> None:
        if request.resolve and not self._has_nvme:
            known = self._in_memory.resolve(request.resolve, request.resolution, now)
            job.reckoned = Reckoned(0, list(self._in_memory.rows), known)
        elif request.resolve:
            order = Reckon(next(self._ops), [], now, resolve=request.resolve, resolution=request.resolution)
            self._order(job, order, now)
        elif any(other.recount is not None for other in self._jobs.values()):
            job.reckoned = Reckoned(0, [], problem="another audit is running; wait for its end")
        else:
            job.recount = self._core.look(self._state.recount_host)

    def _go_on(self, job: _Job, now: float) -> None:
        """A slice of the recount; behind it what the worker is to do."""
        if job.recount is None:
            return
        recount = job.recount
        found = self._core.look(lambda: recount.step(now))
        if found is None:
            return
        job.recount, job.found, job.host_bytes = None, found, recount.host_bytes
        if self._has_nvme:
            self._core.journal.flush(now)
            self._order(job, CountFiles(next(self._ops)), now)
            if self._disk_dir:
                job.disk = DiskCount.begin(self._core, next(self._ops), now)
        else:
            self._in_memory.add(found)
            job.reckoned = Reckoned(0, list(self._in_memory.rows))

    def _audit_reply(self, request_id: int, job: _Job) -> AuditReply:
        if job.recount is not None:
            done, total = job.recount.done, job.recount.total
            return AuditReply(id=request_id, finished=False, stage="memory", done=done, total=total)
        counted, disk = job.counted, job.disk
        if job.reckoned is not None and disk is not None and not disk.finished:
            return AuditReply(id=request_id, finished=False, stage="disk", done=disk.done, total=disk.total)
        if job.reckoned is None:
            done, total = (counted.done, counted.total) if counted is not None else (0, 0)
            stage = "table" if counted is not None and counted.finished else "files"
            return AuditReply(id=request_id, finished=False, stage=stage, done=done, total=total)
        problems = [job.problem, job.reckoned.problem, counted.problem if counted is not None else ""]
        problems.append(disk.problem if disk is not None else "")
        return AuditReply(
            id=request_id,
            finished=True,
            host_bytes=job.host_bytes,
            groups=tuple(counted.groups) if counted is not None else (),
            disk_groups=tuple(disk.groups) if disk is not None else (),
            table=tuple(job.reckoned.table),
            problem="; ".join(problem for problem in problems if problem),
            known=job.reckoned.known,
        )

    # ---- the workers

    def on_report(self, report: AnyReport, now: float, worker: WorkerName) -> None:
        if not isinstance(report, JournalRead | FilesCounted | Reckoned):
            return
        if worker is WorkerName.DISK:
            if isinstance(report, FilesCounted):
                for job in self._jobs.values():
                    if job.disk is not None:
                        job.disk.counted(self._core, report)
            return
        for job in self._jobs.values():
            if job.order is not None and getattr(job.order, "op", None) == report.op:
                self._on_answer(job, report, now)
                return

    def _on_answer(self, job: _Job, report: JournalRead | FilesCounted | Reckoned, now: float) -> None:
        match report:
            case JournalRead():
                job.order, job.report, job.problem = None, report.report, report.problem
            case FilesCounted(finished=False):
                job.counted = report
            case FilesCounted():
                self._on_counted(job, report, now)
            case Reckoned():
                job.order, job.reckoned = None, report

    def _on_counted(self, job: _Job, report: FilesCounted, now: float) -> None:
        """A difference to the front's own sums counts when a second count has it as well."""
        settled = self._core.look(self._state.settled_bytes)
        found = core_differences("nvme", settled, report.groups, report.table, now)
        if job.suspected is None:
            job.suspected, job.first = found, report
            if found:
                self._order(job, CountFiles(next(self._ops)), now)
                return
        job.counted = job.first
        job.found += seen_twice(job.suspected, found)
        self._order(job, Reckon(next(self._ops), job.found, now), now)

    def worker_started(self, now: float) -> None:
        for job in self._jobs.values():
            if job.order is not None:
                self._core.instruct(job.order, now)

    def worker_died(self, worker: WorkerName) -> None:
        for job in self._jobs.values():
            if worker is WorkerName.DISK and job.disk is not None:
                job.disk.died()

    def _order(self, job: _Job, order: AnyInstruction, now: float) -> None:
        job.order = order
        self._core.instruct(order, now)

    # ---- jobs

    def _begin(self, job_id: bytes, now: float) -> _Job | None:
        if len(self._jobs) >= MAX_JOBS:
            return None
        job = self._jobs[job_id] = _Job(asked=now)
        return job

    def tick(self, now: float) -> None:
        """What nobody asks about any more is forgotten."""
        for job_id, job in list(self._jobs.items()):
            if job.asked + ABANDONED_SECONDS <= now:
                if job.recount is not None:
                    job.recount.end()
                del self._jobs[job_id]

    def next_wakeup(self) -> float | None:
        return min((job.asked + ABANDONED_SECONDS for job in self._jobs.values()), default=None)


def label(spec: GroupSpec) -> GroupLabel:
    identity = spec.identity
    return GroupLabel(
        group=spec.group,
        fingerprint=identity.weights,
        model_name=spec.model_name,
        adapter=identity.adapter,
        adapter_name=spec.adapter_name,
        salt=blake3(identity.salt.encode()).hexdigest()[:8] if identity.salt else "",
    )


def _too_many(request_id: int) -> Error:
    problem = f"{MAX_JOBS} reports and audits are running; wait for one of them"
    return Error(id=request_id, code=ErrorCode.INVALID, problem=problem, field="job")
