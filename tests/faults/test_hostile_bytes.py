"""Whatever bytes come in by a socket: a message, or the one refusal that is promised there, soon and in little memory.

frames of ZeroMQ          Malformed, whose error is the reply
packets of a session      WireError: the peer is refused
control messages          WireError: the supervisor replaces the front, the front ends
the worker's channel      WireError: the worker is replaced
"""

from __future__ import annotations

import os
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.wire.samples import PACKETS, REPLIES, REQUESTS, golden_path
from tierkv.core.instructions import AnyReport, RemoveDone, TierHealth
from tierkv.errors import WireError
from tierkv.node.control import (
    Control,
    Drained,
    HostLimit,
    Ready,
    ReplaceWorker,
    SessionOpened,
    Shutdown,
    WorkerDied,
    control_pair,
)
from tierkv.wire.frames import Malformed, decode_reply, decode_request, encode
from tierkv.wire.messages import MAX_FRAME_BYTES, Error, ErrorCode, Status
from tierkv.wire.session import MAX_PACKET_BYTES, decode_packet
from tierkv.workers.channel import MAX_FRAME_BYTES as MAX_CHANNEL_FRAME
from tierkv.workers.channel import FrameReader

EXAMPLES = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

FRAMES = [golden_path(message).read_bytes() for message in (*REQUESTS, *REPLIES)]
SESSION_PACKETS = [golden_path(packet).read_bytes() for packet in PACKETS]
CONTROLS = [
    msgspec.msgpack.encode(message)
    for message in (
        Ready(),
        HostLimit(num_bytes=5, problem="p"),
        WorkerDied(pid=3, problem="p"),
        SessionOpened(token=b"t" * 16, pid=1, client="c", maps_arena=True),
        Shutdown(budget_seconds=1.0),
        ReplaceWorker(pid=7, problem="p"),
        Drained(flushed_extents=1, flushed_bytes=2, dropped_extents=3, dropped_bytes=4),
    )
]
REPORTS = [
    msgspec.msgpack.encode(report)
    for report in (RemoveDone(1), TierHealth(writable=True, overhead_bytes=1, free_bytes=2))
]


