from __future__ import annotations

import pytest

from tests.replay.small import BLOCK_BYTES, trace_of
from tierkv.replay.capacity import Capacity

TRACE = trace_of("abcdefghij", "klmnopqrst")  # 20 blocks


@pytest.mark.parametrize(("text", "blocks"), [("10%", 2), ("12.5 %", 2), ("100%", 20), ("200%", 40)])
def test_a_share_is_of_all_distinct_blocks(text: str, blocks: int) -> None:
    assert Capacity.parse(text).bytes_of(TRACE) == blocks * BLOCK_BYTES


def test_a_size_is_rounded_down_to_whole_blocks() -> None:
    capacity = Capacity.parse("10000B")
    assert capacity.bytes_of(TRACE) == 2 * BLOCK_BYTES
    assert capacity.share is None


@pytest.mark.parametrize("text", ["", "x", "-3%", "0%", "0", "3%%", "4G", "nan%"])
def test_what_is_no_capacity_says_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="3%"):
        Capacity.parse(text)
