"""One session with a node: the socket that proves it, its token, and the memory it was given.

A session ends for us when its socket says so (end of file, IncarnationEnded) or a reply does (SESSION_GONE). Then it
is `over`: no request goes out under it any more. What was granted under it stays readable and writable, for an arena
belongs to one incarnation, and nobody writes to the arena of a dead one. Only when nothing of it is in use any more is
the memory unmapped, Detach sent, and the socket closed.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.client.arena import ArenaMap
from tierkv.client.device.exchange import SESSION_OVER, PoolExchange, PoolOffered
from tierkv.client.device.pinning import PinnedArena
from tierkv.core.reasons import Reason
from tierkv.errors import WireError
from tierkv.wire.messages import PROTOCOL_VERSION, ErrorCode
from tierkv.wire.session import (
    MAX_PACKET_BYTES,
    SESSION_SOCKET_NAME,
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

if TYPE_CHECKING:
    from tierkv.device.backends import Backend

TRUSTED_USERS = frozenset({0})
"""Users besides our own whose node is believed: root."""

_TIMEVAL = struct.Struct("ll")

_REFUSALS: dict[str, Reason] = {
    ErrorCode.SHUTTING_DOWN: Reason.SHUTDOWN,
    ErrorCode.PROTOCOL_VERSION: Reason.WIRE_ERROR,
    ErrorCode.MALFORMED: Reason.WIRE_ERROR,
}
_LASTING = frozenset({ErrorCode.PROTOCOL_VERSION, "wrong_user"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """No session, and why. `problem` is for people. `lasting` names what stays so until somebody changes it; empty for
    what may be over with the next attempt."""

    reason: Reason
    problem: str
    lasting: str = ""


class Session:
    """Made by `open_session`. The client's lock guards `grants` and `retired`; `look` may be called by any thread."""

    def __init__(self, connection: socket.socket, grant: SessionGrant | InlineGrant, arena: ArenaMap | None) -> None:
        self.token = grant.token
        self.incarnation = grant.incarnation
        self.endpoint = grant.endpoint
        self.tenant = grant.tenant if isinstance(grant, InlineGrant) else ""  # with one, payload travels inline
        self.arena = arena
        self.opened: set[bytes] = set()  # groups that the node knows under this session
        self.greeted = False
        self.over = False
        self.retired = False
        self.grants = 0
        self.pools = PoolExchange()
        self._connection = connection
        connection.setblocking(False)  # with a timeout Python would wait for it in `look`, whatever the flags say
        self._looking = threading.Lock()
        self._pinning = threading.Lock()
        self._pinned: PinnedArena | None = None
        self._may_pin = True

    def duplicate(self) -> int | None:
        """A descriptor of the session socket to wait on, the caller's to close; None when the session is finished.
        Whoever waits needs its own: the number of ours may belong to another file by the time it wakes up."""
        with self._looking:
            number = self._connection.fileno()
            return None if self.over or number < 0 else os.dup(number)

    def look(self) -> None:
        """Read what the supervisor has sent, without waiting."""
        with self._looking:
            while not self.over:
                descriptors: list[int] = []
                try:
                    packet, descriptors, _flags, _address = socket.recv_fds(
                        self._connection, MAX_PACKET_BYTES, 2, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                    )
                except BlockingIOError:
                    return
                except OSError:
                    packet = b""
                if not packet or not self._take(packet, descriptors):
                    self._shut()

    def map_device(self, wish: MapDevice, until: float) -> PoolOffered | DeviceRefused:
        """Ask for the node's pool on a GPU, and wait for the answer until then (monotonic)."""

        def send(message: MapDevice) -> None:
            with self._looking:
                self._connection.send(encode_packet(message), socket.MSG_DONTWAIT)

        def look() -> bool:
            self.look()
            return not self.over

        descriptor = self.duplicate()
        if descriptor is None:
            return SESSION_OVER
        return self.pools.ask(wish, send=send, look=look, descriptor=descriptor, until=until)

    def pin(self, backend: Backend) -> PinnedArena | None:
        """The arena, registered with a GPU's driver or on its way to be; the caller holds it. None when the session is
        retired."""
        with self._pinning:
            if not self._may_pin or self.arena is None:
                return None
            if self._pinned is None:
                self._pinned = PinnedArena(backend, self.arena.writable)
            return self._pinned if self._pinned.hold() else None

    def unpin(self, unused: Callable[[], None]) -> None:
        """It is retired: the arena is let go of by the driver when no pool's user is left. `unused` as for
        PinnedArena."""
        with self._pinning:
            self._may_pin = False
            pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.let_go(unused)

    def end(self) -> None:
        """From now on `over`. The reading half is shut, so that everyone who waits on the socket wakes up."""
        with self._looking:
            self._shut()

    def finish(self) -> bool:
        """Unmap, say Detach, close. False while views of the arena are left: call again later."""
        if self.arena is not None and not self.arena.close():
            return False
        with self._looking:
            with suppress(OSError):  # nobody is there to be told, or the end of our process will tell it
                self._connection.send(encode_packet(Detach(incarnation=self.incarnation)), socket.MSG_DONTWAIT)
            self._connection.close()
        return True

    def _take(self, packet: bytes, descriptors: list[int]) -> bool:
        """Whether the session goes on. A packet that can't be read ends it: what it said might have been that."""
        try:
            message = decode_packet(packet)
        except WireError:
            message = None
        if isinstance(message, DeviceGrant | DeviceRefused):
            self.pools.take_answer(message, descriptors)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(message, PoolEnded):
            self.pools.take_end(message)
        return message is not None and not (
            isinstance(message, IncarnationEnded) and message.incarnation >= self.incarnation
        )

    def _shut(self) -> None:
        self.over = True
        with suppress(OSError):  # the other side has closed it already
            self._connection.shutdown(socket.SHUT_RD)


