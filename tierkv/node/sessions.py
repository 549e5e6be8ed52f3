"""The session socket's server: who the engine processes are, and the proof that they have ended.

    connect ---> Knock ---hello---> Asked ---grant---> Session ---end of file---> HungUp ... ---pidfd---> Ended
                   |                  |                   |
                   | says nothing     | refused           +--- Detach ---> Ended
                   v                  v
                 closed             closed

A session's end is proven by its process's pidfd, taken from the socket's peer credentials, or said by Detach. The end
of the socket alone proves nothing: a forked child can hold it, and a living process can close it and go on copying.

Nothing here waits. `poll` gives back what happened; all descriptors sit in one epoll, whose own descriptor (`fileno`)
is what the supervisor watches.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tierkv.errors import WireError
from tierkv.wire.messages import PROTOCOL_VERSION, ErrorCode
from tierkv.wire.session import (
    MAX_PACKET_BYTES,
    AnySessionMessage,
    Detach,
    DeviceGrant,
    DeviceRefused,
    IncarnationEnded,
    InlineGrant,
    MapDevice,
    PoolEnded,
    SessionGrant,
    SessionHello,
    SessionRefused,
    decode_packet,
    encode_packet,
)

MAX_SESSIONS = 1_024
MAX_KNOCKS = 128
KNOCKS_A_USER = 32  # where many users are served
HELLO_SECONDS = 5.0
TOKEN_BYTES = 16
ACCEPTS_PER_POLL = 64
ACCEPT_PAUSE_SECONDS = 0.5  # when there is no descriptor left to accept with

_SO_PEERPIDFD = 77  # Linux 6.5; the socket module does not name it
_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True, eq=False)
class Knock:
    """A connection that is not yet a session. `pidfd` None: no proof of its end can be had."""

    sock: socket.socket
    pid: int
    pidfd: int | None
    deadline: float
    hello: SessionHello | None = None
    uid: int = -1


@dataclass(slots=True, eq=False)
class Session:
    token: bytes
    incarnation: int
    pid: int
    client: str
    maps_arena: bool
    pidfd: int | None
    sock: socket.socket | None
    uid: int = -1
    pools: dict[int, int] = field(default_factory=dict)  # device -> epoch of the pool that it was told how to map


@dataclass(frozen=True, slots=True)
class Asked:
    """Wants to become a session: answer with `grant` or `refuse`, now or later."""

    knock: Knock
    hello: SessionHello


@dataclass(frozen=True, slots=True)
class AskedDevice:
    """A session wants to map the pool of a device: answer with `grant_pool` or `refuse_pool`."""

    session: Session
    asked: MapDevice


@dataclass(frozen=True, slots=True)
class HungUp:
    """No new requests come from it. What it holds stays held."""

    session: Session


@dataclass(frozen=True, slots=True)
class Ended:
    """Proven: nothing of this process touches the arena any more."""

    session: Session


Event = Asked | AskedDevice | HungUp | Ended


@dataclass(frozen=True, slots=True)
class Memory:
    """What a session gets: descriptors, which stay the supervisor's, and what to know about them."""

    incarnation: int
    endpoint: str
    data_dir: str
    arena_fd: int
    arena_bytes: int
    generations_fd: int
    page_bytes: int


@dataclass(slots=True)
class _Watched:
    """By descriptor, what the epoll reports about."""

    knocks: dict[int, Knock] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    processes: dict[int, Session] = field(default_factory=dict)

    def count(self) -> int:
        return len(self.knocks) + len(self.sessions) + len(self.processes)


