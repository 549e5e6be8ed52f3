"""Engines' pages whose blocks are coded, in each layout that there is, and the same blocks as raw rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tierkv.core.codec import Fp8, Kind, KVShape, Piece
from tierkv.device import reference
from tierkv.device.coding import Parts
from tierkv.device.layouts import PagedLayout

LAYERS, HEADS, TOKENS, DIM, PAGES = 2, 3, 4, 8, 6
SLOT = 4096
ITEM = 2
LAYER = 2 * TOKENS * HEADS * DIM
"""Numbers of a layer's keys and values."""


def _piece(number: int, start: int, head_stride: int, token_stride: int) -> Piece:
    return Piece(
        layer=number // 2,
        kind=(Kind.KEYS, Kind.VALUES)[number % 2],
        heads=HEADS,
        tokens=TOKENS,
        dim=DIM,
        start=start,
        head_stride=head_stride,
        token_stride=token_stride,
    )


class CodedPages:
    """float16. A raw block is the parts of all `layouts`, one behind the other."""

    def __init__(self, name: str) -> None:
        self.codec, self.layouts = KINDS[name]()
        self.raw_bytes = sum(self.codec.raw_bytes)
        self.coded_bytes = sum(self.codec.block_bytes)

    def put(self, rows: np.ndarray, pages: Sequence[int]) -> None:
        at = 0
        for layout in self.layouts:
            begins = [row * self.raw_bytes + at for row in range(len(rows))]
            reference.scatter(rows.reshape(-1), begins, layout, pages)
            at += layout.block_bytes

    def get(self, pages: Sequence[int]) -> np.ndarray:
        rows, at = np.zeros((len(pages), self.raw_bytes), np.uint8), 0
        for layout in self.layouts:
            begins = [row * self.raw_bytes + at for row in range(len(rows))]
            reference.gather(layout, pages, rows.reshape(-1), begins)
            at += layout.block_bytes
        return rows

    def parts(self, pages: Sequence[int]) -> Parts:
        return [(layout, pages) for layout in self.layouts]

    def rows(self, count: int, seed: int = 1) -> np.ndarray:
        numbers = np.random.default_rng(seed).standard_normal((count, self.raw_bytes // ITEM)) * 3
        return numbers.astype(np.float16).view(np.uint8)

    def coded(self, rows: np.ndarray) -> np.ndarray:
        made = np.empty((len(rows), self.coded_bytes), np.uint8)
        assert self.codec.encode(rows, made) == len(rows)
        return made

    def as_read(self, rows: np.ndarray) -> np.ndarray:
        """What the host makes of them, there and back."""
        back = np.empty_like(rows)
        assert self.codec.decode(self.coded(rows), back) == len(rows)
        return back


def _codec(*groups: tuple[int, Sequence[Piece]]) -> Fp8:
    return Fp8(
        KVShape(
            element="float16",
            raw_bytes=tuple(numbers * ITEM for numbers, _pieces in groups),
            pieces=tuple(tuple(pieces) for _numbers, pieces in groups),
        )
    )


def _token_first() -> list[Piece]:
    half = LAYER // 2
    return [_piece(number, number * half, DIM, HEADS * DIM) for number in range(2 * LAYERS)]


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint16)


def _fused() -> tuple[Fp8, list[PagedLayout]]:
    """[2, pages, token, head, dim] each layer."""
    arrays = [_zeros(2, PAGES, TOKENS, HEADS, DIM) for _ in range(LAYERS)]
    return _codec((LAYERS * LAYER, _token_first())), [PagedLayout.of(arrays, page_axis=1)]


def _apart() -> tuple[Fp8, list[PagedLayout]]:
    """Keys and values of each layer on their own, with room between the pages."""
    arrays = [_zeros(PAGES, TOKENS, HEADS, 2 * DIM)[..., :DIM] for _ in range(2 * LAYERS)]
    return _codec((LAYERS * LAYER, _token_first())), [PagedLayout.of(arrays)]


def _scattered() -> tuple[Fp8, list[PagedLayout]]:
    """No head of a block is one run in the pages: [pages, kv, head, token, dim] seen token by token."""
    arrays = [_zeros(PAGES, 2, HEADS, TOKENS, DIM).transpose(0, 1, 3, 2, 4) for _ in range(LAYERS)]
    return _codec((LAYERS * LAYER, _token_first())), [PagedLayout.of(arrays)]


def _grouped() -> tuple[Fp8, list[PagedLayout]]:
    """Two layer groups, each with pages of its own."""
    half = LAYER // 2
    groups = [
        (LAYER, [_piece(2 * layer + kind, kind * half, TOKENS * DIM, DIM) for kind in range(2)])
        for layer in range(LAYERS)
    ]
    arrays = [_zeros(PAGES, 2, HEADS, TOKENS, DIM) for _ in range(LAYERS)]
    return _codec(*groups), [PagedLayout.of([array]) for array in arrays]


def _padded() -> tuple[Fp8, list[PagedLayout]]:
    """Behind the numbers of a block there are some of nobody's, which come back as zeros."""
    arrays = [_zeros(PAGES, LAYER + 24) for _ in range(LAYERS)]
    half, step = LAYER // 2, LAYER + 24
    pieces = [
        _piece(2 * layer + kind, layer * step + kind * half, DIM, HEADS * DIM)
        for layer in range(LAYERS)
        for kind in range(2)
    ]
    return _codec((LAYERS * step, pieces)), [PagedLayout.of(arrays)]


KINDS: dict[str, Callable[[], tuple[Fp8, list[PagedLayout]]]] = {
    "fused": _fused,
    "apart": _apart,
    "scattered": _scattered,
    "grouped": _grouped,
    "padded": _padded,
}
