from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.golden_files import FOLDER, golden_samples, write_sample
from tests.storage.samples import BLOCK_TOKENS, FINGERPRINT, Sample
from tierkv.core.identity import Layout
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, UnknownFormat
from tierkv.storage.format import (
    ALIGN_BYTES,
    FIELDS,
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    PLAIN_VERSION,
    PREFIX_BYTES,
    READERS,
    Header,
    decode_header,
    decode_prefix,
    describe_layout,
    document,
    encode_header,
    file_bytes,
    frame_header,
    pack_header,
    pack_lengths,
    stored_bytes,
)

DOCS = Path(__file__).parents[2] / "docs" / "format.md"


def header(**changes: Any) -> Header:
    sample = Sample(num_blocks=2, extras={1: [b"media"]})
    fields: dict[str, Any] = {
        "group": sample.group,
        "fingerprint": FINGERPRINT,
        "rank": 0,
        "parent": sample.group,
        "first_token": 0,
        "block_tokens": BLOCK_TOKENS,
        "keys": sample.keys,
        "tokens": sample.tokens,
        "extras": sample.extras,
        "block_bytes": 4096,
        "dtype": "bfloat16",
        "layout": "engine=test",
        "codec": "",
        "checksums": bytes(64),
        "created": 1_700_000_000.25,
    }
    return Header(**(fields | changes))


HEADER = header()
ENCODED = encode_header(HEADER)
SMALLER = header(codec="planes2+zstd", lengths=pack_lengths([700, 8192]), stored_checksums=bytes(64), block_bytes=8192)


def forged(body: object, version: int = PLAIN_VERSION) -> bytes:
    """A header with a right checksum around any body."""
    return frame_header(msgspec.msgpack.encode(body), version)


def fields_of(header: Header) -> dict[str, Any]:
    """As they stand in the body."""
    raw = pack_header(header)
    found = msgspec.msgpack.decode(raw[PREFIX_BYTES : PREFIX_BYTES + decode_prefix(raw).body_bytes], strict=False)
    assert isinstance(found, dict)
    return found


# ---- round trip


def test_a_header_comes_back_as_it_was() -> None:
    assert decode_header(ENCODED) == HEADER
    assert len(ENCODED) % ALIGN_BYTES == 0
    assert decode_header(ENCODED + b"blocks") == HEADER


@st.composite
def headers(draw: st.DrawFn) -> Header:
    blocks = draw(st.integers(1, 5))
    block_tokens = draw(st.integers(1, 8))
    first = draw(st.sampled_from([0, block_tokens, 7 * block_tokens]))
    group = draw(st.binary(min_size=32, max_size=32))
    parent = group if not first else draw(st.binary(min_size=32, max_size=32).filter(lambda key: key != group))
    ids = st.integers(0, 2**32 - 1)
    tokens = pack_tokens(draw(st.lists(ids, min_size=blocks * block_tokens, max_size=blocks * block_tokens)))
    extra = st.lists(st.binary(max_size=40), min_size=1, max_size=3)
    extras = draw(st.dictionaries(st.integers(0, blocks - 1), extra, max_size=blocks))
    return header(
        group=group,
        rank=draw(st.integers(0, 65_535)),
        parent=parent,
        first_token=first,
        block_tokens=block_tokens,
        keys=chain_keys(parent, tokens, block_tokens, extras=extras),
        tokens=tokens,
        extras=extras,
        block_bytes=draw(st.integers(1, 2**34)),
        dtype=draw(st.text(max_size=20)),
        layout=draw(st.text(max_size=200)),
        checksums=draw(st.binary(min_size=32 * blocks, max_size=32 * blocks)),
        created=draw(st.floats(0, 1e12)),
    )


@given(headers())
def test_any_header_comes_back_as_it_was(made: Header) -> None:
    encoded = encode_header(made)
    assert decode_header(encoded) == made
    assert pack_header(made) == encoded


@given(headers(), st.data())
def test_random_damage_never_gives_a_wrong_header(made: Header, data: st.DataObject) -> None:
    raw = bytearray(encode_header(made))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_header(raw)
    except DamagedFile:
        return
    assert found == made  # two flips undid each other


@given(st.binary(max_size=200), st.integers(0, 100))
def test_any_bytes_are_read_or_refused(body: bytes, cut: int) -> None:
    for raw in (body, ENCODED[: PREFIX_BYTES + cut], frame_header(body, FORMAT_VERSION)):
        with pytest.raises(DamagedFile):
            decode_header(raw)


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-10, 10), inner),
    ),
    st.sampled_from([field.name for field in FIELDS]),
)
def test_a_field_of_any_content_is_read_or_refused(value: object, name: str) -> None:
    body = fields_of(HEADER) | {name: value}
    try:
        found = decode_header(forged(body))
    except (DamagedFile, UnknownFormat):
        return
    assert getattr(found, name) == value


