"""Blocks of a coded group between an engine's pages and slots: what is looked at before, and how numpy does it.

    encode   pages -> raw rows -> coded rows -> slots          decode   slots -> coded rows -> raw rows -> pages

A raw block is the parts of its page groups, one behind the other. Every block has a verdict of its own, which is known
when the copy has completed, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tierkv.core.codec import NUMBERS_ALIGNMENT, BlockCodec
from tierkv.device import reference
from tierkv.device.checks import Memory, check_alike, check_pages, check_slots
from tierkv.device.layouts import PagedLayout

Parts = Sequence[tuple[PagedLayout, Sequence[int]]]
"""Of each page group its layout, and the page of each block; a negative one where it has none."""

STAGED_BYTES = 4 * 2**20
"""So much raw memory, or one block, is between pages and slots."""


def check_coding(
    what: str, codec: BlockCodec, parts: Parts, memory: Memory, offsets: Sequence[int], *, needs_pages: bool
) -> None:
    """Raises ValueError, before anything is touched."""
    raw_bytes = sum(layout.block_bytes for layout, _pages in parts)
    if raw_bytes != sum(codec.raw_bytes):
        raise ValueError(f"{what}: the pages have {raw_bytes} bytes a block, the codec's raw ones {codec.raw_bytes}")
    check_slots(what, memory, offsets, sum(codec.block_bytes))
    if any(offset % NUMBERS_ALIGNMENT for offset in offsets):  # a GPU that reads a scale elsewhere ends its process
        raise ValueError(f"{what}: slots that do not begin at multiples of {NUMBERS_ALIGNMENT} bytes")
    for layout, pages in parts:
        check_alike(pages, offsets)
        check_pages(layout, pages if needs_pages else [page for page in pages if page >= 0])


def encode(codec: BlockCodec, parts: Parts, slots: np.ndarray, offsets: Sequence[int], good: np.ndarray) -> None:
    """Block i into `slots` (bytes) at offsets[i]; `good[i]` tells whether it could be coded."""
    coded_bytes = sum(codec.block_bytes)
    for begin, rows in _staged(codec, len(offsets)):
        count = len(rows)
        places = [row * rows.shape[1] for row in range(count)]
        at = 0
        for layout, pages in parts:
            reference.gather(layout, pages[begin : begin + count], rows.reshape(-1), [place + at for place in places])
            at += layout.block_bytes
        for row, offset in enumerate(offsets[begin : begin + count]):
            slot = slots[offset : offset + coded_bytes]
            good[begin + row] = codec.encode(rows[row : row + 1], slot[None]) == 1


def decode(codec: BlockCodec, slots: np.ndarray, offsets: Sequence[int], parts: Parts, good: np.ndarray) -> None:
    """Block i from `slots` at offsets[i] to its pages; `good[i]` tells whether it is right. Others' pages stay."""
    coded_bytes = sum(codec.block_bytes)
    for begin, rows in _staged(codec, len(offsets)):
        for row, offset in enumerate(offsets[begin : begin + len(rows)]):
            slot = slots[offset : offset + coded_bytes]
            good[begin + row] = codec.decode(slot[None], rows[row : row + 1]) == 1
        at = 0
        for layout, pages in parts:
            kept = [row for row in range(len(rows)) if good[begin + row] and pages[begin + row] >= 0]
            places = [row * rows.shape[1] + at for row in kept]
            reference.scatter(rows.reshape(-1), places, layout, [pages[begin + row] for row in kept])
            at += layout.block_bytes


def _staged(codec: BlockCodec, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first block, writable raw rows), in the same memory again and again."""
    raw_bytes = sum(codec.raw_bytes)
    memory = np.empty((min(count, max(1, STAGED_BYTES // raw_bytes)), raw_bytes), np.uint8)
    for begin in range(0, count, max(1, len(memory))):
        yield begin, memory[: min(len(memory), count - begin)]