def open_session(
    socket_dir: Path, *, client: str, maps_arena: bool, until: float, node_user: int | None = None
) -> Session | Refusal:
    """The first exchange on the session socket, done before `until` (monotonic seconds) or refused. `node_user` is
    believed besides our own user and root."""
    path = socket_dir / SESSION_SOCKET_NAME
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        _connect(connection, path, node_user, until)
        opened = _exchange(connection, client, maps_arena, until)
    except TimeoutError:
        opened = Refusal(Reason.DEADLINE, f"no answer on {path}")
    except PermissionError as refused:
        opened = Refusal(Reason.NODE_AWAY, f"{path}: {refused}", lasting="no_access")
    except OSError as away:
        opened = Refusal(Reason.NODE_AWAY, f"{path}: {away}")
    except WireError as broken:
        opened = Refusal(Reason.WIRE_ERROR, str(broken), lasting=broken.code)
    if isinstance(opened, Refusal):
        _give_up(connection)
    return opened


def describe_refusal(code: str, problem: str) -> str:
    """The node's words, and ours where the two sides have to be held against each other."""
    if code != ErrorCode.PROTOCOL_VERSION:
        return f"{code}: {problem}"
    return (
        f"{code}: {problem}, and this client protocol {PROTOCOL_VERSION}; run the same release of tierkv on both sides"
    )


