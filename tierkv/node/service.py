"""The front's service: frames in, replies out. One thread; nothing here waits or reads a file.

    frame -> message -> session? ready? group? -> reading | writing | operating -> core -> reply, now or later

What goes wrong with one request is answered with an Error, and the node goes on; CoreFailed alone passes through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tierkv
from tierkv.core.codec_gate import CodecGate
from tierkv.core.grants import GroupSpec
from tierkv.core.instructions import AnyReport, PurgeResumed, PurgeSwept
from tierkv.core.reasons import Reason
from tierkv.node.control import WorkerName
from tierkv.node.core_calls import CoreCalls, CoreFailed
from tierkv.node.front_sessions import FrontSession, SessionTable
from tierkv.node.group_check import why_not_persistent, why_refused
from tierkv.node.operating import Operating
from tierkv.node.outbox import Outbox
from tierkv.node.reading import Reading
from tierkv.node.replies import shutting_down
from tierkv.node.waiting import Asker
from tierkv.node.writing import Writing
from tierkv.wire.frames import Malformed, decode_request
from tierkv.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    AnyRequest,
    AskCodec,
    CodecReply,
    Commit,
    Error,
    ErrorCode,
    Hello,
    HelloReply,
    NotReady,
    OpenGroup,
    OpenGroupReply,
    Pins,
    Release,
    Reply,
    Request,
    Shares,
    Starts,
    StartsReply,
    Status,
    Top,
    Usage,
)

MAX_GROUPS = 10_000

_WHILE_RECOVERING = (Hello, Status, OpenGroup, AskCodec, Top, Starts)
_WHILE_STOPPING = (Hello, Status, Usage, Pins, Shares, Top, Starts, Commit, Abort, Release)
_WHEN_SLOW = (Commit, Abort, Release)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What does not change while a front lives."""

    incarnation: int
    data_dir: str
    host_bytes: int
    slab_bytes: int
    has_nvme: bool
    disk_dir: str = ""
    is_read_only: bool = False
    began: float = 0.0  # node time


