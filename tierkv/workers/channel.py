"""The channel between front and storage worker: framed messages over a Unix stream socket.

    u32 length, little-endian | one MessagePack message of that length | u32 length | ...

`Channel` is the front's end: it never waits, so that one poll loop can serve it beside other sockets.
`BlockingChannel` is the worker's end: it waits, always with a deadline, and any thread may send.

The end of the peer is no error but a fact, `ended`: its owner replaces it and answers what was outstanding. A broken
frame is an error (WireError), after which the channel can't be used: the two no longer agree where a message begins.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from tierkv.core.instructions import AnyInstruction, AnyReport, Report
from tierkv.errors import WireError
from tierkv.wire.messages import ErrorCode

MAX_FRAME_BYTES = 64 * 2**20  # several times the largest instruction: one extent's keys, tokens and extras
MAX_BUFFERED_BYTES = 2 * MAX_FRAME_BYTES
RECEIVE_BYTES = 2**20  # read at most this much before the caller's loop gets its turn again

_LENGTH = struct.Struct("<I")
_SOCKET_BUFFER_BYTES = 4 * 2**20

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class FrameWriter:
    """Appends frames to a buffer that somebody else sends from its front."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._max_frame_bytes = max_frame_bytes

    def append(self, buffer: bytearray, message: object) -> None:
        """Raises WireError, with the buffer as it was, for a message larger than a frame may be."""
        start = len(buffer)
        buffer += bytes(_LENGTH.size)
        self._encoder.encode_into(message, buffer, start + _LENGTH.size)
        num_bytes = len(buffer) - start - _LENGTH.size
        if num_bytes > self._max_frame_bytes:
            del buffer[start:]
            raise _too_large(num_bytes, self._max_frame_bytes)
        _LENGTH.pack_into(buffer, start, num_bytes)


