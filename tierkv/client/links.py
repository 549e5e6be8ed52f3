"""The blocking client's ZeroMQ sockets: one DEALER for each call under way, kept for the next call.

A socket is in one thread's hands at a time: it is taken from the pool, used, and put back. ZeroMQ allows a socket to
move between threads over a full memory barrier, which taking and giving under a lock is. So there are as many sockets
as there were calls at the same time, and none belongs to a thread that has ended.

Nothing here can block beyond a call's `until`, at exit neither: sends don't wait (a request that finds no connection
isn't queued), and no message lingers.

A connection that is cut loses what was under way on it, the request or its reply, and the ends of grants that were
sent ahead of it. Every verb is idempotent, so these ends, and a request whose reply hasn't come, are sent once more, in
that order, when ZeroMQ has connected again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from math import ceil
from typing import Any, TypeVar

import zmq

from tierkv.client.session import Session
from tierkv.client.state import ClientState
from tierkv.client.steps import Connect, MapPool, Pause, Silence, Tell, Verb
from tierkv.client.watch import SessionWatch
from tierkv.core.reasons import Reason
from tierkv.wire.frames import Malformed, decode_reply, encode
from tierkv.wire.messages import MAX_FRAME_BYTES, AnyReply, Request

T = TypeVar("T")

HIGH_WATER_MARK = 64
"""Messages queued on each side of a socket. There is one request under way, and the ends of grants in doubt."""

RECONNECT_MS, RECONNECT_MAX_MS = 20, 250


def configure(dealer: zmq.Socket[Any], session: Session) -> Any:
    """What blocking and asyncio sockets have in common. ZeroMQ picks a routing id that is unique on the node. Gives
    back the socket that tells of its connections, the caller's to close: one message for each that has been made."""
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    dealer.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    connections = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(session.endpoint)
    return connections


def disconnect(dealer: zmq.Socket[Any], connections: zmq.Socket[Any]) -> None:
    dealer.disable_monitor()
    connections.close(linger=0)
    dealer.close()