class Sessions:
    """Owns the listening socket and every connection and pidfd, until `close`. Serves `users`, those of the node's
    `inline_users`; by default our own only."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        users: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener: socket.socket | None = listener
        self._clock = clock
        self._users = frozenset({os.geteuid()}) if users is None else users
        self._are_named = users is not None
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._accept_again: float | None = None
        self._watched = _Watched()
        self._sessions: dict[bytes, Session] = {}

    def fileno(self) -> int:
        return self._epoll.fileno()

    def count(self, incarnation: int) -> int:
        """Sessions of this incarnation whose process may still touch its arena."""
        return sum(s.maps_arena and s.incarnation == incarnation for s in self._sessions.values())

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def poll(self) -> list[Event]:
        """What has happened since the last call. Never waits. Those who knock come last: who has said hello is heard
        before its place is given to another."""
        events: list[Event] = []
        somebody_knocks = False
        for fd, _ in self._epoll.poll(0, self._watched.count() + 1):
            if self._listener is not None and fd == self._listener.fileno():
                somebody_knocks = True
            elif fd in self._watched.knocks:
                self._read_hello(self._watched.knocks[fd], events)
            elif fd in self._watched.processes:
                self._end(self._watched.processes[fd], events)
            elif fd in self._watched.sessions:
                self._read_session(self._watched.sessions[fd], events)
        if somebody_knocks:
            self._accept()
        return events

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, by the clock; None: never."""
        deadlines = [knock.deadline for knock in self._watched.knocks.values() if knock.hello is None]
        if self._accept_again is not None:
            deadlines.append(self._accept_again)
        return min(deadlines, default=None)

    def expire(self) -> None:
        """Drop connections that have said nothing for too long; accept again after a pause."""
        now = self._clock()
        for knock in list(self._watched.knocks.values()):
            if knock.hello is None and knock.deadline <= now:
                self._drop(knock)
        if self._accept_again is not None and self._accept_again <= now and self._listener is not None:
            self._accept_again = None
            self._epoll.register(self._listener, select.EPOLLIN)

    def new_token(self) -> bytes:
        return secrets.token_bytes(TOKEN_BYTES)

    def is_waiting(self, knock: Knock) -> bool:
        """Whether an answer would still find somebody."""
        return self._watched.knocks.get(knock.sock.fileno()) is knock

    def grant(self, knock: Knock, token: bytes, memory: Memory) -> None:
        """Make it a session, which exists until its end is proven. One whose answer could not be sent has no memory:
        its socket, which is at its end, is the proof."""
        session = self._begin(knock, token, memory.incarnation)
        maps_arena = session.maps_arena
        answer = SessionGrant(
            token=token,
            incarnation=memory.incarnation,
            endpoint=memory.endpoint,
            arena_bytes=memory.arena_bytes,
            page_bytes=memory.page_bytes,
            data_dir=memory.data_dir,
        )
        memories = [memory.arena_fd, memory.generations_fd] if maps_arena else []
        session.maps_arena = _send(knock.sock, answer, memories) and maps_arena

    def grant_inline(self, knock: Knock, answer: InlineGrant) -> Session:
        """Make it a session without memory: it has ended as soon as its socket has."""
        session = self._begin(knock, answer.token, answer.incarnation)
        session.maps_arena = False
        _send(knock.sock, answer, [])
        return session

    def _begin(self, knock: Knock, token: bytes, incarnation: int) -> Session:
        assert knock.hello is not None, "a grant answers a hello"
        del self._watched.knocks[knock.sock.fileno()]
        hello = knock.hello
        session = Session(
            token, incarnation, knock.pid, hello.client, hello.maps_arena, knock.pidfd, knock.sock, knock.uid
        )
        self._sessions[token] = session
        self._watched.sessions[knock.sock.fileno()] = session
        if session.pidfd is not None:
            self._watched.processes[session.pidfd] = session
            self._epoll.register(session.pidfd, select.EPOLLIN)
        return session

    def end(self, session: Session) -> None:
        """Of a session without memory, by our own decision: its process learns it from its socket."""
        assert not session.maps_arena, "the end of a session that maps the arena is for its process to prove"
        if session.token in self._sessions:
            self._forget(session)

    def refuse(self, knock: Knock, code: str, problem: str) -> None:
        _send(knock.sock, SessionRefused(code=code, problem=problem), [])
        self._drop(knock)

    def grant_pool(self, session: Session, grant: DeviceGrant, fd: int) -> None:
        """How it maps the pool, `fd` -1 for one without a descriptor. One that does not read its answers is not told,
        and its socket is closed: its next connection starts afresh."""
        if session.sock is None:
            return
        session.pools[grant.device] = grant.epoch
        if not _send(session.sock, grant, [fd] if fd >= 0 else []):
            self._hang_up(session)

    def refuse_pool(self, session: Session, code: str, problem: str) -> None:
        if session.sock is not None and not _send(session.sock, DeviceRefused(code=code, problem=problem), []):
            self._hang_up(session)

    def tell_pool_ended(self, device: int, epoch: int) -> None:
        """Whoever was told how to map it lets go of it: its memory is free when nobody maps it any more."""
        for session in self._sessions.values():
            if session.pools.get(device) == epoch:
                del session.pools[device]
                if session.sock is not None:
                    _send(session.sock, PoolEnded(device=device, epoch=epoch), [])

    def tell_ended(self, incarnation: int) -> None:
        """The front of this incarnation is gone. Its sessions stay until their end is proven: they may be copying."""
        for session in self._sessions.values():
            if session.incarnation == incarnation and session.sock is not None:
                _send(session.sock, IncarnationEnded(incarnation=incarnation), [])

    def stop_accepting(self) -> None:
        """New connections are refused by the kernel; sessions go on."""
        if self._listener is not None:
            if self._accept_again is None:
                self._epoll.unregister(self._listener)
            self._accept_again = None
            self._listener.close()
            self._listener = None
        for knock in list(self._watched.knocks.values()):
            self.refuse(knock, ErrorCode.SHUTTING_DOWN, "the node is shutting down")

    def replace_listener(self, listener: socket.socket) -> None:
        """Somebody deleted the socket's file: listen on a new one."""
        assert self._listener is not None, "only while accepting"
        if self._accept_again is None:
            self._epoll.unregister(self._listener)
        self._listener.close()
        self._listener = listener
        self._accept_again = None
        self._epoll.register(listener, select.EPOLLIN)

    def close(self) -> None:
        self.stop_accepting()
        for session in list(self._sessions.values()):
            self._forget(session)
        self._epoll.close()

    # ---- connections

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(min(ACCEPTS_PER_POLL, self._places_of_a_user)):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._pause_accepting()
                return
            sock.setblocking(False)
            self._take(sock)

    @property
    def _places_of_a_user(self) -> int:
        return max(MAX_KNOCKS // len(self._users), min(MAX_KNOCKS, KNOCKS_A_USER))

    def _whom_served(self) -> str:
        if self._are_named:
            return "it is not named in inline_users"  # who is, is nobody else's business
        return f"this node serves user {next(iter(self._users))} only"

    def _pause_accepting(self) -> None:
        """Without a descriptor left the listener would stay ready, and we would spin."""
        assert self._listener is not None
        self._epoll.unregister(self._listener)
        self._accept_again = self._clock() + ACCEPT_PAUSE_SECONDS

    def _take(self, sock: socket.socket) -> None:
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in self._users:
            problem = f"user {uid} is not served here: {self._whom_served()}"
            _send(sock, SessionRefused(code="wrong_user", problem=problem), [])
            sock.close()
            return
        of_user = [knock for knock in self._watched.knocks.values() if knock.uid == uid]
        if len(of_user) >= self._places_of_a_user:
            silent = [knock for knock in of_user if knock.hello is None]
            self._drop((silent or of_user)[0])  # the oldest: an honest client says hello at once
        try:
            pidfd = _open_pidfd(sock, pid)
        except OSError:  # the process is gone already, or no descriptor is left
            sock.close()
            return
        self._watched.knocks[sock.fileno()] = Knock(sock, pid, pidfd, self._clock() + HELLO_SECONDS, uid=uid)
        self._epoll.register(sock, select.EPOLLIN)

    def _read_hello(self, knock: Knock, events: list[Event]) -> None:
        packet = _receive(knock.sock)
        if packet is None:
            return
        message = _decode(packet)
        if not packet:
            self._drop(knock)
        elif not isinstance(message, SessionHello) or knock.hello is not None:
            self.refuse(knock, ErrorCode.MALFORMED, "the first packet is one SessionHello")
        elif message.protocol != PROTOCOL_VERSION:
            self.refuse(knock, ErrorCode.PROTOCOL_VERSION, f"this node speaks protocol {PROTOCOL_VERSION}")
        elif len(self._sessions) >= MAX_SESSIONS:
            self.refuse(knock, "too_many_sessions", f"this node has {MAX_SESSIONS} sessions, as many as it takes")
        else:
            knock.hello = message
            events.append(Asked(knock, message))

    def _drop(self, knock: Knock) -> None:
        del self._watched.knocks[knock.sock.fileno()]
        self._epoll.unregister(knock.sock)
        knock.sock.close()
        if knock.pidfd is not None:
            os.close(knock.pidfd)

    # ---- sessions

    def _read_session(self, session: Session, events: list[Event]) -> None:
        assert session.sock is not None
        packet = _receive(session.sock)
        if packet is None:
            return
        message = _decode(packet)
        if isinstance(message, Detach) and message.incarnation == session.incarnation:
            self._end(session, events)
            return
        if isinstance(message, MapDevice):
            if session.maps_arena:
                events.append(AskedDevice(session, message))
            else:
                self.refuse_pool(session, "no_pool", "a session without memory maps no device's either")
            return
        # The end of the socket, or something that a client of ours never says: no more requests from there.
        self._hang_up(session)
        events.append(HungUp(session))
        if not session.maps_arena:
            self._end(session, events)

    def _end(self, session: Session, events: list[Event]) -> None:
        if session.token in self._sessions:
            self._forget(session)
            events.append(Ended(session))

    def _forget(self, session: Session) -> None:
        self._hang_up(session)
        if session.pidfd is not None:
            del self._watched.processes[session.pidfd]
            self._epoll.unregister(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = None
        del self._sessions[session.token]

    def _hang_up(self, session: Session) -> None:
        if session.sock is not None:
            del self._watched.sessions[session.sock.fileno()]
            self._epoll.unregister(session.sock)
            session.sock.close()
            session.sock = None


def _open_pidfd(sock: socket.socket, pid: int) -> int | None:
    """Of the process that connected. None where the kernel has none to give (too old, or a process that this pid
    namespace does not see). Raises OSError when that process is gone.

    Asking by number could name a later process with the same number only if ours is dead; that it ends proves nothing
    too early then, because ours had ended before.
    """
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        fd: int = struct.unpack("i", raw)[0]
        os.set_inheritable(fd, False)
        return fd
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    if pid == 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return None
        raise


def _receive(sock: socket.socket) -> bytes | None:
    """One packet; empty at the end; None when nothing is there after all. A packet that is too long is cut, and does
    not decode."""
    while True:
        try:
            return sock.recv(MAX_PACKET_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:
            continue  # it closed without having read all; the kernel says so once, before what it had sent, like Detach
        except OSError:
            return b""


def _decode(packet: bytes) -> AnySessionMessage | None:
    try:
        return decode_packet(packet)
    except WireError:
        return None


def _send(sock: socket.socket, message: AnySessionMessage, descriptors: list[int]) -> bool:
    """Whether it is on its way. An answer that can't be sent is not missed by anybody: the peer is gone, or has never
    read one."""
    try:
        socket.send_fds(sock, [encode_packet(message)], descriptors)
    except OSError:
        return False
    return True
