"""What a tenant may ask, and the answers. Everything else is not for it: it sees nothing of others.

    frame -> message -> session of this user? -> allowed? group? -> here (Fetch, Put, ends of grants)
                                                                 -> the node, in a task of its own

The identity in effect is the tenant's under its user (tierkv.core.tenancy). Whoever waits, waits alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import tierkv
from tierkv.errors import ConfigError, LayoutMismatch
from tierkv.gateway.grants import Grants
from tierkv.gateway.reading import Reading
from tierkv.gateway.tenant_session import TenantSession
from tierkv.gateway.upstream import Upstream, refusal, refusal_of_failure
from tierkv.gateway.users import MAX_IDENTITY_BYTES, MAX_REQUEST_BYTES, MAX_REQUESTS, User
from tierkv.gateway.writing import Writing
from tierkv.wire.frames import Malformed, decode_request
from tierkv.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Acquire,
    AnyRequest,
    AskCodec,
    CodecReply,
    Commit,
    Error,
    ErrorCode,
    Fetch,
    Hello,
    HelloReply,
    Match,
    OpenGroup,
    OpenGroupReply,
    Put,
    Release,
    Reply,
    ReportBad,
    Request,
    Reserve,
    Seal,
)

log = logging.getLogger(__name__)

Send = Callable[[TenantSession | None, Reply], None]
"""Where replies to one request go. The session is None where the request named none."""


class Ask(Protocol):
    def __call__(self, session: TenantSession, request: Any, /) -> Coroutine[Any, Any, Reply]: ...


class Service:
    def __init__(self, upstream: Upstream, *, incarnation: int) -> None:
        self._upstream = upstream
        self._incarnation = incarnation
        self._sessions: dict[bytes, TenantSession] = {}
        self._grants = Grants(upstream)
        reading, writing = Reading(upstream, self._grants), Writing(upstream, self._grants)
        self._here: dict[type[Request], Callable[[TenantSession, Any], Reply]] = {
            Fetch: reading.fetch,
            Put: writing.put,
            Release: reading.release,
            Abort: writing.abort,
        }
        self._at_node: dict[type[Request], Ask] = {
            Hello: self._hello,
            OpenGroup: self._open_group,
            AskCodec: self._ask_codec,
            Match: reading.match,
            Acquire: reading.acquire,
            Reserve: writing.reserve,
            Commit: writing.commit,
            Seal: writing.seal,
            ReportBad: reading.report_bad,
        }

    # ---- sessions

    def add(self, session: TenantSession) -> None:
        session.user.sessions += 1
        self._sessions[session.token] = session

    def find(self, token: bytes) -> TenantSession | None:
        return self._sessions.get(token)

    def end_session(self, token: bytes) -> None:
        """What it held is given back at once: nobody but us has touched the slots, and we don't any more."""
        session = self._sessions.pop(token, None)
        if session is None:
            return
        session.is_over = True
        session.user.sessions -= 1
        for task in session.tasks:
            task.cancel()
        self._grants.give_back(session.take_all())  # each with its group's record, which it keeps for itself
        for group in session.groups:
            if session.user.leave(group, session.token):
                self._upstream.state.forget_group(group)

    def sweep(self) -> None:
        """Let go of what was granted by a front that is gone: its arena counts as taken until then."""
        for session in self._sessions.values():
            self._grants.give_back(session.take_stale())

    async def close(self) -> None:
        """Ends all sessions, and waits until the node has been told."""
        tasks = [task for session in self._sessions.values() for task in session.tasks]
        for token in list(self._sessions):
            self.end_session(token)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._grants.close()

    # ---- requests

    def handle(self, user: User, frame: bytes, send: Send) -> None:
        """Answer one frame of a user's socket, now or when the node has answered."""
        request = decode_request(frame)
        if isinstance(request, Malformed):
            send(None, request.error)
            return
        session = self._sessions.get(request.session)
        if session is None or session.user is not user:
            problem = "no such session; the gateway was restarted, or the session has ended: open a new one"
            send(None, Error(id=request.id, code=ErrorCode.SESSION_GONE, problem=problem, field="session"))
            return
        try:
            refused = self._why_refused(session, request)
            if refused is not None:
                send(session, refused)
            elif type(request) in self._here:
                send(session, self._here[type(request)](session, request))
            else:
                self._begin(session, request, len(frame), send)
        except Exception:  # a bug of ours in one request must not take the others' service away
            log.exception("%s of user %d", type(request).__name__, user.uid)
            send(session, _bug(request.id))

    def _why_refused(self, session: TenantSession, request: AnyRequest) -> Error | None:
        if type(request) not in self._here and type(request) not in self._at_node:
            problem = f"{type(request).__name__} is for operators, not for a tenant that is not trusted"
            return Error(id=request.id, code=ErrorCode.NOT_ALLOWED, problem=problem)
        group = getattr(request, "group", None)
        if group is not None and group not in session.groups:
            problem = "this session has not opened the group"
            return Error(id=request.id, code=ErrorCode.UNKNOWN_GROUP, problem=problem, field="group")
        return None

    def _begin(self, session: TenantSession, request: AnyRequest, num_bytes: int, send: Send) -> None:
        user = session.user
        if user.requests >= MAX_REQUESTS or user.request_bytes + num_bytes > MAX_REQUEST_BYTES:
            problem = f"user {user.uid} has {user.requests} requests under way, as many as it may"
            send(session, Error(id=request.id, code=ErrorCode.TOO_MANY, problem=problem))
            return
        user.requests += 1
        user.request_bytes += num_bytes

        coming = self._at_node[type(request)](session, request)

        async def answer() -> None:
            try:
                reply = await coming
            except Exception:  # as in `handle`
                log.exception("%s of user %d", type(request).__name__, user.uid)
                reply = _bug(request.id)
            send(session, reply)

        def done(task: asyncio.Task[None]) -> None:
            coming.close()  # of a task that was cancelled before its first step
            session.tasks.discard(task)
            user.requests -= 1
            user.request_bytes -= num_bytes

        task = asyncio.get_running_loop().create_task(answer())
        session.tasks.add(task)
        task.add_done_callback(done)

    # ---- sessions and groups

    async def _hello(self, _session: TenantSession, request: Hello) -> Reply:
        """Answered when the node has answered one of ours: so a tenant's calls fail as quickly as anybody's while it is
        away."""
        if request.protocol != PROTOCOL_VERSION:
            problem = f"this gateway speaks protocol {PROTOCOL_VERSION}"
            return Error(id=request.id, code=ErrorCode.PROTOCOL_VERSION, problem=problem, field="protocol")
        reason = await self._upstream.run(self._upstream.verbs.ping())
        if reason is not None:
            return refusal(request.id, reason)
        return HelloReply(
            id=request.id,
            protocol=PROTOCOL_VERSION,
            incarnation=self._incarnation,
            version=tierkv.__version__,
            data_dir="",
            host_bytes=0,
        )

    async def _ask_codec(self, _session: TenantSession, request: AskCodec) -> Reply:
        answer = await self._upstream.run(self._upstream.verbs.ask_codec(request.weights, request.adapter))
        return CodecReply(id=request.id, codec=answer.codec, reason=answer.reason or "", problem=answer.problem)

    async def _open_group(self, session: TenantSession, request: OpenGroup) -> Reply:
        if len(request.identity.encode()) > MAX_IDENTITY_BYTES:
            problem = f"an identity of a tenant has {MAX_IDENTITY_BYTES} bytes at most"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="identity")
        try:
            record = session.user.declare(request)
        except ConfigError as error:
            return Error(id=request.id, code=ErrorCode.INVALID, problem=error.problem, field=error.field)
        except LayoutMismatch as error:
            return Error(id=request.id, code=ErrorCode.LAYOUT_MISMATCH, problem=str(error), field=error.field)
        if not session.user.has_room_for(record):
            problem = f"user {session.user.uid} has opened as many groups as it may"
            return Error(id=request.id, code=ErrorCode.TOO_MANY, problem=problem, field="identity")
        failure = await self._upstream.run(self._upstream.verbs.declare_group(record))
        if failure is not None:
            return refusal_of_failure(request.id, failure)
        record = session.user.admit(record, session.token)
        session.groups.add(record.key)
        return OpenGroupReply(
            id=request.id, group=record.key, persistent=bool(record.persistent), reason=record.persistence_reason
        )


def _bug(request_id: int) -> Error:
    return Error(id=request_id, code=ErrorCode.INTERNAL, problem="a bug in the gateway; its log says more")
