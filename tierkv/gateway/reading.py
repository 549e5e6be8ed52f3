"""Requests of tenants that read: Match, Acquire, Fetch, Release, ReportBad."""

from __future__ import annotations

from typing import cast

import numpy as np

from tierkv.client.grants import LeaseFacts
from tierkv.client.groups import GroupRecord
from tierkv.core.keys import count_keys
from tierkv.core.reasons import Reason
from tierkv.gateway.grants import Grants
from tierkv.gateway.replies import no_lease, record_of, unknown_grant
from tierkv.gateway.spans import read_span
from tierkv.gateway.tenant_session import HeldLease, TenantSession, blocks_affordable, charge
from tierkv.gateway.upstream import Upstream, less_a_hop, refusal
from tierkv.wire.messages import (
    MAX_PAYLOAD_BYTES,
    Acquire,
    AcquireReply,
    Done,
    Error,
    ErrorCode,
    Fetch,
    FetchReply,
    Match,
    MatchReply,
    Release,
    Reply,
    ReportBad,
)


class Reading:
    def __init__(self, upstream: Upstream, grants: Grants) -> None:
        self._upstream = upstream
        self._grants = grants
        self._fetched = np.empty(MAX_PAYLOAD_BYTES, np.uint8)

    async def match(self, session: TenantSession, request: Match) -> Reply:
        record = session.user.record(request.group, 0)
        found = await self._upstream.run(self._upstream.verbs.match(record, request.keys))
        if found.reason is not None:
            return refusal(request.id, found.reason)
        return MatchReply(id=request.id, blocks=found.blocks, host_blocks=found.host_blocks)

    async def acquire(self, session: TenantSession, request: Acquire) -> Reply:
        rank = request.holders[0].rank if request.holders else 0
        if len(request.holders) > 1 or any(holder.session != session.token for holder in request.holders):
            problem = "a session with inline payload holds what it asks for by itself; each rank asks for its own"
            return Error(id=request.id, code=ErrorCode.NOT_ALLOWED, problem=problem, field="holders")
        record = record_of(session, request, rank)
        if isinstance(record, Error):
            return record
        return await self._grants.open(session, request, lambda: self._open_lease(session, request, record))

    async def _open_lease(self, session: TenantSession, request: Acquire, record: GroupRecord) -> AcquireReply:
        user = session.user
        asked = min(request.max_blocks, count_keys(request.keys))
        most = min(asked, blocks_affordable(user, record))
        if asked and not most:
            return no_lease(request.id, Reason.SESSION_CAP)
        booked = charge(user, record, most)  # before anybody else can ask
        facts = LeaseFacts(group=record)
        try:
            facts = await self._upstream.run(
                self._upstream.verbs.acquire(
                    record,
                    request.keys,
                    deadline_seconds=less_a_hop(request.deadline_ms),
                    max_blocks=most,
                    holders=(),
                    revocable=False,  # we copy at once, or not at all
                    name=request.name,
                )
            )
        finally:
            user.held_bytes -= booked
        reply = AcquireReply(
            id=request.id,
            blocks=facts.blocks,
            nvme_blocks=facts.nvme_blocks,
            disk_blocks=facts.disk_blocks,
            cached_blocks=facts.cached_blocks,
            parts=(),
            reason=facts.reason or (Reason.SESSION_CAP if facts.blocks == most < asked else ""),
        )
        if facts.session is not None:
            session.grants[request.grant] = HeldLease(facts, reply, charge(user, record, facts.blocks))
        return reply

    def fetch(self, session: TenantSession, request: Fetch) -> Reply:
        held = session.find_lease(request.grant)
        if held is None or held.facts.slots is None:
            return unknown_grant(request)
        size = held.facts.blocks * held.facts.group.block_bytes
        if request.start + request.num_bytes > size:
            problem = f"the lease has {size} bytes"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="start")
        proven = read_span(held.facts.slots, request.start, request.num_bytes, self._fetched)
        return FetchReply(id=request.id, payload=cast("bytes", proven.data))  # encoded before the next one is fetched

    def release(self, session: TenantSession, request: Release) -> Reply:
        self._grants.end(session, request.grant, HeldLease)
        return Done(id=request.id)

    async def report_bad(self, session: TenantSession, request: ReportBad) -> Reply:
        if request.first_bad >= count_keys(request.keys):
            problem = f"{request.first_bad} is none of the {count_keys(request.keys)} blocks of keys"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="first_bad")
        record = session.user.record(request.group, 0)
        reason = await self._upstream.run(self._upstream.verbs.report_bad(record, request.keys, request.first_bad))
        return Done(id=request.id) if reason is None else refusal(request.id, reason)
