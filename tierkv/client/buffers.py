"""Checks of an engine's buffers, and views of the arena's slots as rows of blocks.

arena      | slot | slot |  ....  | slot |     a slot is a block, padded to whole pages
run        [ first block, ..., ]  neighbours in the prompt whose slots are neighbours too: one copy
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tierkv.errors import LayoutMismatch


@runtime_checkable
class BlockWriter(Protocol):
    """A destination that puts blocks where it wants them. `blocks` is a read-only view [n, block_bytes] of the arena,
    valid during the call, and unproven until `copy_into` has returned: nothing may consume what came from it before.
    """

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None: ...


@runtime_checkable
class BlockReader(Protocol):
    """A source that fills blocks itself. `blocks` is a writable view [n, block_bytes] of the arena, valid during the
    call; every byte of it is to be written when the call returns."""

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None: ...


def as_rows(buffer: Any, *, name: str, block_bytes: int, blocks: int, writable: bool) -> np.ndarray:
    """`buffer` as uint8 [n >= blocks, block_bytes], without a copy. Raises LayoutMismatch where a row is not a block,
    ValueError where it is too small, not writable or not contiguous."""
    array = _as_array(buffer, name)
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: read-only")
    rows = _rows(array, name, block_bytes)
    if len(rows) < blocks:
        raise ValueError(f"{name}: holds {len(rows)} blocks of {block_bytes} bytes, {blocks} are needed")
    return rows


def _as_array(buffer: Any, name: str) -> np.ndarray:
    if isinstance(buffer, np.ndarray):
        if buffer.dtype.hasobject:
            raise ValueError(f"{name}: an array of Python objects has no bytes of its own")
        return buffer
    try:
        view = memoryview(buffer)
    except TypeError as refusal:
        raise ValueError(f"{name}: neither a buffer nor an object that moves blocks: {refusal}") from refusal
    if not view.c_contiguous:
        raise ValueError(f"{name}: not contiguous")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view.cast("B"), np.uint8)


def _rows(array: np.ndarray, name: str, block_bytes: int) -> np.ndarray:
    if array.ndim == 2 and array.itemsize == 1 and array.shape[1] == block_bytes and array.strides[1] == 1:
        return array.view(np.uint8)  # rows may lie apart
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: not contiguous, and not rows of {block_bytes} bytes")
    if array.ndim > 1 and array.nbytes != array.shape[0] * block_bytes:
        per_row = array.nbytes // max(1, array.shape[0])
        raise LayoutMismatch("block_bytes", block_bytes, f"{per_row} in each row of {name}, {array.dtype}{array.shape}")
    if array.nbytes % block_bytes:
        raise LayoutMismatch("block_bytes", block_bytes, f"{array.nbytes} bytes in {name}, no whole number of blocks")
    return array.reshape(-1).view(np.uint8).reshape(-1, block_bytes)


def find_runs(blocks: np.ndarray, offsets: np.ndarray, slot_bytes: int) -> Iterator[tuple[int, int]]:
    """[start, end) positions in `blocks` and `offsets` of what can be moved as one."""
    if not len(offsets):
        return
    if _is_ladder(offsets, slot_bytes) and _is_ladder(blocks, 1):
        yield 0, len(offsets)
        return
    apart = (offsets[1:] - offsets[:-1] != slot_bytes) | (blocks[1:] - blocks[:-1] != 1)
    borders = [0, *(apart.nonzero()[0] + 1).tolist(), len(offsets)]
    yield from pairwise(borders)


def _is_ladder(values: np.ndarray, step: int) -> bool:
    """Whether each is `step` more than the one before."""
    first = int(values[0])
    expected = np.arange(first, first + len(values) * step, step, dtype=values.dtype)
    return values.tobytes() == expected.tobytes()


def slot_rows(memory: np.ndarray, offset: int, count: int, *, slot_bytes: int, block_bytes: int) -> np.ndarray:
    """`count` neighbouring slots from `offset` on, as rows without their padding."""
    return memory[offset : offset + count * slot_bytes].reshape(count, slot_bytes)[:, :block_bytes]