class FrameReader:
    """Cuts a stream of bytes, fed as it comes, into messages."""

    def __init__(self, message_type: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        self._max_frame_bytes = max_frame_bytes
        self._rest = bytearray()  # the beginning of a message whose end has not come yet

    @property
    def is_between_messages(self) -> bool:
        return not self._rest

    def feed(self, chunk: bytes | memoryview) -> list[Any]:
        """The messages that `chunk` completes. Raises WireError for a frame that is too large or does not decode."""
        if self._rest:
            self._rest += chunk
            chunk = bytes(self._rest) if self._holds_whole_frame() else b""
        messages, consumed = self._decode(memoryview(chunk))
        if consumed:
            self._rest = bytearray(chunk[consumed:])
        elif not self._rest:
            self._rest += chunk
        return messages

    def _holds_whole_frame(self) -> bool:
        """So that a large frame that comes in many pieces is copied once, not once for each piece."""
        if len(self._rest) < _LENGTH.size:
            return False
        return len(self._rest) >= _LENGTH.size + self._frame_bytes(self._rest, 0)

    def _decode(self, view: memoryview) -> tuple[list[Any], int]:
        messages = []
        start, end = 0, len(view)
        decode = self._decoder.decode
        try:
            while end - start >= _LENGTH.size:
                stop = start + _LENGTH.size + self._frame_bytes(view, start)
                if stop > end:
                    break
                messages.append(decode(view[start + _LENGTH.size : stop]))
                start = stop
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(ErrorCode.MALFORMED, f"a message on the channel does not decode: {error}") from error
        return messages, start

    def _frame_bytes(self, buffer: bytearray | memoryview, start: int) -> int:
        num_bytes: int = _LENGTH.unpack_from(buffer, start)[0]
        if num_bytes > self._max_frame_bytes:
            raise _too_large(num_bytes, self._max_frame_bytes)
        return num_bytes


class _End(Generic[Sent, Received]):
    """What both ends share: the socket, the frames, and what is known of the peer."""

    def __init__(self, sock: socket.socket, receives: Any, max_frame_bytes: int) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
        self._socket = sock
        self._writer = FrameWriter(max_frame_bytes)
        self._reader = FrameReader(receives, max_frame_bytes)
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once the peer's end of the stream was seen, and after `close`. What it sent before was received."""
        return self._ended

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._ended = True
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _receive_now(self) -> list[Received]:
        """What has come, without waiting."""
        try:
            chunk = self._socket.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except (ConnectionResetError, BrokenPipeError):
            chunk = b""
        if not chunk:
            self._ended = True  # a message that was cut off died with its sender
            return []
        return self._reader.feed(chunk)

    def _send_now(self, buffer: bytearray) -> None:
        """Give the kernel what it takes of `buffer`, without waiting, and remove that from it."""
        try:
            with memoryview(buffer) as view:
                num_sent = self._socket.send(view)
        except (BlockingIOError, InterruptedError):
            return
        except (ConnectionResetError, BrokenPipeError):
            buffer.clear()  # nobody reads it any more; `ended` follows when what the peer sent has been read
            return
        del buffer[:num_sent]


class Channel(_End[Sent, Received]):
    """An end that never waits, for a poll loop in one thread.

    for message in ...: channel.send(message)
    channel.flush()                             # at the end of a round, and when writable
    poll for reading, and for writing while channel.wants_write
    """

    def __init__(
        self,
        sock: socket.socket,
        receives: Any,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        super().__init__(sock, receives, max_frame_bytes)
        self._outgoing = bytearray()
        self._max_buffered_bytes = max_buffered_bytes

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing)

    @property
    def buffered_bytes(self) -> int:
        return len(self._outgoing)

    def send(self, message: Sent) -> None:
        """Take `message` on; `flush` sends it. To a peer that has ended nothing is sent, and nothing is raised.

        Raises WireError TIMEOUT when the peer has left so much unread that the buffer's bound is passed: it is stuck,
        and is to be replaced.
        """
        if self._ended:
            return
        self._writer.append(self._outgoing, message)
        if len(self._outgoing) > self._max_buffered_bytes:
            self.flush()
        if len(self._outgoing) > self._max_buffered_bytes:
            raise WireError(ErrorCode.TIMEOUT, f"the peer has left {len(self._outgoing)} bytes unread")

    def flush(self) -> None:
        if self._outgoing and not self._ended:
            self._send_now(self._outgoing)

    def receive(self) -> list[Received]:
        """The messages that have come, at most about a megabyte of them; [] for none. Ask `ended` afterwards."""
        return [] if self._ended else self._receive_now()


class BlockingChannel(_End[Sent, Received]):
    """An end that waits. One thread receives, any thread sends."""

    def __init__(self, sock: socket.socket, receives: Any, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        super().__init__(sock, receives, max_frame_bytes)
        self._sending = threading.Lock()

    def send(self, messages: Iterable[Sent], *, timeout_seconds: float) -> None:
        """Send all of `messages`. To a peer that has ended nothing is sent, and nothing is raised.

        Raises WireError TIMEOUT when the peer does not read within `timeout_seconds`; the channel is then broken.
        """
        deadline = time.monotonic() + timeout_seconds
        buffer = bytearray()
        for message in messages:
            self._writer.append(buffer, message)
        if not self._sending.acquire(timeout=timeout_seconds):
            raise WireError(ErrorCode.TIMEOUT, "the peer does not read: another thread waits for it")
        try:
            while buffer and not self._ended:
                if not self._wait(select.POLLOUT, deadline):
                    raise WireError(ErrorCode.TIMEOUT, f"the peer has left {len(buffer)} bytes unread")
                self._send_now(buffer)
        finally:
            self._sending.release()

    def receive(self, timeout_seconds: float) -> list[Received]:
        """Messages, at least one of them if one comes in time; [] when none did or the peer has ended."""
        deadline = time.monotonic() + timeout_seconds
        while not self._ended and self._wait(select.POLLIN, deadline):
            messages = self._receive_now()
            if messages:
                return messages
        return []

    def _wait(self, event: int, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def front_end(sock: socket.socket) -> Channel[AnyInstruction, AnyReport]:
    """The front's end of the channel to its storage worker."""
    return Channel(sock, AnyReport)


def worker_end(sock: socket.socket) -> BlockingChannel[Report, AnyInstruction]:
    """The storage worker's end of the channel to the front."""
    return BlockingChannel(sock, AnyInstruction)


def _too_large(num_bytes: int, max_frame_bytes: int) -> WireError:
    return WireError(ErrorCode.TOO_LARGE, f"a frame of {num_bytes} bytes, of which {max_frame_bytes} are allowed")
