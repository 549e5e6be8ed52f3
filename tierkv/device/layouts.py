"""Where the bytes of a block stand in an engine's paged KV memory.

    block   | piece | piece | piece | ...        contiguous, as it lies in a slot
               |       |       |
    page p   address + p * page_stride           each piece is one run of memory in every page

A piece is the longest run that is contiguous in page and block alike. Which runs there are follows from the arrays that
an engine has and from the order of the axes, so K and V apart or fused, NHD or HND, and latent attention (MLA) are all
the same to what moves the bytes.

    K and V apart, [pages, token, head, dim] each     one piece a layer and K or V
    fused, [2, pages, token, head, dim]               the same: page_axis=1
    fused, [pages, 2, head, token, dim]               one piece a layer
    latent, [pages, token, width]                     one piece a layer
    [head, pages * token, dim]                        one piece a layer and head: see `split_axis`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_bytes` at address + page * page_stride for each page, which are at `offset` of the block."""

    address: int
    page_stride: int
    num_bytes: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedArray:
    """An array in memory, of the host or a device: `shape`, and `strides` in bytes. `owner` keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    owner: object = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, array: Any) -> PagedArray:
        """Of a torch tensor, or of whatever has `__cuda_array_interface__` or `__array_interface__`."""
        if hasattr(array, "data_ptr"):
            element = int(array.element_size())
            strides = tuple(int(step) * element for step in array.stride())
            return cls(
                address=int(array.data_ptr()),
                shape=tuple(int(size) for size in array.shape),
                strides=strides,
                element_bytes=element,
                owner=array,
            )
        described = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
        shape = tuple(int(size) for size in described["shape"])
        element = int(described["typestr"][2:])
        return cls(
            address=int(described["data"][0]),
            shape=shape,
            strides=tuple(described.get("strides") or _dense_strides(shape, element)),
            element_bytes=element,
            owner=array,
        )

    def split_axis(self, axis: int, inner: int) -> PagedArray:
        """The same memory with `axis` as two: [size / inner, inner]. For arrays whose tokens are not cut into pages:
        a page is then `inner` tokens. What is left over at the end is no page."""
        size, step = self.shape[axis], self.strides[axis]
        return PagedArray(
            address=self.address,
            shape=(*self.shape[:axis], size // inner, inner, *self.shape[axis + 1 :]),
            strides=(*self.strides[:axis], step * inner, step, *self.strides[axis + 1 :]),
            element_bytes=self.element_bytes,
            owner=self.owner,
        )

    def in_memory_order(self, page_axis: int = 0) -> PagedArray:
        """The same memory with the axes inside of a page ordered as they lie in it, the outermost first: for engines
        whose blocks are their pages byte for byte. The page axis comes first."""
        inner = [axis for axis in range(len(self.shape)) if axis != page_axis]
        order = [page_axis, *sorted(inner, key=lambda axis: (-self.strides[axis], axis))]
        return PagedArray(
            address=self.address,
            shape=tuple(self.shape[axis] for axis in order),
            strides=tuple(self.strides[axis] for axis in order),
            element_bytes=self.element_bytes,
            owner=self.owner,
        )


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The pieces of one block in the order of their offsets, which follow each other without a gap. `num_pages` is how
    many pages the memory has; `owners` keep it alive."""

    pieces: tuple[Piece, ...]
    block_bytes: int
    num_pages: int
    owners: tuple[object, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, arrays: Iterable[Any], *, page_axis: int = 0) -> PagedLayout:
        """A block is each array's part of a page, one behind the other, in the order of the axes that are left.
        Arrays are PagedArrays or what `PagedArray.of` takes. Raises ValueError where they have no pages in common."""
        made = [array if isinstance(array, PagedArray) else PagedArray.of(array) for array in arrays]
        if not made:
            raise ValueError("a layout of no arrays")
        for array in made:
            if not 0 <= page_axis < len(array.shape):
                raise ValueError(f"an array of shape {array.shape} has no axis {page_axis}")
            if math.prod(array.shape) == 0:
                raise ValueError(f"an array of shape {array.shape} has no memory")
        pieces: list[Piece] = []
        for array in made:
            begin = pieces[-1].offset + pieces[-1].num_bytes if pieces else 0
            pieces += _pieces_of(array, page_axis, begin)
        joined = tuple(_joined(pieces))
        last = joined[-1]
        return cls(
            joined,
            last.offset + last.num_bytes,
            min(array.shape[page_axis] for array in made),
            tuple(array.owner for array in made),
        )


def _pieces_of(array: PagedArray, page_axis: int, offset: int) -> Iterator[Piece]:
    axes = [axis for axis in range(len(array.shape)) if axis != page_axis]
    run, outer = array.element_bytes, list(axes)
    while outer and (array.strides[outer[-1]] == run or array.shape[outer[-1]] == 1):
        run *= array.shape[outer.pop()]
    stride = array.strides[page_axis]
    for index in product(*(range(array.shape[axis]) for axis in outer)):
        begin = sum(place * array.strides[axis] for place, axis in zip(index, outer, strict=True))
        yield Piece(array.address + begin, stride, run, offset)
        offset += run


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Pieces that follow each other in memory as they do in the block are one."""
    last = pieces[0]
    for piece in pieces[1:]:
        if piece.page_stride == last.page_stride and piece.address == last.address + last.num_bytes:
            last = Piece(last.address, last.page_stride, last.num_bytes + piece.num_bytes, last.offset)
        else:
            yield last
            last = piece
    yield last


def _dense_strides(shape: Sequence[int], element_bytes: int) -> tuple[int, ...]:
    strides, step = [], element_bytes
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