class Link:
    """One DEALER under one session. Owns it and `descriptor`, a duplicate of the session's, until `close`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], session: Session, descriptor: int, state: ClientState
    ) -> None:
        self.session = session
        self._state = state
        self._descriptor = descriptor
        self._dealer = context.socket(zmq.DEALER)
        self._connections: zmq.Socket[bytes] = configure(self._dealer, session)
        self._num_connections, self._last_connection = 0, 1
        self._replies = zmq.Poller()
        self._replies.register(self._dealer, zmq.POLLIN)
        self._replies.register(self._connections, zmq.POLLIN)
        self._replies.register(descriptor, zmq.POLLIN)
        self._room = zmq.Poller()
        self._room.register(self._dealer, zmq.POLLOUT)
        self._room.register(descriptor, zmq.POLLIN)

    def exchange(self, request: Request, until: float) -> AnyReply | Malformed | Silence:
        """Replies to other requests than this one are noted and dropped."""
        if self._state.owes(self.session):
            self._note_arrived()  # what seems to be owed may be confirmed by now
            self.send_doubts()
        frame = encode(request)
        while True:
            while not self._send(frame):
                if not self._wait(self._room, until):
                    return self._silence()
                self.send_doubts()
            sent_over = self._last_connection
            while self._last_connection == sent_over:
                if not self._wait(self._replies, until):
                    return self._silence()
                reply = self._receive()
                if reply is None:
                    continue
                if id_of(reply) == request.id:
                    return reply
                self._note(reply)
            self.send_doubts()

    def _note_arrived(self) -> None:
        while (reply := self._receive()) is not None:
            self._note(reply)

    def _note(self, reply: AnyReply | Malformed) -> None:
        self._state.note_other(id_of(reply), readable=not isinstance(reply, Malformed))

    def send_doubts(self) -> None:
        self._state.send_doubts(self.session, lambda ending: self._send(encode(ending)))

    def send_prefills(self) -> None:
        self._state.send_prefills(self.session, lambda report: self._send(encode(report)))

    def close(self) -> None:
        disconnect(self._dealer, self._connections)
        os.close(self._descriptor)

    def _note_connections(self) -> None:
        """What was sent before the last connection was made may be lost. Those that were made while nobody waited are
        heard of with the next wait, which costs a request that is sent twice. The first is no reason to send again."""
        while self._connections.poll(0):
            self._connections.recv_multipart(zmq.NOBLOCK)
            self._num_connections += 1
        before, self._last_connection = self._last_connection, max(1, self._num_connections)
        if self._last_connection != before:
            self._state.connection_lost(self.session)
        self._dealer.getsockopt(zmq.EVENTS)  # so that ZeroMQ lets go of the one before: nothing is sent into it now

    def _send(self, frame: bytes) -> bool:
        try:
            self._dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> AnyReply | Malformed | None:
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return decode_reply(frames[0] if len(frames) == 1 else b"")

    def _wait(self, poller: zmq.Poller, until: float) -> bool:
        """False when the time is up or the session is over."""
        left = until - self._state.clock()
        if left <= 0 or self.session.over:
            return False
        for socket, _event in poller.poll(ceil(left * 1_000)):
            if socket is self._connections:
                self._note_connections()
            elif not isinstance(socket, zmq.Socket):
                self.session.look()
        return not self.session.over

    def _silence(self) -> Silence:
        return Silence(Reason.NODE_AWAY if self.session.over else Reason.DEADLINE)


class LinkPool:
    def __init__(self, state: ClientState) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._free: deque[Link] = deque()
        self._in_use = 0
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._watches: list[SessionWatch] = []

    def watch(self, session: Session) -> None:
        """Let go of its memory when it is over, whether anybody calls or not."""
        with self._lock:
            self._watches = [watch for watch in self._watches if not watch.is_over]
            if session.arena is None or self._closed or any(watch.is_of(session) for watch in self._watches):
                return
            if (descriptor := session.duplicate()) is not None:
                self._watches.append(SessionWatch(session, descriptor, self._state))
                return
        self._state.session_over(session)  # already, and nobody is left who would hear of it

    def take(self, session: Session) -> Link | None:
        """None when the session is over, or the pool closed: nothing can be asked under it any more."""
        with self._lock:
            if self._closed or session.over:
                return None
            while self._free:
                link = self._free.pop()
                if link.session is session:
                    self._in_use += 1
                    return link
                link.close()
            descriptor = session.duplicate()
            if descriptor is None:
                return None
            if self._context is None:
                self._context = zmq.Context()
            link = Link(self._context, session, descriptor, self._state)
            self._in_use += 1
            return link

    def swap(self, link: Link | None, session: Session) -> Link | None:
        if link is not None:
            self.give_back(link)
        return self.take(session)

    def give_back(self, link: Link) -> None:
        with self._lock:
            self._in_use -= 1
            if self._closed or link.session.over:
                link.close()
            else:
                self._free.append(link)
            self._end_context()

    def close(self) -> None:
        """Doesn't wait: a link that is in use is closed when its call ends, which every call does by its deadline."""
        with self._lock:
            self._closed = True
            while self._free:
                self._free.pop().close()
            self._end_context()
            watches, self._watches = self._watches, []
        for watch in watches:
            watch.join()  # the client was closed before, and so its session is over

    def _end_context(self) -> None:
        if self._closed and not self._in_use and self._context is not None:
            self._context.term()  # returns at once: no socket is open, and none lingered
            self._context = None


def drive(state: ClientState, pool: LinkPool, verb: Verb[T]) -> T:
    """Run a verb to its end. However it ends, it gets to say what is in doubt, and that is sent on its way."""
    state.begin_call()
    link: Link | None = None
    try:
        step = next(verb)
        while True:
            told: Any
            if isinstance(step, Connect):
                told = state.connect(step.until)
                if isinstance(told, Session):
                    pool.watch(told)
            elif isinstance(step, MapPool):
                step.pool.map_under(step.session, step.until)
                told = None
            elif isinstance(step, Pause):
                time.sleep(step.seconds)
                told = None
            else:
                if link is None or link.session is not step.session:
                    link = pool.swap(link, step.session)
                if isinstance(step, Tell):
                    told = None  # that is done below, for every verb
                else:
                    told = Silence(Reason.NODE_AWAY) if link is None else link.exchange(step.request, step.until)
            step = verb.send(told)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        verb.close()
        if link is not None:
            link.send_doubts()
            link.send_prefills()
            pool.give_back(link)


def id_of(reply: AnyReply | Malformed) -> int:
    return reply.error.id if isinstance(reply, Malformed) else reply.id
