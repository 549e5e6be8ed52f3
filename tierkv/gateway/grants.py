"""Grants of tenants: opened once for each id, given back to the node whatever happens to who asked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tierkv.gateway.replies import ended_before, same
from tierkv.gateway.tenant_session import Held, HeldLease, Opening, TenantSession
from tierkv.gateway.upstream import Upstream
from tierkv.wire.messages import Acquire, AcquireReply, Reply, Reserve, ReserveReply

log = logging.getLogger(__name__)


class Grants:
    """Owns the tasks in which grants end, until `close`."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._endings: set[asyncio.Task[None]] = set()

    async def open(
        self,
        session: TenantSession,
        request: Acquire | Reserve,
        ask: Callable[[], Awaitable[AcquireReply | ReserveReply]],
    ) -> Reply:
        """Each id once: a repeated request finds the first one's answer, an ended id stays ended."""
        grant = request.grant
        if grant in session.ended:
            return ended_before(request)
        known = session.grants.get(grant)
        if isinstance(known, Opening):
            return same(await asyncio.shield(known.reply), request)
        if known is not None:
            return same(known.reply, request)
        opening = session.grants[grant] = Opening(asyncio.get_running_loop().create_future())
        reply: Reply = ended_before(request)
        try:
            answer = await ask()
            if grant not in session.ended:
                reply = answer
        finally:
            if session.grants.get(grant) is opening:
                del session.grants[grant]
            if grant in session.ended and (held := session.take(grant)) is not None:
                self.give_back([held])
            opening.reply.set_result(reply)
        return reply

    def end(self, session: TenantSession, grant: bytes, kind: type[Held]) -> None:
        held = session.grants.get(grant)
        if grant in session.ended or not (held is None or isinstance(held, kind | Opening)):
            return
        taken = session.take(grant)
        if taken is not None:
            self.give_back([taken])

    def give_back(self, grants: list[Held]) -> None:
        for held in grants:
            verbs = self._upstream.verbs
            ending = verbs.release(held.facts) if isinstance(held, HeldLease) else verbs.abort(held.facts)
            self.end_later(self._upstream.run(ending))

    def end_later(self, ending: Coroutine[Any, Any, None]) -> None:
        """In a task that no session takes along."""
        task = asyncio.get_running_loop().create_task(ending)
        self._endings.add(task)
        task.add_done_callback(self._ended_later)

    def _ended_later(self, task: asyncio.Task[None]) -> None:
        self._endings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of a grant: %r", error, exc_info=error)

    async def close(self) -> None:
        """Until the node has been told of every end."""
        await asyncio.gather(*self._endings, return_exceptions=True)
