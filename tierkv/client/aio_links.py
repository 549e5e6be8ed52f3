"""The asyncio client's ZeroMQ socket: one DEALER a session, one task that reads it and wakes who waits, and one that
sends what is unanswered once more when a connection was lost (see links.py)."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from tierkv.client.links import configure, disconnect, id_of
from tierkv.client.session import Session
from tierkv.client.state import ClientState
from tierkv.client.steps import Connect, MapPool, Pause, Silence, Step, Tell, Verb
from tierkv.client.watch import SWEEP_MAX_SECONDS, SWEEP_SECONDS
from tierkv.core.reasons import Reason
from tierkv.wire.frames import Malformed, decode_reply, encode
from tierkv.wire.messages import AnyReply, Request

T = TypeVar("T")

Outcome = AnyReply | Malformed | Silence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Waiting:
    frame: bytes
    reply: asyncio.Future[Outcome]


class AsyncLink:
    """Owns its socket, its tasks and `descriptor` (a duplicate of the session's), until `close` has been awaited."""

    def __init__(self, context: zmq.asyncio.Context, session: Session, descriptor: int, state: ClientState) -> None:
        self.session = session
        self._state = state
        self._descriptor = descriptor
        self._waiting: dict[int, Waiting] = {}
        self._dealer: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        self._connections: zmq.asyncio.Socket = configure(self._dealer, session)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._look)
        self._tasks = [
            self._loop.create_task(self._read(), name="tierkv client reader"),
            self._loop.create_task(self._send_again(), name="tierkv client reconnects"),
        ]
        for task in self._tasks:
            task.add_done_callback(_tell_of_death)

    async def exchange(self, request: Request, until: float) -> Outcome:
        self.send_doubts()
        reply: asyncio.Future[Outcome] = self._loop.create_future()
        waiting = self._waiting[request.id] = Waiting(encode(request), reply)
        try:
            async with asyncio.timeout(max(0.0, until - self._state.clock())):
                await self._send(waiting)
                return await reply
        except TimeoutError:
            return self._silence()
        finally:
            del self._waiting[request.id]

    def send_doubts(self) -> None:
        if not self._dealer.closed:
            self._state.send_doubts(self.session, self._send_at_once)

    def send_prefills(self) -> None:
        if not self._dealer.closed:
            self._state.send_prefills(self.session, self._send_at_once)

    def _send_at_once(self, message: Request) -> bool:
        sent: asyncio.Future[Any] = asyncio.ensure_future(self._dealer.send(encode(message), zmq.NOBLOCK))
        return sent.done() and sent.exception() is None

    async def close(self) -> None:
        self._wake_all()
        self._loop.remove_reader(self._descriptor)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        disconnect(self._dealer, self._connections)
        os.close(self._descriptor)

    async def _send(self, waiting: Waiting) -> None:
        """Sent, or the session turned out to be over while there was no connection to send to."""
        if self.session.over:
            self._wake_all()
            return
        # `send` gives a future already, but does not say so.
        sent: asyncio.Future[Any] = asyncio.ensure_future(self._dealer.send(waiting.frame))
        if not sent.done():
            try:
                await asyncio.wait((sent, waiting.reply), return_when=asyncio.FIRST_COMPLETED)
            finally:
                sent.cancel()

    async def _send_again(self) -> None:
        """What waits for a reply when a connection has been made after the first."""
        await self._connections.recv_multipart()
        while True:
            await self._connections.recv_multipart()
            self._dealer.getsockopt(zmq.EVENTS)  # so that ZeroMQ lets go of the one before
            self._state.connection_lost(self.session)
            self.send_doubts()
            for waiting in list(self._waiting.values()):
                if not waiting.reply.done():
                    await self._send(waiting)

    async def _read(self) -> None:
        try:
            while True:
                frames = await self._dealer.recv_multipart()
                self._take(decode_reply(frames[0] if len(frames) == 1 else b""))
        finally:
            self._wake_all()

    def _take(self, reply: AnyReply | Malformed) -> None:
        waiting = self._waiting.get(id_of(reply))
        if waiting is None or waiting.reply.done():
            self._state.note_other(id_of(reply), readable=not isinstance(reply, Malformed))
        else:
            waiting.reply.set_result(reply)

    def _look(self) -> None:
        """The session is let go of when it is over, whether anybody asks or not: see watch.py."""
        self.session.look()
        if self.session.over:
            self._loop.remove_reader(self._descriptor)
            self._wake_all()
            self._state.session_over(self.session)
            self._sweep(SWEEP_SECONDS)

    def _sweep(self, pause: float) -> None:
        """As often as it takes: see watch.py."""
        if not self._state.closed and not self._state.sweep_views(self.session):
            self._loop.call_later(pause, self._sweep, min(2 * pause, SWEEP_MAX_SECONDS))

    def _wake_all(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.reply.done():
                waiting.reply.set_result(Silence(Reason.NODE_AWAY))

    def _silence(self) -> Silence:
        return Silence(Reason.NODE_AWAY if self.session.over else Reason.DEADLINE)


def _tell_of_death(task: asyncio.Task[None]) -> None:
    """A bug of ours; what waits ends at its deadline, as a miss."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended: %r", task.get_name(), error, exc_info=error)


class AsyncLinks:
    """The link in use. The one before it is closed by the call that found its session over."""

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._closed = False
        self._link: AsyncLink | None = None
        self._context: zmq.asyncio.Context | None = None

    async def drive(self, verb: Verb[T]) -> T:
        """Run a verb to its end. However it ends, cancelled too, it gets to say what is in doubt."""
        self._state.begin_call()
        try:
            step = next(verb)
            while True:
                step = verb.send(await self._perform(step))
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            verb.close()
            if self._link is not None:
                self._link.send_doubts()
                self._link.send_prefills()

    async def close(self) -> None:
        self._closed = True
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        if self._context is not None:
            self._context.term()  # returns at once: its only socket is closed, and nothing lingers
            self._context = None

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Connect):
            told = await asyncio.to_thread(self._state.connect, step.until)
            if isinstance(told, Session):
                await self._link_to(told)  # at once, so that somebody hears of its end from here on
            return told
        if isinstance(step, MapPool):
            return await asyncio.to_thread(step.pool.map_under, step.session, step.until)
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        link = await self._link_to(step.session)
        if isinstance(step, Tell):
            return None if link is None else link.send_doubts()
        return Silence(Reason.NODE_AWAY) if link is None else await link.exchange(step.request, step.until)

    async def _link_to(self, session: Session) -> AsyncLink | None:
        """None when the session is over or the client closed: nothing can be asked under it any more."""
        if self._closed:
            return None
        before = self._link
        if before is not None and before.session is session:
            return None if session.over else before
        descriptor = session.duplicate()
        if descriptor is None:
            self._state.session_over(session)  # already, and nobody is left who would hear of it
            return None
        if self._context is None:
            self._context = zmq.asyncio.Context()
        link = self._link = AsyncLink(self._context, session, descriptor, self._state)
        if before is not None:
            await before.close()
        return link
