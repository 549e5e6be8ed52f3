from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config.sizes import format_size, human_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("10GB", 10 * 10**9),
        ("1.5TB", 1_500_000_000_000),
        ("1.5KiB", 1536),
        ("4096", 4096),
        ("4096B", 4096),
        (" 1KB ", 1000),
        ("0", 0),
        (4096, 4096),
    ],
)
def test_a_size_is_read_exactly(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "",
            "GiB",
            "4 G",
            "4G",
            "4gib",
            "4Gib",
            "4GIB",
            "4Gbit",
            "4  GiB",
            "-1",
            "-1GiB",
            "+1GiB",
            "1e9",
            "nan",
            "inf",
        ),
        *("1,5GiB", "1_000", "0x10", "0.3KiB", "٤GiB", "4GiB\n5", "9" * 5000),
        *(True, 1.5, float("nan"), None, [1], b"4GiB", -1),
    ],
)
def test_what_is_no_size_is_refused_with_what_to_write(wrong):
    with pytest.raises(ValueError, match="write a size like"):
        parse_size(wrong)


@pytest.mark.parametrize(("wrong", "hint"), [("4gib", "GiB"), ("4G", "GiB or GB"), ("4k", "KiB or KB"), ("1mb", "MB")])
def test_a_unit_that_is_nearly_right_is_named(wrong, hint):
    with pytest.raises(ValueError, match=rf"do you mean {hint}\?"):
        parse_size(wrong)


@given(st.integers(min_value=0, max_value=2**63))
def test_a_written_size_is_read_back_without_loss(num_bytes):
    assert parse_size(format_size(num_bytes)) == num_bytes


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none()))
def test_anything_is_either_a_number_of_bytes_or_a_value_error(anything):
    try:
        num_bytes = parse_size(anything)
    except ValueError:
        return
    assert isinstance(num_bytes, int)
    assert num_bytes >= 0


def test_people_get_one_decimal():
    assert human_size(0) == "0 B"
    assert human_size(1023) == "1023 B"
    assert human_size(1536) == "1.5 KiB"
    assert human_size(24_684_096 * 1024) == "23.5 GiB"
    assert human_size(2 * 2**40) == "2.0 TiB"
