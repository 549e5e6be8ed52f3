"""Any bytes give a message or a typed error."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire.samples import REPLIES, REQUESTS
from tierkv.errors import WireError
from tierkv.wire.frames import Malformed, decode_reply, decode_request, encode
from tierkv.wire.messages import (
    MAX_BLOCKS,
    MAX_FRAME_BYTES,
    MAX_PREFILL_SAMPLES,
    Error,
    ErrorCode,
    Match,
    Reserve,
    StatusReply,
    UsageReply,
)

pack = msgspec.msgpack.encode
MATCH: dict[str, Any] = {"type": "Match", "id": 7, "group": bytes(32), "keys": bytes(64)}


def error_of(frame: bytes) -> Error:
    answer = decode_request(frame)
    assert isinstance(answer, Malformed), f"taken for {answer}"
    return answer.error


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 100_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"GET / HTTP/1.1\r\n\r\n")
def test_any_bytes_are_answered(frame: bytes) -> None:
    assert isinstance(decode_request(frame), Malformed)
    assert isinstance(decode_reply(frame), Malformed)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([*REQUESTS, *REPLIES]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 10_000),
)
def test_a_damaged_message_is_a_message_or_a_typed_error(message: Any, changes: list[Any], cut: int) -> None:
    damaged = bytearray(encode(message))
    for at, value in changes:
        damaged[at % len(damaged)] = value
    frame = bytes(damaged[: len(damaged) - cut % len(damaged) if cut % 3 == 0 else len(damaged)])
    for decoded in (decode_request(frame), decode_reply(frame)):
        assert isinstance(decoded, Malformed | msgspec.Struct)


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(REQUESTS), st.dictionaries(st.integers(0, 20), _values, max_size=4))
def test_well_formed_nonsense_is_a_message_or_a_typed_error(message: Any, changes: dict[int, Any]) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    names = sorted(fields)
    for at, value in changes.items():
        fields[names[at % len(names)]] = value
    assert isinstance(decode_request(pack(fields)), Malformed | msgspec.Struct)


@pytest.mark.scenario("B171", then="an unknown type is answered with an error that names it")
def test_an_unknown_type_is_named_and_answered_under_its_id() -> None:
    error = error_of(pack({"type": "Frobnicate", "id": 9}))
    assert (error.id, error.code) == (9, ErrorCode.UNKNOWN_MESSAGE)
    assert "Frobnicate" in error.problem


def test_a_reply_is_no_request() -> None:
    assert error_of(pack({"type": "Done", "id": 9})).code == ErrorCode.UNKNOWN_MESSAGE


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"group": bytes(31)}, "group"),
        ({"group": "text"}, "group"),
        ({"keys": bytes(33)}, "keys"),
        ({"keys": bytes(32 * MAX_BLOCKS + 32)}, "keys"),
        ({"keys": 5}, "keys"),
        ({"session": bytes(17)}, "session"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"deadline_ms": 600_001}, "deadline_ms"),
    ],
)
def test_a_value_outside_of_its_limits_names_the_field(change: dict[str, Any], field: str) -> None:
    error = error_of(pack(MATCH | change))
    assert (error.id, error.code, error.field) == (7, ErrorCode.INVALID, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": float("inf")}, "seconds"),
        ({"seconds": -0.5}, "seconds"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": 1e9}, "seconds"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 2**62}, "tokens"),
        ({"first_token": -1}, "first_token"),
        ({"first_token": 2**62}, "first_token"),
    ],
)
def test_a_time_that_no_engine_can_have_needed_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    sample = {"tokens": 2_048, "first_token": 0, "seconds": 0.5} | change
    report = {"type": "ReportPrefill", "id": 7, "group": bytes(32), "samples": [sample]}
    error = error_of(pack(report))
    assert (error.id, error.code, error.field) == (7, ErrorCode.INVALID, f"samples[0].{field}")


@pytest.mark.parametrize("count", [0, MAX_PREFILL_SAMPLES + 1])
def test_a_report_has_a_few_samples(count: int) -> None:
    sample = {"tokens": 2_048, "first_token": 0, "seconds": 0.5}
    report = {"type": "ReportPrefill", "id": 7, "group": bytes(32), "samples": [sample] * count}
    assert error_of(pack(report)).field == "samples"


def test_a_missing_field_is_named() -> None:
    error = error_of(pack({"type": "Match", "id": 7, "keys": b""}))
    assert (error.code, error.field) == (ErrorCode.INVALID, "group")


def test_a_field_deep_inside_is_named() -> None:
    fields = msgspec.msgpack.decode(encode(REQUESTS[1]))
    fields["identity"]["layout"]["block_tokens"] = "sixteen"
    assert error_of(pack(fields)).field == "identity.layout.block_tokens"


@pytest.mark.parametrize("bad_id", [-1, 2**63, "one", None, 1.5])
def test_an_id_that_is_none_is_answered_under_zero(bad_id: Any) -> None:
    error = error_of(pack(MATCH | {"id": bad_id}))
    assert (error.id, error.code, error.field) == (0, ErrorCode.INVALID, "id")


def test_what_is_no_map_is_malformed() -> None:
    for value in (5, [MATCH], "Match", None, {"type": 4, "id": 7}):
        assert error_of(pack(value)).code == ErrorCode.MALFORMED


def test_a_frame_that_was_cut_is_malformed() -> None:
    frame = pack(MATCH)
    for length in range(len(frame)):
        assert error_of(frame[:length]).code == ErrorCode.MALFORMED


@pytest.mark.scenario("B168", then="a frame at the limit is read, one above it is too_large")
def test_limits_of_a_frame_are_exact() -> None:
    def request(token_bytes: int, holder_bytes: int) -> Reserve:
        zeros = bytes(holder_bytes)  # tokens come in fours of bytes; this fills up what they leave
        return Reserve(
            id=1, grant=bytes(16), group=bytes(32), keys=b"", first=0, tokens=bytes(token_bytes), holder=zeros
        )

    left = MAX_FRAME_BYTES - (len(encode(request(70_000, 0))) - 70_000)
    fits = request(left - left % 4, left % 4)
    assert len(encode(fits)) == MAX_FRAME_BYTES
    assert decode_request(encode(fits)) == fits
    error = error_of(encode(fits) + b"\x00")
    assert error.code == ErrorCode.TOO_LARGE
    assert str(MAX_FRAME_BYTES) in error.problem


def test_a_request_that_is_too_large_is_not_encoded() -> None:
    large = Reserve(id=1, grant=bytes(16), group=bytes(32), keys=b"", first=0, tokens=bytes(MAX_FRAME_BYTES))
    with pytest.raises(WireError, match="Reserve"):
        encode(large)


def test_a_reply_that_is_too_large_becomes_an_error_with_its_id() -> None:
    sample = next(reply for reply in REPLIES if isinstance(reply, StatusReply))
    large = msgspec.structs.replace(sample, id=33, problems=("x" * MAX_FRAME_BYTES,))
    answer = decode_reply(encode(large))
    assert isinstance(answer, Error)
    assert (answer.id, answer.code) == (33, ErrorCode.TOO_LARGE)


@pytest.mark.scenario("B168", then="a declared gigabyte costs no memory")
def test_a_declared_gigabyte_costs_no_memory() -> None:
    head = b"\x84" + pack("type") + pack("Reserve") + pack("id") + pack(1)
    frames = [
        head + pack("tokens") + b"\xc6\x40\x00\x00\x00",  # bytes
        head + pack("extras") + b"\xdf\x40\x00\x00\x00",  # map
        head + pack("extras") + b"\x81\x01\xdd\x40\x00\x00\x00",  # list
        head + pack("unknown") + b"\xdd\x40\x00\x00\x00",
    ]
    tracemalloc.start()
    try:
        for frame in frames:
            assert isinstance(decode_request(frame), Malformed)
        _now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_a_problem_quotes_no_more_than_a_little_of_the_frame() -> None:
    error = error_of(pack({"type": "Seal", "id": 1, "group": bytes(32), "keys": b"", "wait": "y" * 100_000}))
    assert error.field == "wait"
    assert len(encode(error)) < 1_000


def test_replies_are_checked_as_requests_are() -> None:
    reply = next(reply for reply in REPLIES if isinstance(reply, UsageReply))
    assert decode_reply(encode(reply)) == reply
    for frame in (
        {"type": "MatchReply", "id": 1, "blocks": 1, "host_blocks": 2},
        {"type": "AcquireReply", "id": 1, "blocks": 2, "nvme_blocks": 0, "cached_blocks": 2, "parts": [[0, b"", b""]]},
        {"type": "ReserveReply", "id": 1, "states": b"\x00\x01", "offsets": b"", "generations": b""},
    ):
        answer = decode_reply(pack(frame))
        assert isinstance(answer, Malformed)
        assert answer.error.id == 1


def test_what_can_be_built_can_be_sent() -> None:
    """The same checks stand at construction."""
    with pytest.raises(ValueError, match="keys"):
        Match(id=1, group=bytes(32), keys=bytes(31))
    with pytest.raises(ValueError, match="first"):
        Reserve(id=1, grant=bytes(16), group=bytes(32), keys=bytes(32), first=2, tokens=b"")
