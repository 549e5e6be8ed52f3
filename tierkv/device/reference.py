"""Gather and scatter in numpy: what every kernel is compared with, and what the CPU device runs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np

from tierkv.device.layouts import PagedLayout


def gather(layout: PagedLayout, pages: Sequence[int], slots: np.ndarray, offsets: Sequence[int]) -> None:
    """Block i, from page pages[i], to `slots` (bytes) at offsets[i]."""
    for begin, rows in _rows(layout):
        for page, offset in zip(pages, offsets, strict=True):
            slots[offset + begin : offset + begin + rows.shape[1]] = rows[page]


def scatter(slots: np.ndarray, offsets: Sequence[int], layout: PagedLayout, pages: Sequence[int]) -> None:
    """Block i, from `slots` at offsets[i], to page pages[i]."""
    for begin, rows in _rows(layout):
        for page, offset in zip(pages, offsets, strict=True):
            rows[page] = slots[offset + begin : offset + begin + rows.shape[1]]


def _rows(layout: PagedLayout) -> Iterator[tuple[int, np.ndarray]]:
    """Each piece as [pages, bytes], with its place in the block. The memory is of whoever owns the layout's arrays."""
    for piece in layout.pieces:
        if piece.page_stride < 0:
            raise ValueError(f"pages that lie backwards: a stride of {piece.page_stride} bytes")
        span = (layout.num_pages - 1) * piece.page_stride + piece.num_bytes
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(piece.address))
        shape, strides = (layout.num_pages, piece.num_bytes), (piece.page_stride, 1)
        yield piece.offset, np.lib.stride_tricks.as_strided(memory, shape, strides)
