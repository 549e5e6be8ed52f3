"""Purge requests, and receipts as messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tierkv.core.instructions import AnyReport, PurgeResumed, PurgeSwept, Swept
from tierkv.core.purge_scope import NotOne, OfModel, OfPrefix, OfTenant, What
from tierkv.core.purges import PurgedGroup, PurgePhase, PurgeState, add_swept
from tierkv.core.reasons import Reason
from tierkv.node.control import WorkerName
from tierkv.node.core_calls import CoreCalls
from tierkv.node.recording import salt_digits
from tierkv.node.waiting import Asker
from tierkv.wire import messages
from tierkv.wire.messages import Error, ErrorCode, Purge, PurgeReply, Reply

MAX_UNFINISHED = 16
MAX_REMEMBERED = 1_000


class Purging:
    """A purge is the core's: it goes on whoever asks about it."""

    def __init__(
        self,
        core: CoreCalls,
        *,
        is_read_only: bool = False,
        is_disk_away: Callable[[], bool] = lambda: False,
    ) -> None:
        self._core = core
        self._is_disk_away = is_disk_away
        self._is_read_only = is_read_only
        self._state = core.state
        self._unfinished: set[bytes] = set()
        self._on_disk: dict[bytes, Swept] = {}  # what was swept there, of what the core sums up over both tiers

    def on_report(self, report: AnyReport, worker: WorkerName) -> None:
        """Of either worker."""
        if worker is WorkerName.DISK and isinstance(report, PurgeSwept | PurgeResumed):
            self._on_disk[report.purge] = add_swept(self._on_disk.get(report.purge, Swept()), report.swept)
            while len(self._on_disk) > MAX_REMEMBERED:
                del self._on_disk[next(iter(self._on_disk))]

    def ask(self, request: Purge, _asker: Asker, now: float) -> Reply:
        meant = [
            what
            for what in (
                None if request.tenant is None else OfTenant(request.tenant),
                None if request.model is None else OfModel(request.model),
                None if request.prefix is None else OfPrefix(request.prefix),
            )
            if what is not None
        ]
        if len(meant) > 1:
            problem = "tenant, model and prefix are three purges; ask for one"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="tenant")
        if request.model == "":
            problem = "a model is named by its fingerprint, which is not empty"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="model")
        if meant and self._is_read_only and not request.dry_run:
            problem = "this node may change nothing in its data directory (read_only); ask one that writes to it"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="job")
        if request.dry_run and meant:
            return self._reply(request, self._core.look(lambda: self._state.preview_purge(meant[0], now)), now)
        known = self._core.look(lambda: self._state.purge_progress(request.job))
        if known is not None:
            return self._reply(request, known, now)
        if not meant:
            problem = "this front knows no such purge: it may be over; ask for it again to be sure"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="job")
        return self._start(request, meant[0], now)

    def _start(self, request: Purge, what: What, now: float) -> Reply:
        progress = self._core.look(lambda: {job: self._state.purge_progress(job) for job in self._unfinished})
        self._unfinished = {job for job, state in progress.items() if state and state.phase is not PurgePhase.GONE}
        if len(self._unfinished) >= MAX_UNFINISHED:
            problem = f"{MAX_UNFINISHED} purges are not through yet; wait for one of them"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="job")
        answer = self._core.ask(now, lambda: self._state.start_purge(request.job, what, now))
        if isinstance(answer, PurgeState):
            self._unfinished.add(request.job)
            self._core.recording.purge(request.job, what, answer.groups, now)
            groups, none = frozenset(group.spec.group for group in answer.groups), frozenset[bytes]()
            self._core.journal.forget(*((groups, none) if request.prefix is None else (none, groups)))
        return self._reply(request, answer, now)

    def _reply(self, request: Purge, answer: PurgeState | NotOne, now: float) -> Reply:
        if isinstance(answer, PurgeState):
            forgotten = self._core.recording.forgotten(request.job, now)
            if forgotten is None:  # the recording still has some of it
                answer = replace(answer, phase=PurgePhase.REMOVING)
            if answer.phase is PurgePhase.REMOVING and answer.reason is None and self._is_disk_away():
                answer = replace(answer, reason=Reason.DISK_DEGRADED)  # it is swept when it is there again
            on_disk = self._on_disk.get(request.job, Swept())
            return purge_reply(request.id, answer, on_disk)
        found = "no block" if not answer.found else f"{answer.found} blocks"
        problem = f"{found} known here with a key that begins with {request.prefix}; name one, by more of its digits"
        return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="prefix")


def purge_reply(request_id: int, state: PurgeState, on_disk: Swept) -> PurgeReply:
    about, swept = state.about, state.swept
    return PurgeReply(
        id=request_id,
        phase=state.phase,
        finished=state.phase in (PurgePhase.GONE, PurgePhase.PREVIEW),
        groups=tuple(map(_group, state.groups)),
        extents=about.extents,
        blocks=about.blocks,
        tokens=about.tokens,
        host_bytes=about.host_bytes,
        nvme_bytes=about.nvme_bytes,
        disk_bytes=about.disk_bytes,
        gpu_bytes=about.gpu_bytes,
        removed_files=swept.files,
        removed_bytes=swept.file_bytes,
        quarantined_files=swept.quarantined_files,
        quarantined_bytes=swept.quarantined_bytes,
        temp_files=swept.temp_files,
        temp_bytes=swept.temp_bytes,
        index_rows=swept.index_rows,
        left_files=swept.left_files,
        left_paths=swept.left_paths,
        unknown_groups=swept.unknown_groups,
        leases=state.leases,
        tickets=state.tickets,
        held_bytes=state.held_bytes,
        wiping_bytes=state.wiping_bytes,
        earlier_bytes=state.earlier_bytes,
        recorded=state.recorded,
        asked=about.asked,
        unreachable=state.unreachable,
        gone=state.gone,
        reason=state.reason or "",
        removed_disk_files=on_disk.files,
        removed_disk_bytes=on_disk.file_bytes,
    )


def _group(group: PurgedGroup) -> messages.PurgedGroup:
    identity = group.spec.identity
    return messages.PurgedGroup(
        fingerprint=identity.weights,
        group=group.spec.group,
        model_name=group.spec.model_name,
        salt=salt_digits(identity.salt),
        extents=group.extents,
        blocks=group.blocks,
    )