def _give_up(connection: socket.socket) -> None:
    """Decline what may have been granted meanwhile: the node would keep an arena for us until our process ends. Once
    the reading half is shut nothing more can be granted."""
    with connection, suppress(OSError):  # that there is no connection, for one
        connection.shutdown(socket.SHUT_RD)
        packet, descriptors, _flags, _address = socket.recv_fds(
            connection, MAX_PACKET_BYTES, 2, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(WireError):
            answer = decode_packet(packet)
            if isinstance(answer, SessionGrant | InlineGrant):
                _decline(connection, answer)


def _decline(connection: socket.socket, grant: SessionGrant | InlineGrant) -> None:
    connection.send(encode_packet(Detach(incarnation=grant.incarnation)), socket.MSG_DONTWAIT)


def _connect(connection: socket.socket, path: Path, node_user: int | None, until: float) -> None:
    """Where more are queueing than the listener keeps, the kernel lets a blocking connect wait for its turn, and tells
    any other at once that it can't (a socket with a timeout of Python's is such a one)."""
    is_connected = False
    while not is_connected:
        microseconds = max(1, int(_remaining(until) * 1e6))  # 0 would be for ever
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))
        try:
            connection.connect(os.fspath(path))
        except BlockingIOError as full:
            raise TimeoutError from full
        is_connected = _has_peer(connection)
    _require_believed_peer(connection, node_user)


def _has_peer(connection: socket.socket) -> bool:
    """A signal ends the wait for a turn, and Python then takes a Unix socket for connected, which it isn't."""
    try:
        connection.getpeername()
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            return False
        raise
    return True


def _exchange(connection: socket.socket, client: str, maps_arena: bool, until: float) -> Session | Refusal:
    hello = SessionHello(protocol=PROTOCOL_VERSION, client=client, maps_arena=maps_arena)
    with suppress(BrokenPipeError, ConnectionResetError):  # who refuses a user says so, and waits for no hello
        connection.send(encode_packet(hello))
    packet, descriptors = _receive(connection, until)
    try:
        return _accept(connection, packet, descriptors, maps_arena)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive(connection: socket.socket, until: float) -> tuple[bytes, list[int]]:
    """A packet and its descriptors. Where the other side has closed without reading our hello, the kernel says so once,
    before what had been sent."""
    connection.settimeout(_remaining(until))
    flags = socket.MSG_CMSG_CLOEXEC
    try:
        packet, descriptors, _flags, _address = socket.recv_fds(connection, MAX_PACKET_BYTES, 2, flags)
    except ConnectionResetError:
        packet, descriptors, _flags, _address = socket.recv_fds(connection, MAX_PACKET_BYTES, 2, flags)
    return packet, descriptors


def _accept(connection: socket.socket, packet: bytes, descriptors: list[int], maps_arena: bool) -> Session | Refusal:
    if not packet:
        raise ConnectionResetError("closed before it answered")
    answer = decode_packet(packet)
    if isinstance(answer, SessionRefused):
        return Refusal(
            _REFUSALS.get(answer.code, Reason.NODE_AWAY),
            describe_refusal(answer.code, answer.problem),
            lasting=answer.code if answer.code in _LASTING else "",
        )
    if isinstance(answer, InlineGrant):
        return Session(connection, answer, None)
    if not isinstance(answer, SessionGrant):
        raise WireError(ErrorCode.MALFORMED, f"{type(answer).__name__} is no answer to SessionHello")
    if not maps_arena:
        return Session(connection, answer, None)
    try:
        arena = _map_arena(answer, descriptors)
    except (OSError, WireError):
        with suppress(OSError):
            _decline(connection, answer)
        raise
    return Session(connection, answer, arena)


def _map_arena(grant: SessionGrant, descriptors: list[int]) -> ArenaMap:
    if len(descriptors) != 2:
        raise WireError(ErrorCode.MALFORMED, f"SessionGrant came with {len(descriptors)} descriptors, not 2")
    arena_fd, generations_fd = descriptors
    return ArenaMap(arena_fd, generations_fd, arena_bytes=grant.arena_bytes, page_bytes=grant.page_bytes)


def _require_believed_peer(connection: socket.socket, node_user: int | None) -> None:
    """A socket in a shared directory could be anybody's: only our own user, root, and who was named are believed."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", raw)
    if uid != os.geteuid() and uid not in TRUSTED_USERS and uid != node_user:
        raise PermissionError(
            f"served by user {uid}, not by user {os.geteuid()}; if that is the node's user, name it as node_user"
        )


def _remaining(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
