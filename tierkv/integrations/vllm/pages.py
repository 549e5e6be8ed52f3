"""vLLM's paged KV memory as rows of blocks.

    row of a block:  page group 0: layer, layer, ... | page group 1: layer, ... | ...

Each layer's part is the whole page as it lies in memory, byte for byte: what is inside of a page (K and V, heads,
packing for an instruction set) is the engine's affair, and the identity's layout names it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierkv.device.layouts import PagedArray, PagedLayout
from tierkv.errors import LayoutMismatch, UnsupportedModel
from tierkv.integrations.connector.plan import NO_PAGE, Pages

STAGED_BLOCKS = 16
"""So many blocks go through pinned memory at once on their way to or from a device."""


class EnginePages:
    """`layers` names the layers of each page group in the order of a row; `block_bytes` is what the identity says of
    each. Raises LayoutMismatch where the tensors are not that, UnsupportedModel where a page is not one piece."""

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], layers: Sequence[Sequence[str]], block_bytes: Sequence[int]
    ) -> None:
        groups = [[_Layer.of(name, kv_caches[name]) for name in names] for names in layers]
        found = tuple(sum(layer.page_bytes for layer in group) for group in groups)
        if found != tuple(block_bytes):
            raise LayoutMismatch("block_bytes of the page groups", tuple(block_bytes), found)
        devices = {layer.tensor.device for group in groups for layer in group}
        if len(devices) != 1:
            raise UnsupportedModel(f"KV memory on several devices: {', '.join(sorted(map(str, devices)))}")
        device = devices.pop()
        self.device = device
        self._groups = groups
        self._ends = np.cumsum(found).tolist()
        self._movers: list[_HostPages | _DevicePages] = [
            _HostPages(group) if device.type == "cpu" else _DevicePages(group, device) for group in groups
        ]

    def layouts(self) -> tuple[PagedLayout, ...]:
        """Where the parts of a block stand in each page group, in the order of a row."""
        return tuple(PagedLayout.of([PagedArray.of(layer.flat) for layer in group]) for group in self._groups)

    def computed_event(self) -> Any:
        """What stands for the last `computed`, on a device; None where nothing has to be waited for."""
        mover = self._movers[0]
        return mover.event if isinstance(mover, _DevicePages) else None

    def computed(self) -> None:
        """Called by the engine's thread: what was computed up to here is what `read_pages` reads, and `write_pages`
        comes behind it."""
        for mover in self._movers:
            mover.mark()

    def read_pages(self, pages: Pages, rows: np.ndarray) -> None:
        for mover, group, part in self._parts(pages, rows):
            mover.read(group, part)

    def write_pages(self, rows: np.ndarray, pages: Pages) -> None:
        for mover, group, part in self._parts(pages, rows):
            kept = [index for index, page in enumerate(group) if page != NO_PAGE]
            mover.write(part, kept, [group[index] for index in kept])

    def _parts(self, pages: Pages, rows: np.ndarray) -> list[tuple[_HostPages | _DevicePages, tuple[int, ...], Any]]:
        begins = [0, *self._ends[:-1]]
        return [
            (mover, group, rows[:, begin:end])
            for mover, group, begin, end in zip(self._movers, pages, begins, self._ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's pages: `tensor` is [pages, anything]; each page is one piece of memory, whatever the order of the
    axes in it."""

    name: str
    tensor: torch.Tensor
    page_bytes: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> _Layer:
        inner = sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True)
        dense = 1
        for axis in reversed(inner):
            if tensor.shape[axis] != 1 and tensor.stride(axis) != dense:
                raise UnsupportedModel(
                    f"KV memory of {name}: a page of {tuple(tensor.shape)}, strides {tensor.stride()}, is not one piece"
                )
            dense *= tensor.shape[axis]
        ordered = tensor.permute(0, *inner)
        return cls(name, ordered, dense * tensor.element_size())

    @property
    def flat(self) -> torch.Tensor:
        """uint8 [pages, page_bytes], the same memory."""
        pages, elements = self.tensor.shape[0], self.page_bytes // self.tensor.element_size()
        flat = self.tensor.as_strided((pages, elements), (self.tensor.stride(0), 1), self.tensor.storage_offset())
        return flat.view(torch.uint8)


