"""Blocks to and from the library's cache: where each number of a block stands.

The bytes of a block, contiguous, in the element type of the cache:

    [layer][kv: 0 keys, 1 values][head][token of the block][dim]

The library keeps one tensor for the keys and one for the values of each layer, [batch, head, token, dim]. So a
block is a slice of every such tensor along the tokens, and one copy per tensor moves any number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from tierkv.client import DevicePages, DevicePool
from tierkv.core.codec import KVShape
from tierkv.core.fp8 import is_element
from tierkv.device.layouts import PagedArray, PagedLayout
from tierkv.errors import LayoutMismatch

AXES = "layer,kv,head,token,dim"
KEYS_AND_VALUES = 2
TOKEN_AXIS = 3
"""Of [layer, kv, head, token, dim]."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one block holds, all layers of the model."""

    layers: int
    heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def piece_bytes(self) -> int:
        """One head of one layer's keys or values: the longest run that is contiguous in block and cache alike."""
        return self.block_tokens * self.head_dim * int(self.dtype.itemsize)

    @property
    def pieces(self) -> int:
        return self.layers * KEYS_AND_VALUES * self.heads

    @property
    def block_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def kv_shape(self) -> KVShape | None:
        """Where a codec finds the numbers of each head; None for an element type that none is for."""
        element = str(self.dtype).removeprefix("torch.")
        if not is_element(element):
            return None
        return KVShape.head_first(
            element=element, layers=self.layers, heads=self.heads, tokens=self.block_tokens, dim=self.head_dim
        )


def shape_of(cache: DynamicCache, block_tokens: int) -> BlockShape:
    """The shape of the blocks of a cache that holds at least one token. LayoutMismatch if its layers differ from
    each other: a block has one shape for all of them."""
    first = cache.layers[0].keys
    for index, layer in enumerate(cache.layers):
        for name, found in (("keys", layer.keys), ("values", layer.values)):
            if found.shape != first.shape or found.dtype != first.dtype:
                declared = (tuple(first.shape), str(first.dtype))
                raise LayoutMismatch(f"layers[{index}].{name}", declared, (tuple(found.shape), str(found.dtype)))
    _, heads, _, head_dim = first.shape
    return BlockShape(len(cache.layers), int(heads), block_tokens, int(head_dim), first.dtype)


class CacheDestination:
    """Memory on `device` for the KV of a prefix, written block by block, then handed to a cache without another copy.

    It is what `Lease.copy_into` writes to, as it is or `on_device`. What was written counts only up to the number of
    blocks that `copy_into` found valid; `hand_to` is told that number.
    """

    def __init__(self, shape: BlockShape, num_blocks: int, device: torch.device = CPU) -> None:
        self._shape = shape
        self._num_blocks = num_blocks
        self._tensor = torch.empty(
            (shape.layers, KEYS_AND_VALUES, shape.heads, num_blocks * shape.block_tokens, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        as_bytes = self._tensor.view(torch.uint8)
        self._by_block = as_bytes.reshape(shape.pieces, num_blocks, shape.piece_bytes).transpose(0, 1)

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        """Copy `blocks`, uint8 [count, block_bytes], to the places of blocks `first_block` and following. The source
        is not read any more once this returns."""
        count = len(blocks)
        pieces = blocks.reshape(count, self._shape.pieces, self._shape.piece_bytes)
        target = self._by_block[first_block : first_block + count]
        if target.device == CPU:
            np.copyto(target.numpy(), pieces)
        else:
            target.copy_(torch.from_numpy(np.array(pieces)))  # returns when the source has been read

    def on_device(self, pool: DevicePool) -> DevicePages:
        """The same memory, for slots in the pool of its device too: a page is a block, in order."""
        tokens = PagedArray.of(self._tensor).split_axis(TOKEN_AXIS, self._shape.block_tokens)
        layout = PagedLayout.of([tokens], page_axis=TOKEN_AXIS)
        pages = [range(self._num_blocks)]
        return DevicePages(pool=pool, layouts=[layout], pages=pages, host=self, after=asked_so_far(self._tensor.device))

    def hand_to(self, cache: DynamicCache, num_blocks: int) -> None:
        """Make the first `num_blocks` blocks the content of an empty cache."""
        tokens = num_blocks * self._shape.block_tokens
        for layer, tensor in zip(cache.layers, self._tensor, strict=True):
            keys, values = tensor[0, None, :, :tokens], tensor[1, None, :, :tokens]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values


def asked_so_far(device: torch.device) -> Any:
    """What has to be over before a copy on another stream touches memory of this thread's: what was asked of its own
    stream, where memory that was given back a moment ago may still be in use. None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class CacheSource:
    """The blocks of a cache, as `Ticket.copy_from` asks for them. The cache may grow meanwhile, but not shrink."""

    def __init__(self, cache: DynamicCache, shape: BlockShape) -> None:
        self._cache = cache
        self._shape = shape

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        """Copy blocks `first_block` and following into `blocks`, writable uint8 [count, block_bytes] (rows may lie
        apart). The copy has completed when this returns."""
        shape, count = self._shape, len(blocks)
        begin, end = first_block * shape.block_tokens, (first_block + count) * shape.block_tokens
        rows = torch.from_numpy(blocks).view(shape.dtype)
        target = rows.view(count, shape.layers, KEYS_AND_VALUES, shape.heads, shape.block_tokens, shape.head_dim)
        for index, layer in enumerate(self._cache.layers):
            for which, tensor in enumerate((layer.keys, layer.values)):
                source = tensor.detach()[0, :, begin:end].unflatten(1, (count, shape.block_tokens))
                target[:, index, which].copy_(source.transpose(0, 1))

    def on_device(self, pool: DevicePool) -> DevicePages:
        """The same memory, for slots in the pool of its device too: a page is a block of tokens that is full."""
        arrays = [
            PagedArray.of(tensor.detach()[0]).split_axis(1, self._shape.block_tokens)
            for layer in self._cache.layers
            for tensor in (layer.keys, layer.values)
        ]
        layout = PagedLayout.of(arrays, page_axis=1)
        device = self._cache.layers[0].keys.device
        return DevicePages(
            pool=pool, layouts=[layout], pages=[range(layout.num_pages)], host=self, after=asked_so_far(device)
        )
