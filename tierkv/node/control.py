"""What supervisor and front say to each other, over a Unix SOCK_SEQPACKET pair: one packet, one MessagePack message.

    supervisor -> front    Begin [generations], WorkerStarted [channel], WorkerDied, SessionOpened, SessionClosed,
                           SessionEnded, DeviceMapped, HostLimit, MemoryZeroed, GatewayHeard, RecorderHeard,
                           CodecVerdicts, Ping,
                           Shutdown
    front -> supervisor    Ready, Pong, WorkerRecovered, ReplaceWorker, DirectoryGone, ZeroMemory, Drained

[descriptors] travel with their message (SCM_RIGHTS). The end of the pair says that the other process is gone.
"""

from __future__ import annotations

import array
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from tierkv.core.codec_gate import JudgedModel
from tierkv.core.starts import LastEnd
from tierkv.core.value.names import PolicyName
from tierkv.errors import TierkvError, WireError

MAX_PACKET_BYTES = 65_536
MAX_DESCRIPTORS = 4
MAX_QUEUED = 4_096
"""More than that unread, and no new session is opened: the front is stuck."""


MAX_JUDGED = 32
"""In one packet, with room for the words of each."""


class WorkerName(StrEnum):
    """The workers that have a channel to the front."""

    STORAGE = "storage"
    DISK = "disk"
    DEVICE = "device"  # one for each of gpu_devices: messages say of which


def device_worker_name(device: int) -> str:
    """What status, metrics and logs call the worker of a device."""
    return f"gpu{device}"


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    pass


class FrontSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that the front acts on, checked already. `data_dir` empty: there is no NVMe tier; `disk_dir`
    alike. `gpu_bytes` is of each of `gpu_devices`."""

    data_dir: str
    socket_dir: str
    host_bytes: int
    read_only: bool
    nvme_bytes: int | None
    nvme_reserve_bytes: int
    slab_bytes: int
    extent_bytes: int
    seal_after_seconds: float
    session_bytes: int
    inflight_writes: int
    inflight_reads: int
    touch_seconds: float
    prefill_tokens_per_second: float
    eviction_policy: PolicyName
    nvme_write_bytes_per_day: int
    hang_seconds: float
    metrics_port: int | None
    metrics_host: str
    log_level: str
    has_gateway: bool = False
    record: str = ""
    disk_dir: str = ""
    disk_bytes: int | None = None
    disk_reserve_bytes: int = 0
    disk_inflight: int = 4
    pinned_share: float = 0.1
    auto_pin_share: float = 0.0
    ttl: tuple[tuple[str, float], ...] = ()
    shares: tuple[tuple[str, float], ...] = ()
    codec: str = ""
    gpu_devices: tuple[str, ...] = ()
    gpu_bytes: int = 0


class Begin(ControlMessage, frozen=True, kw_only=True, tag=True):
    """First message to a front, with the generations descriptor. `host_bytes` of the settings is the arena's size, and
    `host_limit_bytes` what of it may be used for now. `data_dir_problem` is why there is no NVMe tier where one was
    asked for. `last_end` and `end_problem`: how the front before this one ended, None for the first. `boot` tells one
    run of the machine from the next. Zeros: see clock.py."""

    settings: FrontSettings
    incarnation: int
    supervisor_pid: int
    front_restarts: int
    data_dir_problem: str = ""
    last_end: LastEnd | None = None
    end_problem: str = ""
    boot: str = ""
    host_limit_bytes: int
    earlier_bytes: int = 0
    wall_zero: float
    monotonic_zero: float


class WorkerStarted(ControlMessage, frozen=True, kw_only=True, tag=True):
    """A worker is running; the descriptor is the front's end of its channel. `sends_rows`: it will report what is on
    disk, which the front does not know yet. `device` is of a device's worker."""

    worker: WorkerName = WorkerName.STORAGE
    device: int = 0
    pid: int
    restarts: int
    sends_rows: bool


