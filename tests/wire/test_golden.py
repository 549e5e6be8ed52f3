"""The bytes on the wire don't change by accident: a committed frame for each message."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from tests.wire.samples import GOLDEN, PACKETS, REPLIES, REQUESTS, golden_path
from tierkv.wire.frames import decode_reply, decode_request, encode
from tierkv.wire.messages import Acquire, AnyReply, AnyRequest, Hello, Match, Reply, Request
from tierkv.wire.session import AnySessionMessage, decode_packet, encode_packet


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_has_its_golden_frame(request_: Request) -> None:
    frame = golden_path(request_).read_bytes()
    assert encode(request_) == frame
    assert decode_request(frame) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda message: type(message).__name__)
def test_a_reply_has_its_golden_frame(reply: Reply) -> None:
    frame = golden_path(reply).read_bytes()
    assert encode(reply) == frame
    assert decode_reply(frame) == reply


@pytest.mark.parametrize("packet", PACKETS, ids=lambda message: type(message).__name__)
def test_a_session_message_has_its_golden_packet(packet: AnySessionMessage) -> None:
    raw = golden_path(packet).read_bytes()
    assert encode_packet(packet) == raw
    assert decode_packet(raw) == packet


def test_every_message_type_has_a_sample_and_a_golden_frame() -> None:
    declared = {*get_args(AnyRequest), *get_args(AnyReply), *get_args(AnySessionMessage)}
    sampled = {type(message) for message in (*REQUESTS, *REPLIES, *PACKETS)}
    assert sampled == declared
    assert {path.stem for path in GOLDEN.glob("*.bin")} == {kind.__name__ for kind in declared}


def test_the_samples_set_every_field_to_something_else_than_its_default() -> None:
    for message in (*REQUESTS, *REPLIES, *PACKETS):
        for field in msgspec.structs.fields(type(message)):
            if field.name in ("deadline_ms", "extras") or field.required:
                continue
            value = getattr(message, field.name)
            assert value != field.default, f"{type(message).__name__}.{field.name}"


@pytest.mark.scenario("B171", then="unknown fields are ignored")
def test_a_newer_sender_may_add_fields() -> None:
    sent = {"type": "Match", "id": 3, "group": bytes(32), "keys": bytes(32), "added_later": [1, {"a": b""}]}
    assert decode_request(msgspec.msgpack.encode(sent)) == Match(id=3, group=bytes(32), keys=bytes(32))


def test_what_older_senders_send_is_understood() -> None:
    (acquire,) = (message for message in REQUESTS if isinstance(message, Acquire))
    frame = (GOLDEN / "older" / "Acquire.bin").read_bytes()
    assert decode_request(frame) == msgspec.structs.replace(acquire, name="", on_device=False)


def test_an_older_sender_may_leave_out_fields_that_have_defaults() -> None:
    assert decode_request(msgspec.msgpack.encode({"type": "Hello", "id": 3, "protocol": 1})) == Hello(id=3, protocol=1)
