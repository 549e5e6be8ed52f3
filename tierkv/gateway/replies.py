"""Replies of a gateway that say no, or say it again."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tierkv.client.groups import GroupRecord
from tierkv.core.keys import count_keys
from tierkv.core.reasons import Reason
from tierkv.errors import ConfigError
from tierkv.gateway.tenant_session import TenantSession
from tierkv.wire.messages import (
    Acquire,
    AcquireReply,
    BlockState,
    Commit,
    Error,
    ErrorCode,
    Fetch,
    Put,
    Reply,
    Reserve,
    ReserveReply,
)

R = TypeVar("R", bound=Reply)


def record_of(session: TenantSession, request: Acquire | Reserve, rank: int) -> GroupRecord | Error:
    try:
        return session.user.record(request.group, rank)
    except ConfigError as error:
        return Error(id=request.id, code=ErrorCode.INVALID, problem=error.problem, field="rank")


def no_lease(request_id: int, reason: Reason | None) -> AcquireReply:
    return AcquireReply(id=request_id, blocks=0, nvme_blocks=0, cached_blocks=0, parts=(), reason=reason or "")


def no_ticket(request_id: int, blocks: int, reason: Reason | None) -> ReserveReply:
    states = bytes([BlockState.NO_ROOM]) * blocks
    return ReserveReply(id=request_id, states=states, offsets=b"", generations=b"", reason=reason or "")


def ended_before(request: Acquire | Reserve) -> Reply:
    if isinstance(request, Acquire):
        return no_lease(request.id, Reason.GRANT_ENDED)
    return no_ticket(request.id, count_keys(request.keys) - request.first, Reason.GRANT_ENDED)


def same(reply: Reply, request: Acquire | Reserve) -> Reply:
    """An id that was used for the other kind of grant means nothing."""
    expected = AcquireReply if isinstance(request, Acquire) else ReserveReply
    return with_id(reply, request.id) if isinstance(reply, expected) else ended_before(request)


def with_id(reply: R, request_id: int) -> R:
    return msgspec.structs.replace(reply, id=request_id)


def unknown_grant(request: Fetch | Put | Commit) -> Error:
    problem = "no such grant of this session, or it has ended"
    return Error(id=request.id, code=ErrorCode.UNKNOWN_GRANT, problem=problem, field="grant")
