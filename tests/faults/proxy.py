"""A proxy between real clients and a real node, which does to their messages what bad connections and bad luck would.

    with Proxy(node.endpoint, directory) as proxy:          # clients connect to `proxy.directory`
        held = proxy.add("Acquire", Way.REPLY, Fault.HOLD)
        ...
        held.release()

It carries bytes: of the ZeroMQ connections (ZMTP 3, cut into messages, each connection its own, so that one can be cut
without the others) and of the session socket (packets with their descriptors). A reply is named by the request that it
answers. `unruly` treats messages at random, from a seed, where no rule has a word to say.

The node takes who holds the other end of a session socket for the engine: that is the process the proxy runs in. So
it is to run in the engine's own process where the engine's death is what a test is about.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from tierkv.errors import WireError
from tierkv.wire.session import (
    MAX_PACKET_BYTES,
    NODE_SOCKET_NAME,
    SESSION_SOCKET_NAME,
    InlineGrant,
    SessionGrant,
    decode_packet,
    encode_packet,
)

GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a ZMTP frame
_MOST_UNSENT = 2**20
_MAX_DESCRIPTORS = 8

WAIT_SECONDS = 60.0


class Way(StrEnum):
    """Of a message: what the client says, or what the node says."""

    REQUEST = "request"
    REPLY = "reply"


class Fault(StrEnum):
    PASS = "pass"
    DROP = "drop"
    TWICE = "twice"
    HOLD = "hold"
    """Kept until its rule is released, or for `Rule.seconds`; what comes behind it goes ahead."""
    SWAP = "swap"
    """Delivered behind the next message of this connection and way."""
    CUT_BEFORE = "cut before"
    CUT_AFTER = "cut after"


@dataclass(frozen=True, slots=True)
class Seen:
    """A message that came by. `id` is 0 for packets of the session socket."""

    way: Way
    kind: str
    id: int
    fault: Fault


@dataclass(eq=False)
class Rule:
    """From the `nth` message on that fits, `times` of them get `fault`. An empty `kind` fits every message."""

    proxy: Proxy
    kind: str
    way: Way
    fault: Fault
    nth: int
    times: int
    seconds: float | None
    met: int = 0
    seen: int = 0
    held: list[tuple[_Stream, bytes, list[int]]] = field(default_factory=list)

    def takes(self, way: Way, kind: str) -> bool:
        if way is not self.way or self.kind not in ("", kind) or self.met >= self.times:
            return False
        self.seen += 1
        if self.seen < self.nth:
            return False
        self.met += 1
        return True

    def wait(self, times: int = 1) -> None:
        """Until it was applied so often."""
        self.proxy.wait_until(lambda: self.met >= times, f"{self.fault} {self.kind} {self.way}")

    def release(self) -> int:
        """Deliver what is held, in order; how many were. What comes now passes."""
        released: int = self.proxy._call(lambda: self.proxy._release(self))
        return released


class Proxy:
    """Owns its sockets and its thread until `close`."""

    def __init__(self, node_directory: Path, directory: Path) -> None:
        self.directory = directory
        self.seen: list[Seen] = []
        self._sessions_go_to = node_directory / SESSION_SOCKET_NAME
        self._requests_go_to = node_directory / NODE_SOCKET_NAME  # or where a grant says: a gateway has other names
        self._rules: list[Rule] = []
        self._unruly: _Unruly | None = None
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, _Stream] = {}
        self._timers: list[tuple[float, Rule]] = []
        self._commands: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_woken)
        self._listeners = [
            self._listen(NODE_SOCKET_NAME, socket.SOCK_STREAM, lambda: self._requests_go_to),
            self._listen(SESSION_SOCKET_NAME, socket.SOCK_SEQPACKET, lambda: self._sessions_go_to),
        ]
        self._running = True
        self._thread = threading.Thread(target=self._serve, name="fault proxy")
        self._thread.start()

    # ---- called by tests

    def add(
        self, kind: str, way: Way, fault: Fault, *, nth: int = 1, times: int = 1, seconds: float | None = None
    ) -> Rule:
        rule = Rule(self, kind, way, fault, nth, times, seconds)
        self._call(lambda: self._rules.append(rule))
        return rule

    def unruly(self, seed: int, shares: Mapping[Fault, float], *, most_seconds: float = 0.05) -> None:
        """Every message of the ZeroMQ connections gets a fault with the given probability, held ones for up to
        `most_seconds`. An empty mapping ends it."""
        made = _Unruly(random.Random(seed), dict(shares), most_seconds) if shares else None
        self._call(lambda: setattr(self, "_unruly", made))

    def calm(self) -> None:
        """No rule any more: what is held is delivered, and everything passes."""

        def forget() -> None:
            self._unruly = None
            for rule in self._rules:
                self._release(rule)
            self._rules.clear()

        self._call(forget)

    def cut(self) -> int:
        """Every ZeroMQ connection that there is, now; how many there were."""

        def cut() -> int:
            wires = {stream.wire for stream in self._streams.values() if not stream.wire.is_session}
            for wire in wires:
                self._end(wire)
            return len(wires)

        number: int = self._call(cut)
        return number

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_SECONDS), f"waited in vain: {what}"

    def saw(self, kind: str, way: Way = Way.REQUEST) -> list[Seen]:
        with self._changed:
            return [seen for seen in self.seen if seen.kind == kind and seen.way is way]

    def close(self) -> None:
        self._call(lambda: setattr(self, "_running", False))
        self._thread.join()
        for stream in list(self._streams.values()):
            self._end(stream.wire)
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, command: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        with self._changed:
            self._commands.append((command, done))
        self._wake.send(b"x")
        return done.result(WAIT_SECONDS)

    # ---- the thread

    def _serve(self) -> None:
        while self._running:
            for key, events in self._selector.select(self._seconds_left()):
                if callable(key.data):
                    key.data()
                elif key.data.number in self._streams:
                    self._serve_socket(key.data, events)
            self._release_what_is_due()

    def _seconds_left(self) -> float | None:
        return max(0.0, min(due for due, _ in self._timers) - time.monotonic()) if self._timers else None

    def _on_woken(self) -> None:
        self._woken.recv(1)
        with self._changed:
            command, done = self._commands.pop(0)
        try:
            done.set_result(command())
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
            done.set_exception(error)

    def _listen(self, name: str, kind: int, to: Callable[[], Path]) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, kind)
        listener.bind(os.fspath(self.directory / name))
        listener.listen(128)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener, kind, to()))
        return listener

    def _accept(self, listener: socket.socket, kind: int, to: Path) -> None:
        client, _ = listener.accept()
        node = socket.socket(socket.AF_UNIX, kind)
        try:
            node.connect(os.fspath(to))
        except OSError:  # there is no node: the client hears it as from the node itself
            node.close()
            client.close()
            return
        wire = _Wire(client, node, is_session=kind == socket.SOCK_SEQPACKET)
        for stream in wire.streams:
            stream.source.setblocking(False)
            self._streams[stream.number] = stream
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def _serve_socket(self, stream: _Stream, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(stream.other)
        if events & selectors.EVENT_READ and stream.number in self._streams:
            (self._read_packet if stream.wire.is_session else self._read_bytes)(stream)

    # ---- ZeroMQ

    def _read_bytes(self, stream: _Stream) -> None:
        try:
            chunk = stream.source.recv(2**18)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._end(stream.wire)
            return
        for raw, body in stream.cutter.feed(chunk):
            if stream.wire.is_over:
                return
            if body is None:  # the greeting, and what ZeroMQ itself has to say
                self._deliver(stream, raw, [])
            else:
                kind, number = stream.wire.name(stream.way, body)
                self._treat(stream, kind, number, raw, [])
        self._watch(stream)

    # ---- sessions

    def _read_packet(self, stream: _Stream) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(
                stream.source, MAX_PACKET_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            return  # said once, ahead of what the peer had sent before it closed
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            self._end(stream.wire)
            return
        kind = "?"
        with suppress(WireError):
            message = decode_packet(packet)
            kind = type(message).__name__
            if isinstance(message, SessionGrant | InlineGrant):
                self._requests_go_to = Path(message.endpoint.removeprefix("ipc://"))
                endpoint = f"ipc://{self.directory / NODE_SOCKET_NAME}"
                packet = encode_packet(msgspec.structs.replace(message, endpoint=endpoint))
        self._treat(stream, kind, 0, packet, list(descriptors))

    # ---- what becomes of a message

    def _treat(self, stream: _Stream, kind: str, number: int, raw: bytes, descriptors: list[int]) -> None:
        rule = next((rule for rule in self._rules if rule.takes(stream.way, kind)), None)
        if rule is None and self._unruly is not None and not stream.wire.is_session:
            rule = self._unruly.judge(self, stream.way, kind)
            if rule is not None and rule.fault is Fault.HOLD:
                self._rules.append(rule)
        fault = rule.fault if rule is not None else Fault.PASS
        self._carry_out(stream, fault, rule, raw, descriptors)
        with self._changed:
            self.seen.append(Seen(stream.way, kind, number, fault))
            self._changed.notify_all()

    def _carry_out(self, stream: _Stream, fault: Fault, rule: Rule | None, raw: bytes, descriptors: list[int]) -> None:
        match fault:
            case Fault.HOLD:
                assert rule is not None
                rule.held.append((stream, raw, descriptors))
                if rule.seconds is not None:
                    self._timers.append((time.monotonic() + rule.seconds, rule))
                return
            case Fault.SWAP:
                stream.swapped.append((raw, descriptors))
                return
            case Fault.DROP:
                pass
            case Fault.CUT_BEFORE:
                self._end(stream.wire)
            case _:
                for _ in range(2 if fault is Fault.TWICE else 1):
                    self._deliver(stream, raw, descriptors)
                if fault is Fault.CUT_AFTER:
                    self._flush(stream)
                    self._end(stream.wire)
        for descriptor in descriptors:
            os.close(descriptor)

    def _deliver(self, stream: _Stream, raw: bytes, descriptors: list[int]) -> None:
        """The descriptors stay the caller's."""
        if stream.wire.is_over:
            return
        if stream.wire.is_session:
            with suppress(OSError):  # nobody is there any more
                socket.send_fds(stream.sink, [raw], descriptors)
        else:
            stream.unsent += raw
            self._flush(stream)
        swapped, stream.swapped = stream.swapped, []
        for late, of_late in swapped:
            self._deliver(stream, late, of_late)
            for descriptor in of_late:
                os.close(descriptor)

    def _flush(self, stream: _Stream) -> None:
        try:
            while stream.unsent:
                del stream.unsent[: stream.sink.send(stream.unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._end(stream.wire)
            return
        self._watch(stream)
        self._watch(stream.other)

    def _watch(self, stream: _Stream) -> None:
        """Read from its source unless too much is unsent; write to that socket what goes the other way."""
        if stream.number not in self._streams:
            return
        events = 0 if len(stream.unsent) > _MOST_UNSENT else selectors.EVENT_READ
        if stream.other.unsent:
            events |= selectors.EVENT_WRITE
        if stream.number not in self._selector.get_map():
            if events:
                self._selector.register(stream.source, events, stream)
        elif events:
            self._selector.modify(stream.source, events, stream)
        else:
            self._selector.unregister(stream.source)

    def _release(self, rule: Rule) -> int:
        rule.times = rule.met
        held, rule.held = rule.held, []
        for stream, raw, descriptors in held:
            self._deliver(stream, raw, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        self._timers = [(due, other) for due, other in self._timers if other is not rule]
        return len(held)

    def _release_what_is_due(self) -> None:
        now = time.monotonic()
        for rule in [rule for due, rule in self._timers if due <= now]:
            self._release(rule)
            self._rules.remove(rule)

    def _end(self, wire: _Wire) -> None:
        if wire.is_over:
            return
        wire.is_over = True
        for stream in wire.streams:
            if stream.number in self._selector.get_map():
                self._selector.unregister(stream.source)
            del self._streams[stream.number]
            for _, descriptors in stream.swapped:
                for descriptor in descriptors:
                    os.close(descriptor)
        for stream in wire.streams:
            stream.source.close()


class _Envelope(msgspec.Struct):
    type: str = "?"
    id: int = 0


_envelopes = msgspec.msgpack.Decoder(_Envelope)


class _Wire:
    """One connection of a client, and ours to the node for it."""

    def __init__(self, client: socket.socket, node: socket.socket, *, is_session: bool) -> None:
        self.is_session = is_session
        self.is_over = False
        self._asked: dict[int, str] = {}
        to_node, to_client = _Stream(self, Way.REQUEST, client, node), _Stream(self, Way.REPLY, node, client)
        to_node.other, to_client.other = to_client, to_node
        self.streams = (to_node, to_client)

    def name(self, way: Way, body: bytes) -> tuple[str, int]:
        try:
            envelope = _envelopes.decode(body)
        except msgspec.DecodeError:
            return "?", 0
        if way is Way.REQUEST:
            self._asked[envelope.id] = envelope.type
            return envelope.type, envelope.id
        return self._asked.get(envelope.id, "?"), envelope.id


class _Stream:
    """One way of a connection."""

    other: _Stream

    def __init__(self, wire: _Wire, way: Way, source: socket.socket, sink: socket.socket) -> None:
        self.wire = wire
        self.way = way
        self.source = source
        self.sink = sink
        self.number = source.fileno()
        self.cutter = MessageCutter()
        self.unsent = bytearray()
        self.swapped: list[tuple[bytes, list[int]]] = []


class MessageCutter:
    """Cuts one way of a ZMTP 3 connection into (raw bytes, body), body None for what is no message: the greeting and
    commands. A message of several frames is one piece, with the body of its last frame."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._greeting_left = GREETING_BYTES
        self._parts = b""

    def feed(self, chunk: bytes) -> list[tuple[bytes, bytes | None]]:
        self._rest += chunk
        pieces: list[tuple[bytes, bytes | None]] = []
        if self._greeting_left:  # each side waits for bits of the other's: pass it on as it comes
            piece = bytes(self._rest[: self._greeting_left])
            del self._rest[: len(piece)]
            self._greeting_left -= len(piece)
            pieces.append((piece, None))
        while (frame := self._take_frame()) is not None:
            flags, raw, body = frame
            if flags & _COMMAND:
                pieces.append((raw, None))
            elif flags & _MORE:
                self._parts += raw
            else:
                pieces.append((self._parts + raw, body))
                self._parts = b""
        return pieces

    def _take_frame(self) -> tuple[int, bytes, bytes] | None:
        rest = self._rest
        if len(rest) < 2:
            return None
        flags = rest[0]
        header, size = 2, rest[1]
        if flags & _LONG:
            if len(rest) < 9:
                return None
            header, size = 9, struct.unpack_from(">Q", rest, 1)[0]
        if len(rest) < header + size:
            return None
        raw = bytes(rest[: header + size])
        del rest[: header + size]
        return flags, raw, raw[header:]


@dataclass
class _Unruly:
    random: random.Random
    shares: dict[Fault, float]
    most_seconds: float

    def judge(self, proxy: Proxy, way: Way, kind: str) -> Rule | None:
        """A rule that is met by this one message."""
        draw = self.random.random()
        seconds = self.random.random() * self.most_seconds
        for fault, share in self.shares.items():
            draw -= share
            if draw < 0:
                return Rule(proxy, kind, way, fault, 1, 1, seconds, met=1, seen=1)
        return None
