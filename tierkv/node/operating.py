"""Requests of operators: Status, Usage, Starts, jobs, reports, pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierkv.core.instructions import AnyReport, ScrubProgress
from tierkv.core.warmup import WarmupScope
from tierkv.node.control import WorkerName
from tierkv.node.core_calls import CoreCalls
from tierkv.node.explaining import Explaining
from tierkv.node.jobs import Warmups
from tierkv.node.journal_reports import JournalReports
from tierkv.node.pinning import Pinning
from tierkv.node.purging import Purging
from tierkv.node.replies import evict_reply, no_warmup, warmup_reply
from tierkv.node.sizing import Sizing
from tierkv.node.verifying import Order, Verifications, finished_verification
from tierkv.node.waiting import Asker
from tierkv.wire.messages import Error, ErrorCode, Evict, Purge, Reply, Request, Starts, Status, Usage, Verify, Warmup


class Operating:
    """`status(request_id, now)`, `usage(request_id)` and `starts(request_id)` make those three replies."""

    def __init__(
        self,
        core: CoreCalls,
        *,
        has_nvme: bool,
        disk_dir: str = "",
        is_read_only: bool,
        status: Callable[[int, float], Reply],
        usage: Callable[[int, float], Reply],
        began: float = 0.0,
        starts: Callable[[int], Reply],
    ) -> None:
        self._core = core
        self._state = core.state
        self._has_nvme = has_nvme
        self._warmups = Warmups()
        self._disk_dir = disk_dir
        workers = (WorkerName.STORAGE, WorkerName.DISK) if disk_dir else (WorkerName.STORAGE,)
        self._verifications = Verifications(workers, core.disk.worker.why_away)
        self._reports = JournalReports(core, has_nvme=has_nvme, disk_dir=disk_dir, began=began)
        self._purging = Purging(
            core,
            is_read_only=is_read_only,
            is_disk_away=lambda: bool(disk_dir and core.disk.worker.why_away()),
        )
        self.handlers: dict[type[Request], Callable[[Any, Asker, float], Reply | None]] = {
            Status: lambda request, _asker, now: status(request.id, now),
            Usage: lambda request, _asker, now: usage(request.id, now),
            Starts: lambda request, _asker, _now: starts(request.id),
            Warmup: self._warmup,
            Verify: self._verify,
            Purge: self._purging.ask,
            **Explaining(core).handlers,
            **self._reports.handlers,
            Evict: self._evict,
            **Sizing(core).handlers,
            **Pinning(core, is_read_only=is_read_only, unreadable=self._unreadable_pins).handlers,
        }

    def _unreadable_pins(self) -> int:
        found = self._core.mover.worker.found
        return 0 if found is None else found.unreadable_pins

    def on_report(self, report: AnyReport, now: float, worker: WorkerName) -> None:
        if isinstance(report, ScrubProgress):
            self._verifications.report(report, worker)
        self._purging.on_report(report, worker)
        self._reports.on_report(report, now, worker)

    def worker_started(self, now: float, worker: WorkerName) -> None:
        self._instruct(self._verifications.worker_started(worker), now)
        if worker is WorkerName.STORAGE:
            self._reports.worker_started(now)

    def worker_died(self, now: float, worker: WorkerName) -> None:
        self._verifications.worker_died(worker)
        self._reports.worker_died(worker)

    def _instruct(self, orders: list[Order], now: float) -> None:
        movers = {WorkerName.STORAGE: self._core.mover, WorkerName.DISK: self._core.disk}
        for worker, instruction in orders:
            self._core.instruct(instruction, now, movers[worker])

    def tick(self, now: float) -> None:
        """Work that nobody asks about any more ends."""
        for job in self._warmups.take_abandoned(now):
            self._cancel_warmup(job, now)
        self._instruct(self._verifications.expire(now), now)
        self._reports.tick(now)

    def next_wakeup(self) -> float | None:
        times = (self._warmups.next_deadline(), self._verifications.next_deadline(), self._reports.next_wakeup())
        return min((time for time in times if time is not None), default=None)

    def _evict(self, request: Evict, _asker: Asker, now: float) -> Reply:
        tier, to_bytes, fingerprint = str(request.tier), request.to_bytes, request.fingerprint
        if tier == "disk" and not self._disk_dir:
            problem = "this node has no disk tier (disk_dir)"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="tier")
        if tier == "gpu" and not self._core.devices:
            problem = "this node has no pool on a GPU (gpu_devices)"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="tier")
        if tier == "nvme" and not self._has_nvme:
            problem = "this node keeps everything in host memory: it has no NVMe tier"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="tier")
        if request.dry_run:
            state = self._core.look(lambda: self._state.preview_eviction(tier, to_bytes, fingerprint, now))
        else:
            state = self._core.ask(now, lambda: self._state.evict(tier, to_bytes, fingerprint, now))
        names = {usage.spec.group: usage.spec.model_name for usage in self._state.usage()} if state.victims else {}
        return evict_reply(request.id, state, names)

    def _warmup(self, request: Warmup, _asker: Asker, now: float) -> Reply:
        job = request.job
        if self._warmups.is_full(job):
            problem = "too many warm-ups are running"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="job")
        if not request.cancel:
            scope = warmup_scope(request, now)
            self._core.do(now, lambda: self._state.start_warmup(job, scope, now))
            self._warmups.asked(job, now)
        progress = self._core.look(lambda: self._state.warmup_progress(job))
        if request.cancel:
            self._warmups.forget(job)
            self._cancel_warmup(job, now)
        return no_warmup(request.id) if progress is None else warmup_reply(request.id, progress)

    def _cancel_warmup(self, job: bytes, now: float) -> None:
        self._core.do(now, lambda: self._state.cancel_warmup(job, now))

    def _verify(self, request: Verify, _asker: Asker, now: float) -> Reply:
        if not self._has_nvme:
            return finished_verification(request.id)
        reply, orders = self._verifications.ask(request, now)
        self._instruct(orders, now)
        return reply


def warmup_scope(request: Warmup, now: float) -> WarmupScope:
    return WarmupScope(
        budget_bytes=request.budget_bytes,
        fingerprint=request.fingerprint,
        tenant=request.tenant,
        used_since=now - request.since_seconds if request.since_seconds else 0.0,
    )
