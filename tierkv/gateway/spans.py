"""Between the bytes of a grant, as a tenant counts them, and slots of the arena.

    blocks of a grant   | block 0 | block 1 | block 2 |        one behind the other, without padding
    a span                    [start ..... end)                parts of blocks, whole blocks between

Copies are done before this returns, so nothing of ours touches a slot afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierkv.client.slots import Slots


def read_span(slots: Slots, start: int, num_bytes: int, copied: np.ndarray) -> np.ndarray:
    """Copy, then compare generations, then tell: the bytes from `start` on that are proven to be what was granted, up
    to the first block that is not. They are a part of `copied`, which the caller gives and may use again."""
    position = 0
    for block, begin, end in _parts(slots.block_bytes, start, num_bytes):
        offset = int(slots.offsets[block])
        copied[position : position + end - begin] = slots.readable[offset + begin : offset + end]
        position += end - begin
    first, last = start // slots.block_bytes, -(-(start + num_bytes) // slots.block_bytes)
    proven = (first + slots.count_valid(first, last)) * slots.block_bytes - start
    return copied[: min(num_bytes, max(0, proven))]


class Writing:
    """How far each block of a ticket has been written, from its first byte on."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._written = np.zeros(len(slots.offsets), np.int64)

    def find_hole(self, start: int, num_bytes: int) -> int | None:
        """The block, by its position in the ticket, in which a span would leave a hole behind what is written."""
        for block, begin, _end in _parts(self._slots.block_bytes, start, num_bytes):
            if begin > self._written[block]:
                return block
        return None

    def write(self, start: int, payload: bytes) -> None:
        """A span that leaves no hole."""
        source = np.frombuffer(payload, np.uint8)
        position = 0
        for block, begin, end in _parts(self._slots.block_bytes, start, len(payload)):
            offset = int(self._slots.offsets[block])
            self._slots.writable[offset + begin : offset + end] = source[position : position + end - begin]
            self._written[block] = max(int(self._written[block]), end)
            position += end - begin

    def find_unwritten(self) -> int | None:
        """The first block that is not whole; None when all are."""
        missing = np.flatnonzero(self._written < self._slots.block_bytes)
        return int(missing[0]) if len(missing) else None


def _parts(block_bytes: int, start: int, num_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(block, first byte in it, end in it) of each block that a span touches."""
    position, end = start, start + num_bytes
    while position < end:
        block, begin = divmod(position, block_bytes)
        until = min(block_bytes, begin + end - position)
        yield block, begin, until
        position += until - begin
