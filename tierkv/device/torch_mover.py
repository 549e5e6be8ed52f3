"""Gather and scatter by torch, where there is no cupy: the same results, one operation a piece.

Slots are seen as rows of the largest unit that divides every place in them, so that one index names all that is moved.
Imported only where a device is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierkv.device.layouts import PagedLayout

View = Callable[[int, tuple[int, int], tuple[int, int]], torch.Tensor]
"""Memory at an address as uint8 of that shape and those strides, without a copy."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory of slots on the device."""

    address: int
    num_bytes: int


def gather(
    view: View, layout: PagedLayout, pages: Sequence[int], slots: Slots, offsets: Sequence[int], device: Any
) -> None:
    chosen = torch.as_tensor(list(pages), dtype=torch.int64, device=device)
    for rows, units, places in _parts(view, layout, slots, offsets, device):
        units.index_copy_(0, places, rows.index_select(0, chosen).reshape(-1, units.shape[1]))


def scatter(
    view: View, slots: Slots, offsets: Sequence[int], layout: PagedLayout, pages: Sequence[int], device: Any
) -> None:
    chosen = torch.as_tensor(list(pages), dtype=torch.int64, device=device)
    for rows, units, places in _parts(view, layout, slots, offsets, device):
        rows.index_copy_(0, chosen, units.index_select(0, places).reshape(len(chosen), rows.shape[1]))


def _parts(
    view: View, layout: PagedLayout, slots: Slots, offsets: Sequence[int], device: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each piece its pages as rows, the slots as rows of a unit, and which of those it stands in."""
    for piece in layout.pieces:
        unit = math.gcd(piece.offset, piece.num_bytes, *offsets)
        first = torch.as_tensor([(offset + piece.offset) // unit for offset in offsets], device=device)
        places = (first[:, None] + torch.arange(piece.num_bytes // unit, device=device)).reshape(-1)
        rows = view(piece.address, (layout.num_pages, piece.num_bytes), (piece.page_stride, 1))
        units = view(slots.address, (slots.num_bytes // unit, unit), (unit, 1))
        yield rows, units, places


class _OnDevice:
    """How torch is told of memory that is somebody else's."""

    def __init__(self, address: int, shape: tuple[int, int], strides: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def move(
    index: int,
    stream: int,
    layout: PagedLayout,
    pages: Sequence[int],
    slots: Slots,
    offsets: Sequence[int],
    *,
    to_slots: bool,
) -> None:
    """Ask `stream` of GPU `index` for it. A page may be named once only where pages are written."""
    device = torch.device("cuda", index)

    def view(address: int, shape: tuple[int, int], strides: tuple[int, int]) -> torch.Tensor:
        return torch.as_tensor(_OnDevice(address, shape, strides), device=device)

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
        if to_slots:
            gather(view, layout, pages, slots, offsets, device)
        else:
            scatter(view, slots, offsets, layout, pages, device)
