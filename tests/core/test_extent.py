"""What an extent says about itself: lengths, holds, recency, whether it can be reached."""

from __future__ import annotations

import sys

import pytest

from tierkv.core.extent import Branch, Extent, Growth
from tierkv.core.keys import chain_keys, key_at, pack_tokens
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.value.tuning import AS_MEASURED
from tierkv.errors import BrokenInvariant

GROUP = b"g" * 32
KEYS = chain_keys(GROUP, pack_tokens([1, 2, 3, 4]), 1)


def extent_of(blocks: int, *, ranks: int = 1, parent: bytes = GROUP) -> Extent:
    extent = Extent(group=GROUP, key=key_at(KEYS, 0), parent=parent, first_token=0, ranks=ranks, created=10.0)
    extent.keys, extent.num_blocks = KEYS[: blocks * 32], blocks
    return extent


def test_blocks_are_in_host_memory_as_far_as_every_rank_has_them() -> None:
    extent = extent_of(4, ranks=3)
    extent.slots = [[0, 1, 2], [3], [4, 5]]
    assert (extent.host_blocks, extent.longest_host_blocks) == (1, 3)


def test_the_deepest_hold_counts() -> None:
    extent = extent_of(4)
    assert extent.held_blocks == 0
    extent.holds = {"a lease": 1, ("read", 7): 3}
    assert extent.held_blocks == 3


def test_a_block_s_key_is_found_by_its_place() -> None:
    assert [extent_of(4).block_key(index) for index in range(4)] == [key_at(KEYS, index) for index in range(4)]


def test_an_extent_is_an_orphan_while_nobody_has_its_parent_block() -> None:
    assert not extent_of(1).is_orphan
    extent = extent_of(1, parent=b"p" * 32)
    assert extent.is_orphan
    extent.above = Branch()
    assert extent.is_orphan
    extent.above.owner = extent_of(1)
    assert not extent.is_orphan


def test_a_hit_warms_as_far_as_it_reached() -> None:
    extent = extent_of(4)
    extent.touch(4, 20.0, AS_MEASURED)
    assert (extent.last_used, extent.hot_blocks, extent.tail_used, extent.hits) == (20.0, 4, 20.0, 1)
    extent.touch(2, 30.0, AS_MEASURED)  # blocks 2 and 3 were last used at 20
    assert (extent.last_used, extent.hot_blocks, extent.tail_used, extent.hits) == (30.0, 2, 20.0, 2)
    extent.touch(3, 40.0, AS_MEASURED)  # block 3 still at 20
    assert (extent.last_used, extent.hot_blocks, extent.tail_used, extent.hits) == (40.0, 3, 20.0, 3)


def test_a_move_that_is_not_in_the_table_names_the_extent() -> None:
    extent = extent_of(2)
    extent.move(FileEvent.ADMIT)
    assert extent.nvme is FileState.QUEUED
    with pytest.raises(BrokenInvariant, match=f"{extent.key[:4].hex()}.*2 blocks, growing"):
        extent.move(FileEvent.FLUSHED)


def test_a_growing_extent_remembers_its_longest_pause() -> None:
    growth = Growth(10.0)
    for now in (12.0, 19.0, 18.0, 21.0):
        growth.appended(now)
    assert (growth.last_append, growth.longest_gap) == (21.0, 7.0)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="sizes are CPython's")
def test_an_extent_is_small_enough_for_a_million_of_them_in_one_gibibyte() -> None:
    """Itself; keys and its place in the tree take 770 bytes more, as the benchmark measures, and the next slot 16."""
    assert sys.getsizeof(extent_of(8)) <= 288