@st.composite
def spoilt(draw: st.DrawFn, golden: list[bytes]) -> bytes:
    """One of `golden` with bytes changed, put in, taken out, or cut off; now and then nothing of it."""
    if draw(st.integers(0, 5)) == 0:
        return draw(st.binary(max_size=300))
    raw = bytearray(draw(st.sampled_from(golden)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        match draw(st.integers(0, 3)):
            case 0:
                raw[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                raw[at:at] = draw(st.sampled_from(EVIL))
            case 2:
                del raw[at : at + draw(st.integers(1, 20))]
            case _:
                del raw[at:]
    return bytes(raw)


EVIL = [
    b"\xc1",  # never used
    b"\xdd\xff\xff\xff\xff",  # a list of four billion
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xc6\x40\x00\x00\x00",  # a gigabyte of bytes
    b"\xdb\x40\x00\x00\x00",  # a gigabyte of text
    b"\xc9\xff\xff\xff\xff\x05",  # an extension
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time far away
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # not a number
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xa2\xc3\x28",  # no UTF-8
    b"\x91" * 50,
    b"\x81\xa1k" * 50,
]
"""Beginnings of values that promise more than comes, or than anybody wants."""


@EXAMPLES
@given(spoilt(FRAMES))
def test_any_frame_is_a_message_or_has_a_reply_that_says_why_not(frame: bytes) -> None:
    for decode in (decode_request, decode_reply):
        found = decode(frame)
        if isinstance(found, Malformed):
            assert isinstance(found.error, Error)
            assert 0 <= found.error.id < 2**63
            assert decode_reply(encode(found.error)) == found.error


@EXAMPLES
@given(spoilt(SESSION_PACKETS))
def test_any_packet_of_a_session_is_a_message_or_a_wire_error(packet: bytes) -> None:
    with suppress(WireError):
        decode_packet(packet)


@EXAMPLES
@given(spoilt(CONTROLS))
def test_any_control_packet_is_a_message_or_a_wire_error(packet: bytes) -> None:
    ours, theirs = control_pair()
    front = Control(theirs)
    descriptor = os.open("/dev/null", os.O_RDONLY)
    try:
        socket.send_fds(ours._socket, [packet], [descriptor])
        with suppress(WireError):
            found = front.receive()
            for received in found[1] if found is not None else ():
                os.close(received)
    finally:
        os.close(descriptor)
        ours.close()
        front.close()


@EXAMPLES
@given(st.lists(st.tuples(spoilt(REPORTS), st.booleans()), max_size=5), st.integers(1, 64))
def test_anything_on_the_workers_channel_is_reports_or_a_wire_error(
    frames: list[tuple[bytes, bool]], step: int
) -> None:
    stream = b"".join(body if bare else struct.pack("<I", len(body)) + body for body, bare in frames)
    reader = FrameReader(AnyReport)
    with suppress(WireError):
        for at in range(0, len(stream), step):
            reader.feed(stream[at : at + step])
    assert len(reader._rest) <= len(stream)


def refuses(decode: Callable[[bytes], Any]) -> Callable[[bytes], bool]:
    def refused(raw: bytes) -> bool:
        try:
            return isinstance(decode(raw), Malformed)
        except WireError:
            return True

    return refused


def _feed(raw: bytes) -> Any:
    return FrameReader(AnyReport).feed(struct.pack("<I", len(raw)) + raw)


DECODERS = {"request": decode_request, "reply": decode_reply, "session": decode_packet, "channel": _feed}


@pytest.mark.scenario("B168", then="a length that is only declared costs neither memory nor time, and is refused")
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("begin", EVIL[1:5])
def test_what_is_declared_and_does_not_come_costs_nothing(decoder: str, begin: bytes) -> None:
    refused = refuses(DECODERS[decoder])
    inside = msgspec.msgpack.encode({"type": "Match", "id": 1, "keys": 0})[:-1] + begin
    tracemalloc.start()
    try:
        for raw in (begin, inside, begin + bytes(50), inside + bytes(50)):
            assert refused(raw)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("shape", [b"\x91", b"\x81\xa1k", b"\x92\xc0"])
def test_deep_nesting_is_refused_at_once(decoder: str, shape: bytes) -> None:
    refused = refuses(DECODERS[decoder])
    deep = shape * (MAX_PACKET_BYTES // len(shape))
    wrapped = msgspec.msgpack.encode({"type": "Status", "id": 1, "later": 0})[:-1] + deep
    began = time.process_time()
    assert refused(deep)
    assert refused(wrapped)
    assert time.process_time() - began < 5.0


def test_a_frame_of_the_channel_that_is_too_long_is_refused_by_its_length_alone() -> None:
    reader = FrameReader(AnyReport)
    with pytest.raises(WireError, match="too_large"):
        reader.feed(struct.pack("<I", MAX_CHANNEL_FRAME + 1))


@pytest.mark.scenario(
    "B168", then="up to the limit a frame is read, above it the answer is too_large and names the limit"
)
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_a_frame_is_read_up_to_the_limit_and_refused_above_it(excess: int) -> None:
    bare = len(msgspec.msgpack.encode({"type": "Status", "id": 5, "padding": bytes(2**16)})) - 2**16
    frame = msgspec.msgpack.encode({"type": "Status", "id": 5, "padding": bytes(MAX_FRAME_BYTES - bare + excess)})
    assert len(frame) == MAX_FRAME_BYTES + excess
    found = decode_request(frame)
    if excess <= 0:
        assert found == Status(id=5)
    else:
        assert isinstance(found, Malformed)
        assert found.error.code == ErrorCode.TOO_LARGE
        assert str(MAX_FRAME_BYTES) in found.error.problem
