"""Answers of the core as messages of the wire."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from tierkv.core.evicting import EvictState
from tierkv.core.grants import NO_ROOM, Committed, Lease, Refused, Reservation, SealAnswer
from tierkv.core.reasons import Reason
from tierkv.core.warmup import WarmupState
from tierkv.wire.messages import (
    AcquireReply,
    CommitReply,
    Error,
    ErrorCode,
    EvictReply,
    LeasePart,
    Reply,
    ReserveReply,
    SealReply,
    VictimRow,
    WarmupReply,
)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """u64, little-endian."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def lease_reply(request_id: int, answer: Lease | Refused) -> Reply:
    if isinstance(answer, Refused):
        if answer.reason is Reason.SHUTDOWN:
            return shutting_down(request_id)
        return empty_lease(request_id, answer.reason)
    return AcquireReply(
        id=request_id,
        blocks=answer.blocks,
        nvme_blocks=answer.nvme_blocks,
        disk_blocks=answer.disk_blocks,
        device_blocks=answer.device_blocks,
        cached_blocks=answer.cached_blocks,
        parts=tuple(
            LeasePart(part.rank, pack_numbers(part.offsets), pack_numbers(part.generations)) for part in answer.parts
        ),
        reason=answer.reason or "",
    )


def empty_lease(request_id: int, reason: Reason) -> AcquireReply:
    return AcquireReply(id=request_id, blocks=0, nvme_blocks=0, cached_blocks=0, parts=(), reason=reason)


def reservation_reply(request_id: int, answer: Reservation | Refused, num_blocks: int) -> Reply:
    if isinstance(answer, Refused):
        if answer.reason is Reason.SHUTDOWN:
            return shutting_down(request_id)
        states = bytes([NO_ROOM]) * num_blocks
        return ReserveReply(id=request_id, states=states, offsets=b"", generations=b"", reason=answer.reason)
    return ReserveReply(
        id=request_id,
        states=answer.states,
        offsets=pack_numbers(answer.offsets),
        generations=pack_numbers(answer.generations),
        reason=answer.reason or "",
    )


def commit_reply(request_id: int, answer: Committed | Refused) -> Reply:
    if isinstance(answer, Committed):
        return CommitReply(id=request_id, visible=answer.visible, staged=answer.staged)
    if answer.reason is Reason.KEY_MISMATCH:
        problem = "the keys of this ticket are not those of its tokens; nothing was published"
        return Error(id=request_id, code=ErrorCode.KEY_MISMATCH, problem=problem, field="keys")
    problem = f"no ticket has this grant, or it has ended: {answer.reason}"
    return Error(id=request_id, code=ErrorCode.UNKNOWN_GRANT, problem=problem, field="grant")


def strange_grant(request_id: int) -> Error:
    """What is said to a session that would end what another one copies from, or into."""
    problem = "this session neither asked for the grant nor holds of it; nothing was ended"
    return Error(id=request_id, code=ErrorCode.UNKNOWN_GRANT, problem=problem, field="grant")


def seal_reply(request_id: int, answer: SealAnswer) -> SealReply:
    return SealReply(
        id=request_id, blocks=answer.blocks, flushed_blocks=answer.flushed_blocks, reason=answer.reason or ""
    )


def warmup_reply(request_id: int, state: WarmupState) -> WarmupReply:
    return WarmupReply(
        id=request_id,
        done_extents=state.done_extents,
        total_extents=state.total_extents,
        promoted_bytes=state.promoted_bytes,
        already_bytes=state.already_bytes,
        budget_bytes=state.budget_bytes,
        finished=state.finished,
        failed_extents=state.failed_extents,
        reason=state.reason or "",
        total_bytes=state.total_bytes,
        yielding=state.is_yielding,
        disk_bytes=state.disk_bytes,
    )


def no_warmup(request_id: int) -> WarmupReply:
    """Of a job that is not known, or was cancelled before it began: it is over."""
    return WarmupReply(
        id=request_id,
        done_extents=0,
        total_extents=0,
        promoted_bytes=0,
        already_bytes=0,
        budget_bytes=0,
        finished=True,
    )


def shutting_down(request_id: int) -> Error:
    return Error(id=request_id, code=ErrorCode.SHUTTING_DOWN, problem="the node is shutting down")


def evict_reply(request_id: int, state: EvictState, model_names: Mapping[bytes, str]) -> EvictReply:
    return EvictReply(
        id=request_id,
        used_bytes=state.used_bytes,
        evictions=state.evictions,
        blocks=state.blocks,
        tokens=state.tokens,
        num_bytes=state.num_bytes,
        lost_tokens=state.lost_tokens,
        lost_seconds=state.lost_seconds,
        finished=state.finished,
        is_cut=state.is_cut,
        reason=state.reason or "",
        victims=tuple(
            VictimRow(
                group=one.group,
                model_name=model_names.get(one.group, ""),
                key=one.key,
                first_token=one.first_token,
                to=one.to,
                blocks=one.blocks,
                tokens=one.tokens,
                num_bytes=one.num_bytes,
                created=one.created,
                last_used=one.last_used,
                hits=one.hits,
                seconds=one.seconds,
            )
            for one in state.victims
        ),
    )
