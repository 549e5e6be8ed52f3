"""What a tenant may ask, and the answers. Everything else is not for it: it sees nothing of others.

    frame -> message -> session of this user? -> allowed? group? -> here (Fetch, Put, ends of grants)
                                                                 -> the node, in a task of its own

The identity in effect is the tenant's under its user (tierkv.core.tenancy). Whoever waits, waits alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, cast

import msgspec
import numpy as np

import tierkv
from tierkv.client.answers import CommitWait
from tierkv.client.grants import LeaseFacts, TicketFacts
from tierkv.client.groups import GroupRecord
from tierkv.core.keys import KEY_BYTES, TOKEN_BYTES, count_keys
from tierkv.core.reasons import Reason
from tierkv.errors import ConfigError, LayoutMismatch
from tierkv.gateway.spans import Writing, read_span
from tierkv.gateway.tenant_session import (
    CommitAnswer,
    Held,
    HeldLease,
    HeldTicket,
    Opening,
    TenantSession,
    blocks_affordable,
    charge,
)
from tierkv.gateway.upstream import HOP_SECONDS, Upstream, refusal, refusal_of_failure
from tierkv.gateway.users import MAX_IDENTITY_BYTES, MAX_REQUEST_BYTES, MAX_REQUESTS, User
from tierkv.wire.frames import Malformed, decode_request
from tierkv.wire.messages import (
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Acquire,
    AcquireReply,
    AnyRequest,
    BlockState,
    Commit,
    CommitReply,
    Done,
    Error,
    ErrorCode,
    Fetch,
    FetchReply,
    Hello,
    HelloReply,
    Match,
    MatchReply,
    OpenGroup,
    OpenGroupReply,
    Put,
    Release,
    Reply,
    ReportBad,
    Request,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
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
        self._fetched = np.empty(MAX_PAYLOAD_BYTES, np.uint8)
        self._endings: set[asyncio.Task[None]] = set()
        self._here: dict[type[Request], Callable[[TenantSession, Any], Reply]] = {
            Fetch: self._fetch,
            Put: self._put,
            Release: self._release,
            Abort: self._abort,
        }
        self._at_node: dict[type[Request], Ask] = {
            Hello: self._hello,
            OpenGroup: self._open_group,
            Match: self._match,
            Acquire: self._acquire,
            Reserve: self._reserve,
            Commit: self._commit,
            Seal: self._seal,
            ReportBad: self._report_bad,
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
        self._give_back(session.take_all())

    def sweep(self) -> None:
        """Let go of what was granted by a front that is gone: its arena counts as taken until then."""
        for session in self._sessions.values():
            self._give_back(session.take_stale())

    async def close(self) -> None:
        """Ends all sessions, and waits until the node has been told."""
        tasks = [task for session in self._sessions.values() for task in session.tasks]
        for token in list(self._sessions):
            self.end_session(token)
        await asyncio.gather(*tasks, *self._endings, return_exceptions=True)

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
        record = session.user.admit(record)
        session.groups.add(record.key)
        return OpenGroupReply(
            id=request.id, group=record.key, persistent=bool(record.persistent), reason=record.persistence_reason
        )

    # ---- reading

    async def _match(self, session: TenantSession, request: Match) -> Reply:
        record = session.user.record(request.group, 0)
        found = await self._upstream.run(self._upstream.verbs.match(record, request.keys))
        if found.reason is not None:
            return refusal(request.id, found.reason)
        return MatchReply(id=request.id, blocks=found.blocks, host_blocks=found.host_blocks)

    async def _acquire(self, session: TenantSession, request: Acquire) -> Reply:
        rank = request.holders[0].rank if request.holders else 0
        if len(request.holders) > 1 or any(holder.session != session.token for holder in request.holders):
            problem = "a session with inline payload holds what it asks for by itself; each rank asks for its own"
            return Error(id=request.id, code=ErrorCode.NOT_ALLOWED, problem=problem, field="holders")
        record = _record(session, request, rank)
        if isinstance(record, Error):
            return record
        return await self._open(session, request, lambda: self._open_lease(session, request, record))

    async def _open_lease(self, session: TenantSession, request: Acquire, record: GroupRecord) -> AcquireReply:
        user = session.user
        asked = min(request.max_blocks, count_keys(request.keys))
        most = min(asked, blocks_affordable(user, record))
        if asked and not most:
            return _no_lease(request.id, Reason.SESSION_CAP)
        booked = charge(user, record, most)  # before anybody else can ask
        facts = LeaseFacts(group=record)
        try:
            facts = await self._upstream.run(
                self._upstream.verbs.acquire(
                    record,
                    request.keys,
                    deadline_seconds=_less(request.deadline_ms),
                    max_blocks=most,
                    holders=(),
                    revocable=False,  # we copy at once, or not at all
                )
            )
        finally:
            user.held_bytes -= booked
        reply = AcquireReply(
            id=request.id,
            blocks=facts.blocks,
            nvme_blocks=facts.nvme_blocks,
            cached_blocks=facts.cached_blocks,
            parts=(),
            reason=facts.reason or (Reason.SESSION_CAP if facts.blocks == most < asked else ""),
        )
        if facts.session is not None:
            session.grants[request.grant] = HeldLease(facts, reply, charge(user, record, facts.blocks))
        return reply

    def _fetch(self, session: TenantSession, request: Fetch) -> Reply:
        held = session.find_lease(request.grant)
        if held is None or held.facts.slots is None:
            return _unknown_grant(request)
        size = held.facts.blocks * held.facts.group.block_bytes
        if request.start + request.num_bytes > size:
            problem = f"the lease has {size} bytes"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="start")
        proven = read_span(held.facts.slots, request.start, request.num_bytes, self._fetched)
        return FetchReply(id=request.id, payload=cast("bytes", proven.data))  # encoded before the next one is fetched

    def _release(self, session: TenantSession, request: Release) -> Reply:
        self._end_grant(session, request.grant, HeldLease)
        return Done(id=request.id)

    async def _report_bad(self, session: TenantSession, request: ReportBad) -> Reply:
        if request.first_bad >= count_keys(request.keys):
            problem = f"{request.first_bad} is none of the {count_keys(request.keys)} blocks of keys"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="first_bad")
        record = session.user.record(request.group, 0)
        reason = await self._upstream.run(self._upstream.verbs.report_bad(record, request.keys, request.first_bad))
        return Done(id=request.id) if reason is None else refusal(request.id, reason)

    # ---- writing

    async def _reserve(self, session: TenantSession, request: Reserve) -> Reply:
        if request.holder not in (b"", session.token):
            problem = "a session with inline payload writes what it asks for by itself"
            return Error(id=request.id, code=ErrorCode.NOT_ALLOWED, problem=problem, field="holder")
        record = _record(session, request, request.rank)
        if isinstance(record, Error):
            return record
        blocks = count_keys(request.keys) - request.first
        if len(request.tokens) != blocks * record.block_tokens * TOKEN_BYTES:
            problem = f"{len(request.tokens) // TOKEN_BYTES} tokens for {blocks} blocks of {record.block_tokens}"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="tokens")
        return await self._open(session, request, lambda: self._open_ticket(session, request, record))

    async def _open_ticket(self, session: TenantSession, request: Reserve, record: GroupRecord) -> ReserveReply:
        user = session.user
        asked = count_keys(request.keys) - request.first
        most = min(asked, blocks_affordable(user, record))
        if asked and not most:
            return _no_ticket(request.id, asked, Reason.SESSION_CAP)
        end = request.first + most
        booked = charge(user, record, most)
        facts = TicketFacts(group=record, first_block=request.first)
        try:
            facts = await self._upstream.run(
                self._upstream.verbs.reserve_packed(
                    record,
                    request.keys[: end * KEY_BYTES],
                    first_block=request.first,
                    tokens=request.tokens[: most * record.block_tokens * TOKEN_BYTES],
                    extras={block: list(inputs) for block, inputs in request.extras.items() if block < end},
                    deadline_seconds=_less(request.deadline_ms),
                )
            )
        finally:
            user.held_bytes -= booked
        if not facts.states:
            return _no_ticket(request.id, asked, facts.reason)
        # Where each block begins in the bytes that Put counts: of the slots themselves a tenant learns nothing.
        starts = np.arange(len(facts.granted), dtype="<u8") * record.block_bytes
        reply = ReserveReply(
            id=request.id,
            states=facts.states + bytes([BlockState.NO_ROOM]) * (asked - most),
            offsets=starts.tobytes(),
            generations=bytes(8 * len(starts)),
            reason=facts.reason or (Reason.SESSION_CAP if most < asked else ""),
        )
        if facts.session is not None and facts.slots is not None:
            charged = charge(user, record, len(facts.granted))
            session.grants[request.grant] = HeldTicket(facts, reply, charged, Writing(facts.slots))
        return reply

    def _put(self, session: TenantSession, request: Put) -> Reply:
        held = session.find_ticket(request.grant)
        if held is None:
            return _unknown_grant(request)
        size = len(held.facts.granted) * held.facts.group.block_bytes
        if request.start + len(request.payload) > size:
            problem = f"the granted blocks have {size} bytes"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="start")
        hole = held.writing.find_hole(request.start, len(request.payload))
        if hole is not None:
            problem = f"granted block {hole} would have a hole; write it from its first byte on"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="start")
        held.writing.write(request.start, request.payload)
        return Done(id=request.id)

    def _commit(self, session: TenantSession, request: Commit) -> Coroutine[Any, Any, Reply]:
        """The ticket ends here and now, not when a task of ours comes to it: a Put behind this request is too late."""
        known = session.ended.get(request.grant)
        if known is None:
            held = session.find_ticket(request.grant)
            if held is None:
                return _told(_unknown_grant(request))
            missing = held.writing.find_unwritten()
            if missing is not None:
                problem = f"granted block {missing} was not written to its end; put it, or abort"
                return _told(Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="grant"))
            known = self._publish(session, request.grant, held)
        return _outlive(known, request.id)

    def _publish(self, session: TenantSession, grant: bytes, held: HeldTicket) -> asyncio.Future[CommitAnswer]:
        """From here on nothing writes to the ticket's slots."""
        published: asyncio.Future[CommitAnswer] = asyncio.get_running_loop().create_future()
        session.take(grant)
        session.remember_ended(grant, published)

        async def publish(facts: TicketFacts) -> None:
            answer: CommitAnswer = Error(id=0, code=ErrorCode.INTERNAL, problem="the gateway's log says more")
            try:
                done = await self._upstream.run(self._upstream.verbs.commit(facts, CommitWait.VISIBLE))
                if done.reason is None:
                    answer = CommitReply(id=0, visible=done.visible, staged=done.staged)
                else:
                    answer = refusal(0, done.reason)
            finally:
                published.set_result(answer)

        self._end_later(publish(held.facts))
        return published

    def _abort(self, session: TenantSession, request: Abort) -> Reply:
        self._end_grant(session, request.grant, HeldTicket)
        return Done(id=request.id)

    async def _seal(self, session: TenantSession, request: Seal) -> Reply:
        record = session.user.record(request.group, 0)
        sealed = await self._upstream.run(
            self._upstream.verbs.seal(record, request.keys, request.wait, _less(request.deadline_ms))
        )
        if sealed.reason in (Reason.NOT_READY, Reason.NODE_AWAY, Reason.SESSION_GONE, Reason.WIRE_ERROR):
            return refusal(request.id, sealed.reason)
        return SealReply(
            id=request.id, blocks=sealed.blocks, flushed_blocks=sealed.flushed_blocks, reason=sealed.reason or ""
        )

    # ---- grants

    async def _open(
        self,
        session: TenantSession,
        request: Acquire | Reserve,
        ask: Callable[[], Awaitable[AcquireReply | ReserveReply]],
    ) -> Reply:
        """Each id once: a repeated request finds the first one's answer, an ended id stays ended."""
        grant = request.grant
        if grant in session.ended:
            return _ended(request)
        known = session.grants.get(grant)
        if isinstance(known, Opening):
            return _same(await asyncio.shield(known.reply), request)
        if known is not None:
            return _same(known.reply, request)
        opening = session.grants[grant] = Opening(asyncio.get_running_loop().create_future())
        reply: Reply = _ended(request)
        try:
            answer = await ask()
            if grant not in session.ended:
                reply = answer
        finally:
            if session.grants.get(grant) is opening:
                del session.grants[grant]
            if grant in session.ended and (held := session.take(grant)) is not None:
                self._give_back([held])
            opening.reply.set_result(reply)
        return reply

    def _end_grant(self, session: TenantSession, grant: bytes, kind: type[Held]) -> None:
        held = session.grants.get(grant)
        if grant in session.ended or not (held is None or isinstance(held, kind | Opening)):
            return
        taken = session.take(grant)
        if taken is not None:
            self._give_back([taken])

    def _give_back(self, grants: list[Held]) -> None:
        for held in grants:
            verbs = self._upstream.verbs
            ending = verbs.release(held.facts) if isinstance(held, HeldLease) else verbs.abort(held.facts)
            self._end_later(self._upstream.run(ending))

    def _end_later(self, ending: Coroutine[Any, Any, None]) -> None:
        """In a task that no session takes along."""
        task = asyncio.get_running_loop().create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._ended_later)

    def _ended_later(self, task: asyncio.Task[None]) -> None:
        self._endings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of a grant: %r", error, exc_info=error)


