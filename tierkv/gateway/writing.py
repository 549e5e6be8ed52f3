"""Requests of tenants that write: Reserve, Put, Commit, Abort, Seal."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from tierkv.client.answers import CommitWait
from tierkv.client.grants import TicketFacts
from tierkv.client.groups import GroupRecord
from tierkv.core.keys import KEY_BYTES, TOKEN_BYTES, count_keys
from tierkv.core.reasons import Reason
from tierkv.gateway.grants import Grants
from tierkv.gateway.replies import no_ticket, record_of, unknown_grant, with_id
from tierkv.gateway.spans import Writing as Written
from tierkv.gateway.tenant_session import CommitAnswer, HeldTicket, TenantSession, blocks_affordable, charge
from tierkv.gateway.upstream import Upstream, less_a_hop, refusal
from tierkv.wire.messages import (
    Abort,
    BlockState,
    Commit,
    CommitReply,
    Done,
    Error,
    ErrorCode,
    Put,
    Reply,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
)


class Writing:
    def __init__(self, upstream: Upstream, grants: Grants) -> None:
        self._upstream = upstream
        self._grants = grants

    async def reserve(self, session: TenantSession, request: Reserve) -> Reply:
        if request.holder not in (b"", session.token):
            problem = "a session with inline payload writes what it asks for by itself"
            return Error(id=request.id, code=ErrorCode.NOT_ALLOWED, problem=problem, field="holder")
        record = record_of(session, request, request.rank)
        if isinstance(record, Error):
            return record
        blocks = count_keys(request.keys) - request.first
        if len(request.tokens) != blocks * record.block_tokens * TOKEN_BYTES:
            problem = f"{len(request.tokens) // TOKEN_BYTES} tokens for {blocks} blocks of {record.block_tokens}"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="tokens")
        return await self._grants.open(session, request, lambda: self._open_ticket(session, request, record))

    async def _open_ticket(self, session: TenantSession, request: Reserve, record: GroupRecord) -> ReserveReply:
        user = session.user
        asked = count_keys(request.keys) - request.first
        most = min(asked, blocks_affordable(user, record))
        if asked and not most:
            return no_ticket(request.id, asked, Reason.SESSION_CAP)
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
                    deadline_seconds=less_a_hop(request.deadline_ms),
                )
            )
        finally:
            user.held_bytes -= booked
        if not facts.states:
            return no_ticket(request.id, asked, facts.reason)
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
            session.grants[request.grant] = HeldTicket(facts, reply, charged, Written(facts.slots))
        return reply

    def put(self, session: TenantSession, request: Put) -> Reply:
        held = session.find_ticket(request.grant)
        if held is None:
            return unknown_grant(request)
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

    def commit(self, session: TenantSession, request: Commit) -> Coroutine[Any, Any, Reply]:
        """The ticket ends here and now, not when a task of ours comes to it: a Put behind this request is too late."""
        known = session.ended.get(request.grant)
        if known is None:
            held = session.find_ticket(request.grant)
            if held is None:
                return _told(unknown_grant(request))
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

        self._grants.end_later(publish(held.facts))
        return published

    def abort(self, session: TenantSession, request: Abort) -> Reply:
        self._grants.end(session, request.grant, HeldTicket)
        return Done(id=request.id)

    async def seal(self, session: TenantSession, request: Seal) -> Reply:
        record = session.user.record(request.group, 0)
        sealed = await self._upstream.run(
            self._upstream.verbs.seal(record, request.keys, request.wait, less_a_hop(request.deadline_ms))
        )
        if sealed.reason in (Reason.NOT_READY, Reason.NODE_AWAY, Reason.SESSION_GONE, Reason.WIRE_ERROR):
            return refusal(request.id, sealed.reason)
        return SealReply(
            id=request.id, blocks=sealed.blocks, flushed_blocks=sealed.flushed_blocks, reason=sealed.reason or ""
        )


async def _told(reply: Reply) -> Reply:
    return reply


async def _outlive(published: asyncio.Future[CommitAnswer], request_id: int) -> Reply:
    """Whoever asks may go away meanwhile: what is whole gets published all the same."""
    return with_id(await asyncio.shield(published), request_id)