class Service:
    def __init__(
        self,
        core: CoreCalls,
        sessions: SessionTable,
        outbox: Outbox,
        facts: NodeFacts,
        *,
        status: Callable[[int, float], Reply],
        usage: Callable[[int, float], Reply],
        starts: Callable[[int], Reply] = lambda request_id: StartsReply(id=request_id, starts=()),
        opened: Callable[[bytes, int, bool], None] = lambda _group, _pid, _is_used: None,
        codec_gate: CodecGate | None = None,
    ) -> None:
        """`opened(group, pid, is_used)` is told that a process works with a group; `is_used`: so does another. Without
        a `codec_gate` blocks are stored as they are."""
        self._codec_gate = codec_gate or CodecGate()
        self._opened = opened
        self.is_stopping = False
        self._core = core
        self._state = core.state
        self._sessions = sessions
        self._outbox = outbox
        self._facts = facts
        self._known_groups: set[bytes] = set()
        outbox.on_lost = self._on_lost_reply
        self._reading = Reading(core, sessions, outbox)
        self._writing = Writing(core, sessions, outbox)
        self._operating = Operating(
            core,
            has_nvme=facts.has_nvme,
            disk_dir=facts.disk_dir,
            is_read_only=facts.is_read_only,
            status=status,
            usage=usage,
            starts=starts,
            began=facts.began,
        )
        self._handlers: dict[type[Request], Callable[[Any, Asker, float], Reply | None]] = {
            Hello: self._hello,
            OpenGroup: self._open_group,
            AskCodec: self._ask_codec,
            **self._reading.handlers,
            **self._writing.handlers,
            **self._operating.handlers,
        }

    # ---- requests

    def handle(self, peer: bytes, frame: bytes, now: float) -> None:
        """Answer one frame, now or when its answer is there."""
        request = decode_request(frame)
        if isinstance(request, Malformed):
            self._outbox.send(peer, request.error)
            return
        asker = Asker(peer, request.id, request.session, type(request).__name__, now)
        try:
            reply = self._answer(request, asker, now)
        except CoreFailed:
            raise
        except Exception:  # a bug of ours in one request, outside the core: it must not take the others' service away
            log.exception("%s of session %s", asker.request, asker.session.hex())
            reply = Error(id=request.id, code=ErrorCode.INTERNAL, problem="a bug in the node; its log says more")
        if reply is not None:
            self._outbox.reply(asker, reply, now)

    def _answer(self, request: AnyRequest, asker: Asker, now: float) -> Reply | None:
        session = self._sessions.find(request.session)
        if session is None or session.is_closed:
            problem = "no such session; the node was restarted, or the session has ended: open a new one"
            return Error(id=request.id, code=ErrorCode.SESSION_GONE, problem=problem, field="session")
        if session.is_slow and not isinstance(request, _WHEN_SLOW):
            problem = "slow_consumer: this session did not read its replies, and some were lost: open a new one"
            return Error(id=request.id, code=ErrorCode.SESSION_GONE, problem=problem, field="session")
        if self.is_stopping and not isinstance(request, _WHILE_STOPPING):
            return shutting_down(request.id)
        if self._state.is_recovering and not isinstance(request, _WHILE_RECOVERING):
            worker = self._core.mover.worker
            return NotReady(id=request.id, stage=worker.stage, done=worker.done, total=worker.total)
        group = getattr(request, "group", None)
        if group is not None and group not in session.groups:
            problem = "this session has not opened the group"
            return Error(id=request.id, code=ErrorCode.UNKNOWN_GROUP, problem=problem, field="group")
        return self._handlers[type(request)](request, asker, now)

    def _hello(self, request: Hello, _asker: Asker, _now: float) -> Reply:
        if request.protocol != PROTOCOL_VERSION:
            problem = f"this node speaks protocol {PROTOCOL_VERSION}"
            return Error(id=request.id, code=ErrorCode.PROTOCOL_VERSION, problem=problem, field="protocol")
        return HelloReply(
            id=request.id,
            protocol=PROTOCOL_VERSION,
            incarnation=self._facts.incarnation,
            version=tierkv.__version__,
            data_dir=self._facts.data_dir,
            host_bytes=self._facts.host_bytes,
        )

    def _ask_codec(self, request: AskCodec, _asker: Asker, _now: float) -> Reply:
        choice = self._codec_gate.choose(request.weights, request.adapter)
        return CodecReply(id=request.id, codec=choice.codec, reason=choice.reason or "", problem=choice.problem)

    def _open_group(self, request: OpenGroup, asker: Asker, now: float) -> Reply:
        refusal = why_refused(request, slab_bytes=self._facts.slab_bytes)
        if refusal is not None:
            return refusal
        if problem := self._codec_gate.why_refused(request.identity):
            field = "identity.layout.codec"
            return Error(id=request.id, code=ErrorCode.NO_VERDICT, problem=problem, field=field)
        group = request.identity.group_key()
        if group not in self._known_groups and len(self._known_groups) >= MAX_GROUPS:
            problem = f"this node knows {MAX_GROUPS} groups, as many as it takes"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="identity")
        reason = why_not_persistent(request.identity, has_nvme=self._facts.has_nvme, asked=request.persistent)
        spec = GroupSpec(
            group=group,
            identity=request.identity,
            model_name=request.model_name,
            adapter_name=request.adapter_name,
            manifest=request.manifest,
            persistent=reason is None,
        )
        self._core.do(now, lambda: self._state.open_group(spec, now))
        self._core.look(lambda: self._state.session_opens(asker.session, group))
        self._known_groups.add(group)
        self._core.recording.open_group(spec)
        session = self._sessions.find(asker.session)
        assert session is not None, "checked before"
        self._opened(group, session.pid, self._sessions.is_used(group, beside=session.token))
        session.groups.add(group)
        return OpenGroupReply(id=request.id, group=group, persistent=reason is None, reason=reason or "")

    # ---- what else happens

    def open_session(self, session: FrontSession, now: float) -> None:
        self._sessions.add(session)
        self._core.look(lambda: self._state.open_session(session.token, now))

    def close_session(self, token: bytes) -> None:
        """No new requests. Its grants stay: the process may be copying."""
        self._sessions.close(token)

    def end_session(self, token: bytes, now: float) -> None:
        """Proven: what it held is free. Whoever waited on its behalf waits no more."""
        self._sessions.remove(token)
        self._core.leases.take_session(token)
        self._core.seals.take_session(token)
        self._core.do(now, lambda: self._state.end_session(token, now))
        self._writing.session_ended(now)

    def _on_lost_reply(self, token: bytes) -> None:
        """Whoever does not read what it asked for gets no more of it, so that its backlog ends at what ZeroMQ and the
        kernel hold. With a new session it starts afresh."""
        if self._sessions.note_lost_reply(token):
            self._outbox.slow_sessions += 1
            log.warning("session %s does not read its replies: slow_consumer", token.hex())

    def on_report(self, report: AnyReport, now: float, worker: WorkerName = WorkerName.STORAGE) -> None:
        self._operating.on_report(report, now, worker)
        if worker is WorkerName.DISK:
            self._core.do(now, lambda: self._state.disk_report(report, now))
            return
        if isinstance(report, PurgeResumed):
            self._core.recording.purge_again(report, now)
        self._core.do(now, lambda: self._state.report(report, now))
        if isinstance(report, PurgeSwept):
            self._core.journal.unbalance(Reason.PURGED)

    def worker_started(self, now: float, worker: WorkerName = WorkerName.STORAGE) -> None:
        if worker is WorkerName.DISK:
            self._core.do(now, lambda: self._state.disk_worker_started(now))
        else:
            is_first = self._state.counts.worker_deaths == 0
            self._core.do(now, lambda: self._state.worker_started(now))
            self._core.journal.worker_started(now, Reason.NODE_AWAY if is_first else Reason.WORKER_DIED)
        self._operating.worker_started(now, worker)

    def worker_died(self, now: float, worker: WorkerName = WorkerName.STORAGE) -> None:
        died = self._state.disk_worker_died if worker is WorkerName.DISK else self._state.worker_died
        self._core.do(now, lambda: died(now))
        self._operating.worker_died(now, worker)

    def device_started(self, device: int, num_bytes: int, now: float) -> None:
        """Its worker has a pool of so many bytes."""
        self._core.do(now, lambda: self._state.device_worker_started(device, num_bytes, now))

    def device_died(self, device: int, now: float) -> None:
        """Its worker is dead, by proof, and its pool is gone."""
        self._core.do(now, lambda: self._state.device_worker_died(device, now))

    def on_device_report(self, device: int, report: AnyReport, now: float) -> None:
        self._core.do(now, lambda: self._state.device_report(device, report, now))

    def map_device(self, token: bytes, device: int) -> bool:
        """The session is about to map the pool that the device has now. False: it has ended, and maps nothing."""
        is_there = self._sessions.find(token) is not None
        if is_there:
            self._core.look(lambda: self._state.map_device(token, device))
        return is_there

    def host_limit(self, num_bytes: int, now: float, *, earlier_bytes: int = 0) -> None:
        self._core.do(now, lambda: self._state.host_limit(num_bytes, now, earlier_bytes=earlier_bytes))

    def tier_limit(self, num_bytes: int, now: float, worker: WorkerName) -> None:
        """Of the tier that it has the files of."""
        limit = self._state.disk_limit if worker is WorkerName.DISK else self._state.nvme_limit
        self._core.do(now, lambda: limit(num_bytes, now))

    # ---- time

    @property
    def num_checks(self) -> int:
        """Tickets whose keys are still to be checked: `check_keys` has work."""
        return self._writing.num_checks

    @property
    def has_idle_work(self) -> bool:
        return self.num_checks > 0 or self._state.has_idle_work

    def do_idle_work(self, now: float) -> None:
        """A slice of what nobody waits for."""
        if self.num_checks:
            self.check_keys(now)
        elif self._state.has_idle_work:
            self._core.do(now, lambda: self._state.make_ready(now))

    @property
    def is_hurried(self) -> bool:
        """Commits wait for keys to be checked, or too many tickets do."""
        return self._writing.is_hurried

    @property
    def is_behind(self) -> bool:
        return self._writing.is_behind

    def check_keys(self, now: float) -> None:
        self._writing.check_keys(now)

    def tick(self, now: float) -> None:
        self._core.do(now, lambda: self._state.tick(now))
        self._reading.tick(now)
        self._writing.tick(now)
        self._operating.tick(now)
        self._core.journal.tick(now)

    def next_wakeup(self) -> float | None:
        """When `tick` has something to do next, in node time."""
        times = (
            self._core.look(self._state.next_wakeup),
            self._core.leases.next_deadline(),
            self._core.seals.next_deadline(),
            self._operating.next_wakeup(),
            self._core.journal.next_due(),
        )
        return min((time for time in times if time is not None), default=None)

    # ---- the end

    def begin_shutdown(self, now: float) -> None:
        """Nothing new is granted; what grows is sealed and written."""
        self.is_stopping = True
        self._core.do(now, lambda: self._state.begin_shutdown(now))

    def drop_dirty(self, now: float) -> None:
        self._core.do(now, lambda: self._state.drop_dirty(Reason.SHUTDOWN, now))

    def answer_everybody(self, now: float) -> None:
        """Who still waits is told that the node ends."""
        for _, askers in [*self._core.leases.take_all(), *self._core.seals.take_all()]:
            for asker in askers:
                self._outbox.reply(asker, shutting_down(asker.request_id), now)