class _HostPages:
    """Pages in host memory. Layers that lie evenly spaced in one piece of memory, as the engine makes them, are moved
    with one copy a block; others with one a layer and block. numpy lets other threads run meanwhile."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        views = [layer.flat.numpy() for layer in layers]
        self._stacks = _stacked(views)

    def mark(self) -> None:
        """Host memory is what was computed."""

    def read(self, pages: Sequence[int], rows: np.ndarray) -> None:
        begin = 0
        for stack in self._stacks:
            layers, _pages, page_bytes = stack.shape
            end = begin + layers * page_bytes
            for row, page in zip(rows[:, begin:end], pages, strict=True):
                row.reshape(layers, page_bytes)[:] = stack[:, page]
            begin = end

    def write(self, rows: np.ndarray, kept: Sequence[int], pages: Sequence[int]) -> None:
        begin = 0
        for stack in self._stacks:
            layers, _pages, page_bytes = stack.shape
            end = begin + layers * page_bytes
            for index, page in zip(kept, pages, strict=True):
                stack[:, page] = rows[index, begin:end].reshape(layers, page_bytes)
            begin = end


def _stacked(views: Sequence[np.ndarray]) -> list[np.ndarray]:
    """[layers, pages, page_bytes]: one where the layers are evenly spaced, else one for each."""
    first = views[0]
    starts = [view.__array_interface__["data"][0] for view in views]
    steps = set(np.diff(starts).tolist())
    alike = all(view.shape == first.shape and view.strides == first.strides for view in views)
    if len(views) == 1 or not alike or len(steps) != 1:
        return [view[None] for view in views]
    shape, strides = (len(views), *first.shape), (steps.pop(), *first.strides)
    return [np.lib.stride_tricks.as_strided(first, shape, strides)]


class _DevicePages:
    """Pages on a device, through pinned memory, on a stream of their own. The events order it behind what the engine's
    thread had asked the device for when it called `mark`. Loads and stores are made by threads of their own, and the
    pinned memory is one thread's at a time."""

    def __init__(self, layers: Sequence[_Layer], device: torch.device) -> None:
        self._layers = [layer.flat for layer in layers]
        self._device = device
        self._bytes = sum(layer.page_bytes for layer in layers)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._computed = torch.cuda.Event() if device.type == "cuda" else None
        self._pinned = torch.empty((STAGED_BLOCKS, self._bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._using_pinned = threading.Lock()

    @property
    def event(self) -> Any:
        return self._computed

    def mark(self) -> None:
        if self._computed is not None:
            self._computed.record(torch.cuda.current_stream(self._device))

    def read(self, pages: Sequence[int], rows: np.ndarray) -> None:
        for begin in range(0, len(pages), STAGED_BLOCKS):
            some = pages[begin : begin + STAGED_BLOCKS]
            with self._using_pinned:
                with self._in_order():
                    chosen = torch.tensor(some, device=self._device)
                    gathered = torch.cat([layer.index_select(0, chosen) for layer in self._layers], dim=1)
                    self._pinned[: len(some)].copy_(gathered, non_blocking=True)
                self._complete()
                rows[begin : begin + len(some)] = self._pinned[: len(some)].numpy()

    def write(self, rows: np.ndarray, kept: Sequence[int], pages: Sequence[int]) -> None:
        for begin in range(0, len(pages), STAGED_BLOCKS):
            some = pages[begin : begin + STAGED_BLOCKS]
            with self._using_pinned:
                self._pinned[: len(some)].numpy()[:] = rows[list(kept[begin : begin + STAGED_BLOCKS])]
                with self._in_order():
                    chosen = torch.tensor(some, device=self._device)
                    staged = self._pinned[: len(some)].to(self._device, non_blocking=True)
                    begin_byte = 0
                    for layer in self._layers:
                        layer.index_copy_(0, chosen, staged[:, begin_byte : begin_byte + layer.shape[1]])
                        begin_byte += layer.shape[1]
                self._complete()

    def _in_order(self) -> Any:
        if self._stream is not None:
            self._stream.wait_event(self._computed)
        return torch.cuda.stream(self._stream)

    def _complete(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
