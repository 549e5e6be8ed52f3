from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.storage.names import MAX_RANK, ExtentName, group_parts, model_parts

FINGERPRINT = "0f" * 32
GROUP = bytes(range(32))
KEY = bytes(range(100, 132))
NAME = ExtentName(FINGERPRINT, GROUP, 3, KEY)


def test_a_name_is_made_of_digests_and_lies_in_a_folder_of_two_digits() -> None:
    assert str(NAME) == f"models/{FINGERPRINT}/{GROUP.hex()}/3/64/{KEY.hex()}.kv"
    assert NAME.folder == NAME.parts[:-1]


@pytest.mark.scenario("B205", then="a path leads back to the one extent that it names")
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32), st.integers(0, MAX_RANK))
def test_every_name_is_found_again_and_no_two_share_a_path(group: bytes, key: bytes, rank: int) -> None:
    name = ExtentName(FINGERPRINT, group, rank, key)
    assert ExtentName.parse(name.parts) == name


def test_a_name_is_found_again_from_its_path() -> None:
    assert ExtentName.parse(NAME.parts) == NAME


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (0, "model"),
        (1, "0F" * 32),
        (1, "0f" * 31),
        (1, FINGERPRINT + "\n"),
        (2, ".."),
        (3, "03"),
        (3, "-1"),
        (3, "65536"),
        (3, "99999999"),
        (4, "65"),
        (4, ""),
        (5, KEY.hex()),
        (5, KEY.hex() + ".tmp"),
        (5, KEY.hex().upper() + ".kv"),
        (5, "notes.txt"),
    ],
)
def test_what_tierkv_would_not_have_named_so_is_no_name(index: int, text: str) -> None:
    parts = list(NAME.parts)
    parts[index] = text
    assert ExtentName.parse(parts) is None


def test_a_path_of_another_depth_is_no_name() -> None:
    assert ExtentName.parse(NAME.parts[:-1]) is None
    assert ExtentName.parse((*NAME.parts, "x")) is None


@pytest.mark.scenario("B205", then="a path is made of digests alone: a name with separators or dots is refused")
@pytest.mark.parametrize(
    "fingerprint", ["../x", "/etc/x", "a/../../x", "a\0b", "..", "", "CON", "x" * 5000, "\u00e4" * 64]
)
def test_no_text_from_outside_becomes_a_path(fingerprint: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        ExtentName(fingerprint, GROUP, 0, KEY)
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        model_parts(fingerprint)


@pytest.mark.parametrize(
    ("group", "rank", "key"), [(b"x", 0, KEY), (GROUP, 0, b""), (GROUP, -1, KEY), (GROUP, 65_536, KEY)]
)
def test_digests_of_another_length_and_ranks_out_of_range_are_refused(group: bytes, rank: int, key: bytes) -> None:
    with pytest.raises(ValueError, match=r"32 bytes|rank"):
        ExtentName(FINGERPRINT, group, rank, key)


def test_a_group_is_a_digest_too() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        group_parts(FINGERPRINT, b"..")