# ---- damage


def test_each_byte_of_a_header_is_covered() -> None:
    for index in range(len(ENCODED)):
        raw = bytearray(ENCODED)
        raw[index] ^= 0x01
        with pytest.raises(DamagedFile):
            decode_header(raw)


@pytest.mark.parametrize("size", [0, 1, PREFIX_BYTES - 1, PREFIX_BYTES, ALIGN_BYTES - 1])
def test_a_header_that_ends_too_early_is_damaged(size: int) -> None:
    with pytest.raises(DamagedFile) as caught:
        decode_header(ENCODED[:size])
    assert caught.value.reason == Reason.SHORT_FILE


@pytest.mark.parametrize("header_bytes", [0, 1, 4095, 4097, MAX_HEADER_BYTES + 4096, 2**32 - 4096])
def test_no_length_is_believed_that_can_not_be(header_bytes: int) -> None:
    raw = bytearray(ENCODED)
    struct.pack_into("<I", raw, 12, header_bytes)
    with pytest.raises(DamagedFile, match="can't be"):
        decode_prefix(raw)


def test_bytes_behind_the_body_or_a_body_behind_the_header_are_damage() -> None:
    body = msgspec.msgpack.encode(HEADER)
    for num_bytes in (len(body) - 1, len(body) + 1, 2**32 - 1):
        raw = bytearray(ENCODED)
        struct.pack_into("<II32s", raw, 16, num_bytes, 0, b"")
        raw[PREFIX_BYTES - 32 : PREFIX_BYTES] = blake3(raw).digest()
        with pytest.raises(DamagedFile):
            decode_header(raw)


# ---- versions


def test_a_newer_version_with_a_right_checksum_is_left_alone() -> None:
    newer = frame_header(msgspec.msgpack.encode({"anything": 1}), FORMAT_VERSION + 1)
    with pytest.raises(UnknownFormat, match="format version 3; this program reads 1, 2"):
        decode_header(newer)


def test_a_damaged_version_is_damage_and_not_a_newer_file() -> None:
    raw = bytearray(ENCODED)
    struct.pack_into("<I", raw, 8, FORMAT_VERSION + 1)
    with pytest.raises(DamagedFile, match="checksum"):
        decode_header(raw)


@pytest.mark.parametrize("version", READERS)
def test_a_codec_of_later_is_left_alone(version: int) -> None:
    with pytest.raises(UnknownFormat, match="planes3"):
        decode_header(forged(header(codec="planes3+zstd"), version))


def test_the_current_version_and_at_most_the_one_before_are_read() -> None:
    assert FORMAT_VERSION in READERS
    assert set(READERS) <= {FORMAT_VERSION, FORMAT_VERSION - 1}


# ---- what must hold between fields


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": HEADER.keys[:-1]}, Reason.BAD_HEADER),
        ({"keys": b""}, Reason.BAD_HEADER),
        ({"keys": HEADER.keys[:KEY_BYTES]}, Reason.BAD_HEADER),
        ({"checksums": bytes(32)}, Reason.BAD_HEADER),
        ({"checksums": bytes(96)}, Reason.BAD_HEADER),
        ({"tokens": HEADER.tokens[:-4]}, Reason.BAD_HEADER),
        ({"tokens": HEADER.tokens + bytes(4)}, Reason.BAD_HEADER),
        ({"block_tokens": 0}, Reason.BAD_HEADER),
        ({"block_tokens": BLOCK_TOKENS - 1}, Reason.BAD_HEADER),
        ({"block_bytes": 0}, Reason.BAD_HEADER),
        ({"block_bytes": 2**40}, Reason.BAD_HEADER),
        ({"first_token": 3, "parent": bytes(32)}, Reason.BAD_HEADER),
        ({"first_token": BLOCK_TOKENS}, Reason.BAD_HEADER),
        ({"parent": bytes(32)}, Reason.BAD_HEADER),
        ({"parent": b"short"}, Reason.BAD_HEADER),
        ({"group": b"short"}, Reason.BAD_HEADER),
        ({"fingerprint": "../../etc"}, Reason.BAD_HEADER),
        ({"fingerprint": FINGERPRINT + "\n"}, Reason.BAD_HEADER),
        ({"rank": -1}, Reason.BAD_HEADER),
        ({"rank": 65_536}, Reason.BAD_HEADER),
        ({"extras": {2: [b"x"]}}, Reason.BAD_HEADER),
        ({"extras": {1: []}}, Reason.BAD_HEADER),
        ({"extras": {1: [bytes(5000)]}}, Reason.BAD_HEADER),
        ({"extras": {1: [b"other"]}}, Reason.KEY_MISMATCH),
        ({"extras": {}}, Reason.KEY_MISMATCH),
        ({"tokens": bytes(len(HEADER.tokens))}, Reason.KEY_MISMATCH),
        ({"keys": HEADER.keys[32:] + HEADER.keys[:32]}, Reason.KEY_MISMATCH),
        ({"created": math.inf}, Reason.BAD_HEADER),
        ({"created": math.nan}, Reason.BAD_HEADER),
        ({"created": -1.0}, Reason.BAD_HEADER),
    ],
)
def test_a_forged_header_that_contradicts_itself_is_damaged(changes: dict[str, Any], reason: Reason) -> None:
    made = header(**changes)
    with pytest.raises(DamagedFile) as caught:
        decode_header(pack_header(made))
    assert caught.value.reason == reason
    with pytest.raises(DamagedFile):
        encode_header(made)


