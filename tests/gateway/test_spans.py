"""Bytes as a tenant counts them, and slots in the arena: any span, any block size, never a byte of another slot."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.client.slots import Slots
from tierkv.gateway.spans import Writing, read_span

PAGE = 16


def slots_of(block_bytes: int, places: list[int]) -> Slots:
    """Slots of an arena of our own, with generation 5 each; `places` are their numbers, in units of a slot."""
    slots = Slots.__new__(Slots)
    slots.block_bytes = block_bytes
    slots.slot_bytes = -(-block_bytes // PAGE) * PAGE
    slots.offsets = np.array(places, np.int64) * slots.slot_bytes
    size = (max(places) + 1) * slots.slot_bytes
    slots.writable = slots.readable = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    slots._current = np.full(size // PAGE, 5, "<u8")
    slots._granted = np.full(len(places), 5, "<u8").tobytes()
    slots._page_bytes = PAGE
    slots._pid = os.getpid()
    return slots


def whole(slots: Slots) -> bytes:
    return b"".join(slots.readable[offset : offset + slots.block_bytes].tobytes() for offset in slots.offsets)


def read(slots: Slots, start: int, num_bytes: int) -> bytes:
    return read_span(slots, start, num_bytes, np.full(500, 0xEE, np.uint8)).tobytes()


SHAPES = st.tuples(st.integers(1, 40), st.permutations(range(6)).map(lambda order: order[:4]))


@settings(deadline=None)
@given(SHAPES, st.data())
def test_any_span_of_a_lease_is_the_same_part_of_its_blocks_one_behind_the_other(
    shape: tuple[int, list[int]], data: st.DataObject
) -> None:
    slots = slots_of(*shape)
    expected = whole(slots)
    start = data.draw(st.integers(0, len(expected) - 1))
    num_bytes = data.draw(st.integers(1, len(expected) - start))
    assert read(slots, start, num_bytes) == expected[start : start + num_bytes]


@settings(deadline=None)
@given(SHAPES, st.integers(0, 3), st.data())
def test_nothing_is_told_of_a_block_whose_slot_was_taken_away_nor_of_what_lies_behind(
    shape: tuple[int, list[int]], gone: int, data: st.DataObject
) -> None:
    slots = slots_of(*shape)
    expected = whole(slots)
    slots._current[int(slots.offsets[gone]) // PAGE] += 1
    start = data.draw(st.integers(0, len(expected) - 1))
    num_bytes = data.draw(st.integers(1, len(expected) - start))
    end = start + num_bytes
    touched = start // slots.block_bytes <= gone < -(-end // slots.block_bytes)
    proven = max(start, gone * slots.block_bytes) if touched else end
    assert read(slots, start, num_bytes) == expected[start:proven]


@settings(deadline=None)
@given(SHAPES, st.data())
def test_what_was_put_in_any_pieces_is_whole_only_when_every_byte_came(
    shape: tuple[int, list[int]], data: st.DataObject
) -> None:
    slots = slots_of(*shape)
    before = slots.readable.copy()
    payload = np.random.default_rng(2).integers(0, 256, len(whole(slots)), dtype=np.uint8).tobytes()
    writing = Writing(slots)
    position = 0
    while position < len(payload):
        assert writing.find_unwritten() == position // slots.block_bytes
        start = data.draw(st.integers(0, position))  # parts may come again
        end = data.draw(st.integers(position + 1, len(payload)))
        assert writing.find_hole(start, end - start) is None
        writing.write(start, payload[start:end])
        position = end
    assert writing.find_unwritten() is None
    assert whole(slots) == payload
    others = np.ones(len(before), bool)
    for offset in slots.offsets:
        others[offset : offset + slots.block_bytes] = False
    assert (slots.readable[others] == before[others]).all(), "a byte outside of the ticket's blocks was written"


@settings(deadline=None)
@given(SHAPES, st.integers(0, 3), st.data())
def test_a_block_that_is_not_begun_at_its_first_byte_is_a_hole(
    shape: tuple[int, list[int]], block: int, data: st.DataObject
) -> None:
    block_bytes = shape[0]
    if block_bytes < 2:
        return
    writing = Writing(slots_of(*shape))
    written = data.draw(st.integers(0, block_bytes - 2))
    if written:
        writing.write(block * block_bytes, bytes(written))
    start = data.draw(st.integers(written + 1, block_bytes - 1))
    assert writing.find_hole(block * block_bytes + start, 1) == block