def _record(session: TenantSession, request: Acquire | Reserve, rank: int) -> GroupRecord | Error:
    try:
        return session.user.record(request.group, rank)
    except ConfigError as error:
        return Error(id=request.id, code=ErrorCode.INVALID, problem=error.problem, field="rank")


def _less(deadline_ms: int) -> float:
    return max(0.0, deadline_ms / 1_000 - HOP_SECONDS)


def _no_lease(request_id: int, reason: Reason | None) -> AcquireReply:
    return AcquireReply(id=request_id, blocks=0, nvme_blocks=0, cached_blocks=0, parts=(), reason=reason or "")


def _no_ticket(request_id: int, blocks: int, reason: Reason | None) -> ReserveReply:
    states = bytes([BlockState.NO_ROOM]) * blocks
    return ReserveReply(id=request_id, states=states, offsets=b"", generations=b"", reason=reason or "")


def _ended(request: Acquire | Reserve) -> Reply:
    if isinstance(request, Acquire):
        return _no_lease(request.id, Reason.GRANT_ENDED)
    return _no_ticket(request.id, count_keys(request.keys) - request.first, Reason.GRANT_ENDED)


def _same(reply: Reply, request: Acquire | Reserve) -> Reply:
    """An id that was used for the other kind of grant means nothing."""
    expected = AcquireReply if isinstance(request, Acquire) else ReserveReply
    return _with_id(reply, request.id) if isinstance(reply, expected) else _ended(request)


async def _told(reply: Reply) -> Reply:
    return reply


async def _outlive(published: asyncio.Future[CommitAnswer], request_id: int) -> Reply:
    """Whoever asks may go away meanwhile: what is whole gets published all the same."""
    return _with_id(await asyncio.shield(published), request_id)


def _with_id(reply: Reply, request_id: int) -> Reply:
    return msgspec.structs.replace(reply, id=request_id)


def _unknown_grant(request: Fetch | Put | Commit) -> Error:
    problem = "no such grant of this session, or it has ended"
    return Error(id=request.id, code=ErrorCode.UNKNOWN_GRANT, problem=problem, field="grant")


def _bug(request_id: int) -> Error:
    return Error(id=request_id, code=ErrorCode.INTERNAL, problem="a bug in the gateway; its log says more")