class WorkerDied(ControlMessage, frozen=True, kw_only=True, tag=True):
    """waitpid said so: from now on nothing touches the slots it was given. Of a device's worker the pool is gone. The
    next one is started after `pause_seconds`."""

    worker: WorkerName = WorkerName.STORAGE
    device: int = 0
    pid: int
    problem: str
    pause_seconds: float = 0.0


class SessionOpened(ControlMessage, frozen=True, kw_only=True, tag=True):
    """Sent before the client learns its token."""

    token: bytes
    pid: int
    client: str
    maps_arena: bool


class SessionClosed(ControlMessage, frozen=True, kw_only=True, tag=True):
    """No new requests come from it; its process may still be copying."""

    token: bytes


class SessionEnded(ControlMessage, frozen=True, kw_only=True, tag=True):
    """Its process has ended, or said that it has no mapping any more: what it held is free."""

    token: bytes


class DeviceMapped(ControlMessage, frozen=True, kw_only=True, tag=True):
    """The session is about to learn how to map the pool that this device has now; sent before it is told."""

    token: bytes
    device: int


class HostLimit(ControlMessage, frozen=True, kw_only=True, tag=True):
    """How much of the arena may be used. `earlier_bytes` of earlier fronts' arenas are still mapped by engines."""

    num_bytes: int
    problem: str = ""
    earlier_bytes: int = 0


class ZeroMemory(ControlMessage, frozen=True, kw_only=True, tag=True):
    """Overwrite (offset, bytes) of the arena with zeros, on a node without a storage worker; then say MemoryZeroed."""

    op: int
    ranges: list[tuple[int, int]]


class MemoryZeroed(ControlMessage, frozen=True, kw_only=True, tag=True):
    op: int


class GatewayHeard(ControlMessage, frozen=True, kw_only=True, tag=True):
    """A sign of life of the gateway for tenants that are not trusted; or, where it is not running, of its end.
    `problem`: how the last one that died, died."""

    pid: int
    restarts: int
    is_running: bool
    problem: str


class RecorderHeard(ControlMessage, frozen=True, kw_only=True, tag=True):
    """The recorder was started, or has ended. `problem`: how the last one that died, died. That it works it tells the
    front itself."""

    pid: int
    restarts: int
    is_running: bool
    problem: str


class CodecVerdicts(ControlMessage, frozen=True, kw_only=True, tag=True):
    """What evals have said, some of it; sent before a session is opened. One packet holds MAX_JUDGED of them."""

    judged: list[JudgedModel]


class Ping(ControlMessage, frozen=True, kw_only=True, tag=True):
    """A front whose loop turns answers Pong."""


class Shutdown(ControlMessage, frozen=True, kw_only=True, tag=True):
    """Stop taking requests, write what is dirty within the budget. A second one replaces the budget."""

    budget_seconds: float


class Ready(ControlMessage, frozen=True, kw_only=True, tag=True):
    """The front's socket is bound: sessions may be granted."""


class Pong(ControlMessage, frozen=True, kw_only=True, tag=True):
    """The front's loop turns."""


class WorkerRecovered(ControlMessage, frozen=True, kw_only=True, tag=True):
    """The worker has opened its index and told what is on disk; that of a device has told what its pool has."""

    worker: WorkerName = WorkerName.STORAGE
    device: int = 0
    pid: int


class ReplaceWorker(ControlMessage, frozen=True, kw_only=True, tag=True):
    """The channel to this worker can't be used any more: end it, and start another."""

    pid: int
    problem: str


class DirectoryGone(ControlMessage, frozen=True, kw_only=True, tag=True):
    """The data directory was taken away under the node. `problem` empty: it is there again, the same as before."""

    problem: str


class Drained(ControlMessage, frozen=True, kw_only=True, tag=True):
    """Last message of a front that was told to shut down."""

    flushed_extents: int
    flushed_bytes: int
    dropped_extents: int
    dropped_bytes: int


