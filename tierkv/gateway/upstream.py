"""The gateway's own session on its node: an ordinary, trusted one, that maps the arena and holds every grant.

The verbs are the client's. What a verb answers when the node is away or refuses becomes a reply for the tenant here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from tierkv.client.aio_links import AsyncLinks
from tierkv.client.asking import Failure
from tierkv.client.groups import GroupRecord
from tierkv.client.state import ClientState
from tierkv.client.steps import Verb
from tierkv.client.verbs import Verbs
from tierkv.core.reasons import Reason
from tierkv.wire.messages import Error, ErrorCode, NotReady

T = TypeVar("T")

TIMEOUT_SECONDS = 1.0
HOP_SECONDS = 0.05
"""What a way round through us takes at most, as a rule: the node gets so much less time than the tenant gave."""

_CODES = {
    Reason.NODE_AWAY: ErrorCode.NODE_AWAY,
    Reason.SESSION_GONE: ErrorCode.NODE_AWAY,  # ours, not the tenant's: that one goes on
    Reason.DEADLINE: ErrorCode.TIMEOUT,
    Reason.SHUTDOWN: ErrorCode.SHUTTING_DOWN,
    Reason.KEY_MISMATCH: ErrorCode.KEY_MISMATCH,
    Reason.LAYOUT_MISMATCH: ErrorCode.LAYOUT_MISMATCH,
    Reason.GRANT_ENDED: ErrorCode.UNKNOWN_GRANT,
}


class GatewayVerbs(Verbs):
    def declare_group(self, record: GroupRecord) -> Verb[Failure | None]:
        """Like `open_group`, but tells what the node said."""
        answer = yield from self._ask_group(record, None, self.budget())
        return answer if isinstance(answer, Failure) else None


class Upstream:
    def __init__(self, socket_dir: Path) -> None:
        self.state = ClientState(
            socket_dir, client=f"inline gateway, pid {os.getpid()}", maps_arena=True, timeout_seconds=TIMEOUT_SECONDS
        )
        self.verbs = GatewayVerbs(self.state)
        self._links = AsyncLinks(self.state)

    async def run(self, verb: Verb[T]) -> T:
        return await self._links.drive(verb)

    async def close(self) -> None:
        self.state.close()
        await self._links.close()


def less_a_hop(deadline_ms: int) -> float:
    """Seconds for the node, of what a tenant gave."""
    return max(0.0, deadline_ms / 1_000 - HOP_SECONDS)


def refusal(request_id: int, reason: Reason) -> NotReady | Error:
    """What a tenant is told when its request has no answer."""
    if reason is Reason.NOT_READY:
        return NotReady(id=request_id, stage="recovering", done=0, total=0)
    code = _CODES.get(reason, ErrorCode.INTERNAL)
    return Error(id=request_id, code=code, problem=f"the node: {reason}")


def refusal_of_failure(request_id: int, failure: Failure) -> NotReady | Error:
    """With the node's own words about what is wrong with the request, where they are about the request."""
    error = failure.error
    if error is not None and error.code in (ErrorCode.INVALID, ErrorCode.LAYOUT_MISMATCH):
        return Error(id=request_id, code=error.code, problem=error.problem, field=error.field)
    return refusal(request_id, failure.reason)
