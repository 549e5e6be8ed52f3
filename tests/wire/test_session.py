"""Packets of the session socket."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import WireError
from tierkv.wire.session import MAX_PACKET_BYTES, SessionGrant, SessionHello, decode_packet, encode_packet


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(packet: bytes) -> None:
    with pytest.raises(WireError, match="malformed"):
        decode_packet(packet)


def test_a_packet_that_is_nested_too_deep_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        decode_packet(b"\x91" * MAX_PACKET_BYTES)


def test_a_token_has_sixteen_bytes() -> None:
    grant = SessionGrant(token=b"short", incarnation=1, endpoint="", arena_bytes=0, page_bytes=4096, data_dir="")
    with pytest.raises(WireError, match="token"):
        decode_packet(encode_packet(grant))


@pytest.mark.scenario("B171", then="unknown fields of session packets are ignored")
def test_fields_of_a_newer_side_are_ignored() -> None:
    packet = msgspec.msgpack.encode({"type": "SessionHello", "protocol": 1, "added_later": 5})
    assert decode_packet(packet) == SessionHello(protocol=1)
