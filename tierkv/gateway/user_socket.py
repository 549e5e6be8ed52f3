"""The ZeroMQ socket of one user: nobody else's process gets through to it, and what waits in it is bounded.

who connects             libzmq asks the kernel (IPC_FILTER_UID), before anything is read
how many connections     counted from the socket's own events; the door (ZAP) turns away what is too many
a frame of theirs        at most MAXMSGSIZE, RECEIVE_QUEUE of them for each connection, read one user after the other
a reply that waits       SEND_QUEUE in ZeroMQ for each connection, BACKLOG_BYTES beyond that here, for STALL_SECONDS;
                         then the session whose it is, is ended as a slow consumer
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from tierkv.errors import ConfigError
from tierkv.wire.frames import encode
from tierkv.wire.messages import MAX_FRAME_BYTES, Error, ErrorCode

MAX_CONNECTIONS = 64
HANDSHAKE_MILLISECONDS = 2_000
"""Who has not said by then what it is, or was turned away, is cut off; an honest client comes again."""
SEND_QUEUE = 2
RECEIVE_QUEUE = 2
BACKLOG_BYTES = 2 * 2**20
STALL_SECONDS = 5.0
RETRY_SECONDS = 0.002
"""A ROUTER can't be asked when it has room for one peer again; so a reply that found none is tried again."""

_OPENED = zmq.EVENT_ACCEPTED
_CLOSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

log = logging.getLogger(__name__)

Handle = Callable[[bytes, bytes], None]
Stalled = Callable[[bytes], None]


@dataclass(slots=True)
class _Backlog:
    """Replies that one connection has not taken yet, each with the token of its session."""

    since: float
    frames: deque[tuple[bytes, bytes]] = field(default_factory=deque)
    num_bytes: int = 0


class UserSocket:
    """Bound from the start. `handle` gets (peer, frame), `stalled` the token of a session that does not read."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        path: Path,
        uid: int,
        *,
        handle: Handle,
        stalled: Stalled,
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.domain = str(uid).encode()
        self._path = path
        self._handle = handle
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._connections: set[int] = set()  # descriptors, as the events name them
        self._backlogs: dict[bytes, _Backlog] = {}
        self._retry: asyncio.TimerHandle | None = None
        self._socket: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        for option, setting in (
            (zmq.IPC_FILTER_UID, uid),
            (zmq.ZAP_DOMAIN, self.domain),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES + 2**20),  # a little more than a frame, for a typed answer
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS),
            (zmq.RCVHWM, RECEIVE_QUEUE),
            (zmq.SNDHWM, SEND_QUEUE),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
        ):
            self._socket.setsockopt(option, setting)
        self._events = self._socket.get_monitor_socket(_OPENED | _CLOSED)
        self._bind()

    def _bind(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(self.endpoint)
            os.chmod(self._path, 0o666)
        except OSError as error:  # ZMQError is one
            raise ConfigError("inline_dir", f"{self._path}: {error.strerror}") from error
        self._inode = self._path.stat().st_ino

    async def serve(self) -> None:
        """Until cancelled. One frame at a time, so that each user has its turn."""
        while True:
            parts = await self._socket.recv_multipart()
            if len(parts) == 2:
                self._handle(parts[0], parts[1])
            else:
                problem = f"a request is one frame, this one has {len(parts) - 1}"
                self.send(parts[0], b"", encode(Error(id=0, code=ErrorCode.MALFORMED, problem=problem)))
            await asyncio.sleep(0)

    async def count(self) -> None:
        """Until cancelled: keep up with who comes and goes."""
        while True:
            self._note(await self._events.recv_multipart())

    def has_room(self) -> bool:
        """Whether one more connection, already among those counted, may be let in."""
        while (event := _take_now(self._events)) is not None:
            self._note(event)
        return len(self._connections) <= MAX_CONNECTIONS

    def _note(self, event: list[bytes]) -> None:
        told = parse_monitor_message(event)
        descriptor = int(told["value"])
        if told["event"] & _OPENED:
            self._connections.add(descriptor)
        else:
            self._connections.discard(descriptor)

    @property
    def is_deleted(self) -> bool:
        """A cleaner of temporary files may have been there: nobody new could connect."""
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    # ---- replies

    def send(self, peer: bytes, token: bytes, frame: bytes) -> None:
        """`token` is whose reply it is. Never waits."""
        backlog = self._backlogs.get(peer)
        if backlog is None:
            if self._send_now(peer, frame):
                return
            backlog = self._backlogs[peer] = _Backlog(since=self._loop.time())
        backlog.frames.append((token, frame))
        backlog.num_bytes += len(frame)
        if backlog.num_bytes > BACKLOG_BYTES:
            self._give_up(peer)
        else:
            self._retry_soon()

    def _retry_soon(self) -> None:
        if self._retry is None:
            self._retry = self._loop.call_later(RETRY_SECONDS, self._send_backlogs)

    def _send_backlogs(self) -> None:
        self._retry = None
        for peer, backlog in list(self._backlogs.items()):
            while backlog.frames and self._send_now(peer, backlog.frames[0][1]):
                backlog.num_bytes -= len(backlog.frames.popleft()[1])
                backlog.since = self._loop.time()
            if not backlog.frames:
                del self._backlogs[peer]
            elif backlog.since + STALL_SECONDS < self._loop.time():
                self._give_up(peer)
        if self._backlogs:
            self._retry_soon()

    def _give_up(self, peer: bytes) -> None:
        backlog = self._backlogs.pop(peer)
        for token in {token for token, _ in backlog.frames if token}:
            self._stalled(token)

    def _send_now(self, peer: bytes, frame: bytes) -> bool:
        """False: it has no room. A peer that is gone misses nothing."""
        sent: asyncio.Future[Any] = asyncio.ensure_future(self._socket.send_multipart([peer, frame], zmq.NOBLOCK))
        error = sent.exception() if sent.done() else None
        if isinstance(error, zmq.Again):
            return False
        if isinstance(error, zmq.ZMQError) and error.errno != zmq.EHOSTUNREACH:
            raise error
        return True

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close()
        self._path.unlink(missing_ok=True)


class Door:
    """Lets connections in, or turns them away (ZAP 1.0), for all sockets of one context. To be made before them.

    version, id, domain, address, ... -> version, id, status, text, user, metadata"""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._socket: zmq.asyncio.Socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self.sockets: dict[bytes, UserSocket] = {}

    async def serve(self) -> None:
        """Until cancelled."""
        while True:
            version, request_id, domain, *_ = await self._socket.recv_multipart()
            found = self.sockets.get(domain)
            has_room = found is not None and found.has_room()
            # 300 is "not now": who was turned away is cut off a little later, and tries again by itself.
            verdict = [b"200", b"OK"] if has_room else [b"300", b"too many connections"]
            await self._socket.send_multipart([version, request_id, *verdict, b"", b""])

    def close(self) -> None:
        self._socket.close()


def _take_now(socket: zmq.asyncio.Socket) -> list[bytes] | None:
    taken: asyncio.Future[list[bytes]] = asyncio.ensure_future(socket.recv_multipart(zmq.NOBLOCK))
    if not taken.done():
        taken.cancel()
        return None
    return None if taken.exception() is not None else taken.result()
