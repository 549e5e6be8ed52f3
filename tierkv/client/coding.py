"""Blocks of a coded group on their way between slots and an engine's memory: the slots hold coded blocks, and the
engine sees raw ones, whether it gives rows (uint8 [blocks, raw_block_bytes]) or moves them by itself (BlockWriter,
BlockReader). Those get and fill a few raw blocks at a time, in memory of ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierkv.client.buffers import BlockReader, BlockWriter
from tierkv.core.codec import BlockCodec

STAGING_BYTES = 4 << 20
"""So much raw memory, or one block, is between us and an engine that moves blocks by itself."""


class Decoding:
    """A destination of coded blocks, in whatever order, which go on raw to `destination`: row 0 is block 0 where it is
    rows."""

    def __init__(self, codec: BlockCodec, destination: np.ndarray | BlockWriter) -> None:
        self.codec = codec
        self._raw_bytes = sum(codec.raw_bytes)
        self.destination = destination
        self.first_bad: int | None = None  # what no coding makes; what lies behind it may hold anything

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        if isinstance(self.destination, np.ndarray):
            right = self.codec.decode(blocks, self.destination[first_block : first_block + len(blocks)])
            self._note(first_block, right, len(blocks))
            return
        for begin, raw in _staged(len(blocks), self._raw_bytes):
            right = self.codec.decode(blocks[begin : begin + len(raw)], raw)
            if right:
                told = raw[:right]
                told.flags.writeable = False
                self.destination.write_blocks(first_block + begin, told)
            if self._note(first_block + begin, right, len(raw)):
                return

    def note(self, blocks: np.ndarray, right: np.ndarray) -> None:
        """Which of these blocks are right, where something else has decoded them."""
        for bad in blocks[~right].tolist():
            self._note(bad, 0, 1)

    def count_right(self, blocks: int) -> int:
        """Of so many proven blocks, how many are right."""
        return blocks if self.first_bad is None else min(blocks, self.first_bad)

    def _note(self, first_block: int, right: int, count: int) -> bool:
        bad = first_block + right
        if right < count and (self.first_bad is None or bad < self.first_bad):
            self.first_bad = bad
        return right < count


class Encoding:
    """A source of coded blocks, which are made of the raw ones of `source`: `first_block` is its row 0 where it is
    rows."""

    def __init__(self, codec: BlockCodec, source: np.ndarray | BlockReader, first_block: int) -> None:
        self.codec = codec
        self._raw_bytes = sum(codec.raw_bytes)
        self.source = source
        self._first_block = first_block
        self.refused: int | None = None  # one that holds a number that is not finite

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        if isinstance(self.source, np.ndarray):
            begin = first_block - self._first_block
            self._code(first_block, self.source[begin : begin + len(blocks)], blocks)
            return
        for begin, raw in _staged(len(blocks), self._raw_bytes):
            self.source.read_blocks(first_block + begin, raw)
            if not self._code(first_block + begin, raw, blocks[begin : begin + len(raw)]):
                return

    def note(self, blocks: np.ndarray, coded: np.ndarray) -> None:
        """Which of these blocks could be coded, where something else has coded them."""
        bad = blocks[~coded]
        if len(bad):
            first = int(bad.min())
            self.refused = first if self.refused is None else min(self.refused, first)

    def _code(self, first_block: int, raw: np.ndarray, blocks: np.ndarray) -> bool:
        coded = self.codec.encode(raw, blocks)
        if coded < len(blocks):
            self.refused = first_block + coded
        return coded == len(blocks)


def _staged(count: int, raw_bytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first, writable rows) for `count` blocks, in the same memory again and again."""
    memory = np.empty((min(count, max(1, STAGING_BYTES // raw_bytes)), raw_bytes), np.uint8)
    for begin in range(0, count, max(1, len(memory))):
        yield begin, memory[: min(len(memory), count - begin)]