AnyControlMessage = (
    Begin
    | WorkerStarted
    | WorkerDied
    | SessionOpened
    | SessionClosed
    | SessionEnded
    | DeviceMapped
    | HostLimit
    | GatewayHeard
    | RecorderHeard
    | CodecVerdicts
    | Ping
    | Shutdown
    | Ready
    | Pong
    | WorkerRecovered
    | ReplaceWorker
    | DirectoryGone
    | Drained
    | ZeroMemory
    | MemoryZeroed
)

_INT_BYTES = array.array("i").itemsize

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyControlMessage)


class ControlFull(TierkvError):
    """The other side has left so much unread that nothing more is queued for it."""


class Control:
    """One end; it waits only in `wait`. What the kernel does not take now is queued, and sent by `flush` in order."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._queue)

    def send(self, message: ControlMessage, descriptors: Sequence[int] = ()) -> None:
        """The descriptors are copied: the caller keeps its own. Nothing is sent to a peer that is gone."""
        if self.ended:
            return
        packet = _encoder.encode(message)
        if not self._queue and self._try_send(packet, descriptors):
            return
        if len(self._queue) >= MAX_QUEUED:
            raise ControlFull(f"{len(self._queue)} control messages are unread")
        self._queue.append((packet, tuple(os.dup(fd) for fd in descriptors)))

    def send_now(self, message: ControlMessage) -> bool:
        """Whether the kernel has taken it: the peer will read it before anything that is sent afterwards."""
        return not self.ended and not self._queue and self._try_send(_encoder.encode(message), ())

    def flush(self) -> None:
        while self._queue:
            packet, descriptors = self._queue[0]
            if not self._try_send(packet, descriptors):
                return
            self._queue.popleft()
            _close_all(descriptors)

    def receive(self) -> tuple[AnyControlMessage, list[int]] | None:
        """One message with its descriptors, which the caller owns; None when none is there, or `ended`. Raises
        WireError for a packet that is no message: the other process is not to be relied on any more."""
        if self.ended:
            return None
        try:
            packet, ancillary = self._receive_packet()
        except (BlockingIOError, InterruptedError):
            return None
        descriptors = descriptors_in(ancillary)
        if not packet:
            _close_all(descriptors)
            self.ended = True
            return None
        try:
            return _decoder.decode(packet), descriptors
        except (msgspec.DecodeError, RecursionError) as broken:
            _close_all(descriptors)
            raise WireError("malformed", f"a control message: {broken}") from broken

    def _receive_packet(self) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        room = descriptor_room(MAX_DESCRIPTORS)
        while True:
            try:
                packet, ancillary, _, _ = self._socket.recvmsg(MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                continue  # it ended without having read all; the kernel says so once, before what it had sent itself
            return packet, ancillary

    def wait(self, timeout_seconds: float) -> tuple[AnyControlMessage, list[int]] | None:
        """Like `receive`, waiting for it."""
        deadline = time.monotonic() + timeout_seconds
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while (found := self.receive()) is None and not self.ended:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
        return found

    def close(self) -> None:
        self.ended = True
        self._socket.close()
        for _, descriptors in self._queue:
            _close_all(descriptors)
        self._queue.clear()

    def _try_send(self, packet: bytes, descriptors: Sequence[int]) -> bool:
        try:
            socket.send_fds(self._socket, [packet], list(descriptors))
        except (BlockingIOError, InterruptedError):
            return False
        except (BrokenPipeError, ConnectionResetError):
            return True  # the peer is gone, and so is what it should have heard; `ended` follows when it is read
        return True


def control_pair() -> tuple[Control, socket.socket]:
    """(the supervisor's end, the front's socket, to be inherited)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Control(ours), theirs


def descriptor_room(num_descriptors: int) -> int:
    """The ancillary bytes to be ready for."""
    return socket.CMSG_SPACE(num_descriptors * _INT_BYTES)


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """What came with a packet (SCM_RIGHTS). The caller owns them."""
    found = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) // _INT_BYTES * _INT_BYTES])
    return list(found)


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)
