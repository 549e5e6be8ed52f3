"""Identity: every field counts, no two encode alike, and the encoding never changes by accident."""

from __future__ import annotations

import struct
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.identity_fields import changed, leaf_at, other_values, others, paths_of
from tierkv.core.identity import GROUP_KEY_BYTES, Identity, Layout, Parallel

PLAIN = Identity(
    weights="5e" * 32,
    config="c0ffee",
    layout=Layout(
        dtype="bfloat16", block_bytes=(4096, 512), axes="layer,kv,head,token,dim", block_tokens=16, engine="fake-1"
    ),
    adapter="ad",
    parallel=Parallel(tensor=2, pipeline=1, context=1, shards=2),
    salt="tenant-a",
    epoch="",
)


def variants(value: Any) -> list[Any]:
    """Other values of the same type, near ones first."""
    if isinstance(value, str):
        return [value + "0", value + "\0", "x" + value, value.upper() + "?"]
    if isinstance(value, int):
        return [value + 1, value + 256, -value - 1]
    assert isinstance(value, tuple)
    return [value[:-1], (*value, 0), value[::-1], (sum(value),), (value[0] + 1, *value[1:])]


def test_every_field_is_found_by_the_walk_over_the_types() -> None:
    assert {path[0] for path in paths_of(Identity)} == set(Identity.__struct_fields__)
    assert ("layout", "block_bytes") in paths_of(Identity)


def test_every_field_has_another_value_to_be_tried_with() -> None:
    assert set(other_values(PLAIN)) == set(paths_of(Identity))
    for path, other in others(PLAIN).items():
        assert leaf_at(other, path) != leaf_at(PLAIN, path), path
        assert other.layout.total_block_bytes == PLAIN.layout.total_block_bytes


@pytest.mark.parametrize("path", paths_of(Identity), ids=".".join)
def test_a_field_changed_alone_changes_the_group(path: tuple[str, ...]) -> None:
    value = leaf_at(PLAIN, path)
    others = [changed(PLAIN, path, leaf) for leaf in variants(value)]
    groups = {other.group_key() for other in others if isinstance(other, Identity)}
    assert PLAIN.group_key() not in groups
    assert len(groups) == len({repr(leaf_at(other, path)) for other in others})


def test_equal_total_bytes_in_another_split_are_another_group() -> None:
    layout = PLAIN.layout
    other = msgspec.structs.replace(layout, block_bytes=(layout.total_block_bytes,))
    assert other.total_block_bytes == layout.total_block_bytes
    assert msgspec.structs.replace(PLAIN, layout=other).group_key() != PLAIN.group_key()


@pytest.mark.scenario("B206", then="text that moves from one field to another, whole or in part, makes another group")
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"adapter": "x", "salt": ""}, {"adapter": "", "salt": "x"}),
        ({"salt": "ab", "adapter": "c"}, {"salt": "a", "adapter": "bc"}),
        ({"salt": "ab", "epoch": "c"}, {"salt": "a", "epoch": "bc"}),
        ({"weights": "ab", "config": ""}, {"weights": "", "config": "ab"}),
    ],
)
def test_text_moved_from_one_field_to_another_is_another_group(left: dict[str, str], right: dict[str, str]) -> None:
    assert (
        msgspec.structs.replace(PLAIN, **left).group_key()  # type: ignore[arg-type]
        != msgspec.structs.replace(PLAIN, **right).group_key()  # type: ignore[arg-type]
    )


@pytest.mark.scenario("B206", then="the tagged, length-framed encoding has a golden digest")
def test_the_group_key_is_what_it_was_in_every_release() -> None:
    assert len(PLAIN.group_key()) == GROUP_KEY_BYTES
    assert PLAIN.group_key().hex() == "7df7e581fb2e1b27b317dfcac7a76be847e203973d8cd6fab13531ba3683628a"
    bare = Identity(weights="", config="", layout=Layout("", (), "", 1, ""))
    assert bare.group_key().hex() == "2f4069c6750b826b4ca9dc9519a5728cbaf8699f35d3413f6073ee8cee4d2622"


# ---- injectivity: a decoder that knows only the docstring gives back what was encoded

texts = st.text(max_size=8)
numbers = st.integers(-(2**63), 2**63 - 1)
layouts = st.builds(
    Layout,
    dtype=texts,
    block_bytes=st.lists(numbers, max_size=3).map(tuple),
    axes=texts,
    block_tokens=numbers,
    engine=texts,
    codec=texts,
)
parallels = st.builds(Parallel, tensor=numbers, pipeline=numbers, context=numbers, shards=numbers)
identities = st.builds(
    Identity,
    weights=texts,
    config=texts,
    layout=layouts,
    adapter=texts,
    parallel=parallels,
    salt=texts,
    epoch=texts,
)


def decode_fields(raw: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    while raw:
        (name_length,) = struct.unpack_from("<H", raw)
        name = raw[2 : 2 + name_length].decode()
        kind, length = struct.unpack_from("<BQ", raw, 2 + name_length)
        start = 2 + name_length + 9
        body, raw = raw[start : start + length], raw[start + length :]
        assert len(body) == length
        assert name not in fields
        if kind == 1:
            fields[name] = body.decode()
        elif kind == 2:
            fields[name] = int.from_bytes(body, "little", signed=True)
        elif kind == 3:
            items = decode_fields(body)
            assert list(items) == [str(index) for index in range(len(items))]
            fields[name] = tuple(items.values())
        else:
            assert kind == 4
            fields[name] = decode_fields(body)
    return fields


@given(identities)
def test_an_identity_can_be_read_back_from_its_encoding_so_no_two_encode_alike(identity: Identity) -> None:
    magic = b"tierkv identity 1"
    encoded = identity.encode()
    assert encoded.startswith(magic)
    assert msgspec.convert(decode_fields(encoded[len(magic) :]), Identity) == identity


@given(identities, identities)
def test_different_identities_have_different_groups(left: Identity, right: Identity) -> None:
    assert (left.group_key() == right.group_key()) == (left == right)


def test_a_number_that_eight_bytes_cannot_hold_is_refused_rather_than_folded() -> None:
    with pytest.raises(struct.error):
        msgspec.structs.replace(PLAIN, parallel=Parallel(tensor=2**64 + 1)).encode()


def test_a_value_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(TypeError, match="identity can't hold"):
        msgspec.structs.replace(PLAIN, salt=1.5).encode()  # type: ignore[arg-type]


def test_only_a_group_without_epoch_outlives_the_engine() -> None:
    assert PLAIN.is_persistent
    assert not msgspec.structs.replace(PLAIN, epoch="e1").is_persistent


def test_unknown_fields_of_a_foreign_identity_are_refused_not_ignored() -> None:
    raw = msgspec.to_builtins(PLAIN) | {"temperature": 1}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, Identity)


def test_the_walk_over_the_types_knows_every_kind_of_leaf() -> None:
    kinds = {type(leaf_at(PLAIN, path)) for path in paths_of(Identity)}
    assert kinds == {str, int, tuple}
    assert get_args(get_type_hints(Layout)["block_bytes"]) == (int, ...)
