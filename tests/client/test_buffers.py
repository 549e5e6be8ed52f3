from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.client.buffers import as_rows, find_runs, slot_rows
from tierkv.errors import LayoutMismatch


def rows_of(buffer: object, *, blocks: int = 2, writable: bool = True) -> np.ndarray:
    return as_rows(buffer, name="destination", block_bytes=64, blocks=blocks, writable=writable)


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(128),
        memoryview(bytearray(128)),
        array("I", [0] * 32),
        np.zeros(128, np.uint8),
        np.zeros((2, 64), np.int8),
        np.zeros((2, 16), np.float32),
        np.zeros((2, 4, 4), np.float32),
        np.zeros((3, 80), np.uint8)[:, :64],
    ],
)
def test_a_buffer_of_the_right_size_becomes_rows_without_a_copy(buffer: object) -> None:
    rows = rows_of(buffer)
    assert rows.shape[1] == 64
    rows[1, 0] = 7
    assert np.asarray(memoryview(buffer) if not isinstance(buffer, np.ndarray) else buffer).view(np.uint8).max() == 7


@pytest.mark.parametrize(
    ("buffer", "problem"),
    [
        (bytes(128), "read-only"),
        (bytearray(64), "holds 1 blocks"),
        (np.zeros((64, 2), np.uint8).T, "contiguous"),
        (memoryview(bytearray(256))[::2], "contiguous"),
        (np.empty(2, object), "objects"),
        ("text", "neither a buffer"),
        (None, "neither a buffer"),
    ],
)
def test_a_buffer_that_does_not_do_is_refused_by_name(buffer: object, problem: str) -> None:
    with pytest.raises(ValueError, match=f"destination: .*{problem}"):
        rows_of(buffer)


@pytest.mark.parametrize("buffer", [bytearray(100), np.zeros((2, 17), np.float32), np.zeros((4, 32), np.uint8)])
def test_rows_that_are_no_blocks_are_a_layout_mismatch(buffer: object) -> None:
    with pytest.raises(LayoutMismatch, match=r"layout\.block_bytes"):
        rows_of(buffer)


def test_nothing_is_enough_for_no_block() -> None:
    assert len(rows_of(b"", blocks=0, writable=False)) == 0


@given(st.lists(st.integers(0, 40), unique=True, max_size=20), st.data())
def test_runs_cover_every_slot_once_and_in_order(slots: list[int], data: st.DataObject) -> None:
    blocks = np.cumsum(data.draw(st.lists(st.integers(1, 3), min_size=len(slots), max_size=len(slots))))
    offsets = np.array(slots, np.int64) * 8192
    runs = list(find_runs(blocks.astype(np.int64), offsets, 8192))
    assert [position for start, end in runs for position in range(start, end)] == list(range(len(slots)))
    for start, end in runs:
        assert (np.diff(offsets[start:end]) == 8192).all()
        assert (np.diff(blocks[start:end]) == 1).all()


def test_rows_of_slots_leave_out_the_padding() -> None:
    memory = np.arange(4 * 32, dtype=np.uint8)
    rows = slot_rows(memory, 32, 2, slot_bytes=32, block_bytes=20)
    assert rows.tolist() == [list(range(32, 52)), list(range(64, 84))]
