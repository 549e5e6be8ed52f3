"""What a client's verbs answer. `reason` says why an answer is less than it could be; None where nothing is amiss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tierkv.core.reasons import Reason
from tierkv.wire.messages import Error, ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`blocks` from token 0 without a hole are cached, `tokens` in all; the first `host_blocks` are in host memory."""

    blocks: int
    host_blocks: int
    tokens: int
    reason: Reason | None = None


class CommitWait(StrEnum):
    """What a commit waits for: the node's answer, or nothing."""

    VISIBLE = "visible"
    SENT = "sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """`visible` blocks can be matched now; `staged` ones appear with their predecessor or their other ranks. Where the
    commit was only sent, `staged` counts all of its blocks: they appear when the node reads it.

    With a reason of NODE_AWAY or DEADLINE the answer was lost: the blocks may have become visible all the same."""

    visible: int
    staged: int
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Of the keys given the first `blocks` are visible, and the first `flushed_blocks` on disk for good. `reason`
    pending: more of them, committed in a GPU's pool, are just being copied to host memory, and are sealed there."""

    blocks: int
    flushed_blocks: int
    reason: Reason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecAnswer:
    """Which codec blocks of a model are to be stored with, empty for as they are: what the layout of its identity is to
    say. `reason` no_verdict: the node would use one and may not; any other: it could not be asked. `problem` says
    more."""

    codec: str = ""
    reason: Reason | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Since the client was made. `by_reason` counts answers that carried a reason, misses for want of a node included.

    `in_doubt` and `open_grants` are what is there now: grants whose end the node hasn't confirmed yet (those that ended
    a moment ago, too), leases and tickets that haven't ended.
    """

    calls: int
    by_reason: Mapping[Reason, int]
    sessions_opened: int
    stale_replies: int
    unreadable_replies: int
    doubts_dropped: int
    in_doubt: int
    open_grants: int


_REASON_OF_CODE = {
    ErrorCode.SESSION_GONE: Reason.SESSION_GONE,
    ErrorCode.LAYOUT_MISMATCH: Reason.LAYOUT_MISMATCH,
    ErrorCode.KEY_MISMATCH: Reason.KEY_MISMATCH,
    ErrorCode.UNKNOWN_GRANT: Reason.GRANT_ENDED,
    ErrorCode.NO_VERDICT: Reason.NO_VERDICT,
    ErrorCode.TOO_MANY: Reason.SESSION_CAP,
    ErrorCode.NODE_AWAY: Reason.NODE_AWAY,
    ErrorCode.SHUTTING_DOWN: Reason.SHUTDOWN,
    ErrorCode.TIMEOUT: Reason.DEADLINE,
}


def reason_of_error(error: Error) -> Reason:
    return _REASON_OF_CODE.get(error.code, Reason.WIRE_ERROR)


def reason_of_text(text: str) -> Reason | None:
    """The reason of a reply. One that this client doesn't know yet (a newer node) is told as WIRE_ERROR."""
    if not text:
        return None
    try:
        return Reason(text)
    except ValueError:
        return Reason.WIRE_ERROR