@pytest.mark.parametrize("made", [HEADER, SMALLER], ids=["plain", "smaller"])
def test_a_missing_or_an_unknown_field_is_damage(made: Header) -> None:
    body, version = fields_of(made), decode_prefix(pack_header(made)).version
    for name in body:
        with pytest.raises(DamagedFile, match=name.removeprefix("stored_")):
            decode_header(forged({key: value for key, value in body.items() if key != name}, version))
    with pytest.raises(DamagedFile, match="surprise"):
        decode_header(forged(body | {"surprise": 1}, version))


def test_the_version_of_a_file_is_that_of_its_codec() -> None:
    assert decode_prefix(ENCODED).version == PLAIN_VERSION
    assert decode_prefix(encode_header(SMALLER)).version == FORMAT_VERSION
    assert decode_header(encode_header(SMALLER)) == SMALLER
    assert set(fields_of(SMALLER)) - set(fields_of(HEADER)) == {"lengths", "stored_checksums"}


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": b""},
        {"lengths": pack_lengths([700])},
        {"lengths": pack_lengths([700, 8192])[:-1]},
        {"lengths": pack_lengths([0, 700])},
        {"lengths": pack_lengths([4097, 700])},
        {"lengths": pack_lengths([8193, 700])},
        {"lengths": pack_lengths([2**64 - 1, 700])},
        {"stored_checksums": bytes(32)},
        {"stored_checksums": bytes(63) + b"x"},  # of a block that is stored as it is: it has one checksum
        {"checksums": bytes(96)},
    ],
)
def test_lengths_of_stored_blocks_that_contradict_the_rest_are_damage(changes: dict[str, Any]) -> None:
    made = msgspec.structs.replace(SMALLER, **changes)
    for refuse in (lambda: decode_header(pack_header(made)), lambda: encode_header(made)):
        with pytest.raises(DamagedFile) as caught:
            refuse()
        assert caught.value.reason == Reason.BAD_HEADER


def test_layouts_of_equal_size_read_differently() -> None:
    base = Layout(dtype="bfloat16", block_bytes=(64, 64), axes="a", block_tokens=16, engine="e")
    others = [
        msgspec.structs.replace(base, block_bytes=(128,)),
        msgspec.structs.replace(base, axes="b"),
        msgspec.structs.replace(base, engine="f"),
        msgspec.structs.replace(base, codec="fp8"),
    ]
    assert len({describe_layout(layout) for layout in [base, *others]}) == 5


# ---- sizes


@given(st.integers(1, 2**34), st.integers(1, 1000))
def test_stored_blocks_are_whole_pages_and_hold_their_block(block_bytes: int, num_blocks: int) -> None:
    stored = stored_bytes(block_bytes)
    assert stored % ALIGN_BYTES == 0
    assert block_bytes <= stored < block_bytes + ALIGN_BYTES
    assert file_bytes(num_blocks, block_bytes, 8192) == 8192 + num_blocks * stored


# ---- golden files and documentation


@pytest.mark.parametrize("name", sorted(golden_samples()))
def test_todays_writer_makes_the_golden_files_byte_for_byte(name: str) -> None:
    assert write_sample(golden_samples()[name]) == (FOLDER / name).read_bytes()


@pytest.mark.parametrize("name", sorted(golden_samples()))
def test_the_golden_files_are_read(name: str) -> None:
    sample = golden_samples()[name]
    raw = (FOLDER / name).read_bytes()
    found = decode_header(raw)
    assert found.created == 1_700_000_000.25
    assert (found.keys, found.tokens, found.extras) == (sample.keys, sample.tokens, sample.extras)
    start = decode_prefix(raw).header_bytes
    for index, block in enumerate(sample.blocks):
        stored = raw[start + index * sample.slot_bytes : start + (index + 1) * sample.slot_bytes]
        assert stored == block + bytes(sample.slot_bytes - sample.block_bytes)


def test_every_golden_file_has_its_sample() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(golden_samples())


def test_the_documentation_is_generated_and_names_every_field() -> None:
    assert DOCS.read_text() == document()
    for field in FIELDS:
        assert f"| `{field.name}` | {field.type} |" in document()
