"""A prefix as engines keep it in a node: its full blocks went through a codec when they were stored, and come back out
of it whenever they are used.

A conversation grows: each turn computes its tokens on what was loaded, and stores them in turn. So the loss of a codec
is in what later blocks are computed from, as well as in the blocks themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from tierkv.core.codec import BlockCodec
from tierkv.errors import TierkvError
from tierkv.integrations.kv_blocks import BlockShape, CacheDestination, CacheSource
from tierkv.integrations.supported import forward

CHUNK_TOKENS = 512
"""So many tokens are run through the model at once: what a pass needs beside the cache stays small."""


class NotFinite(TierkvError):
    """The model's keys or values hold a number that is not finite: no block of them can be stored with this codec."""


class DoesNotDecode(TierkvError):
    """What was coded a moment ago is damaged to the one who decodes it."""


class RawBlocks:
    """No codec: blocks come back as they were."""

    name = ""

    def __init__(self, shape: BlockShape) -> None:
        self.raw_bytes = self.block_bytes = (shape.block_bytes,)

    def encode(self, raw: np.ndarray, coded: np.ndarray) -> int:
        coded[:] = raw
        return len(raw)

    def decode(self, coded: np.ndarray, raw: np.ndarray) -> int:
        raw[:] = coded
        return len(coded)


class KeptPrefix:
    """The stored blocks of one prompt."""

    def __init__(self, model: Any, shape: BlockShape, codec: BlockCodec) -> None:
        self._model = model
        self._shape = shape
        self._codec = codec
        self._blocks: list[np.ndarray] = []  # coded, each with the blocks of one turn

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._blocks))

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self._shape.block_tokens

    def load(self) -> DynamicCache:
        """A cache of all that is stored, copied out of it now."""
        cache = DynamicCache(config=self._model.config)
        if not self._blocks:
            return cache
        destination = CacheDestination(self._shape, self.num_blocks)
        first = 0
        for coded in self._blocks:
            raw = np.empty((len(coded), self._shape.block_bytes), np.uint8)
            if self._codec.decode(coded, raw) != len(coded):
                raise DoesNotDecode(f"blocks that {self._codec.name} has just coded can't be decoded")
            destination.write_blocks(first, raw)
            first += len(coded)
        destination.hand_to(cache, first)
        return cache

    def keep(self, cache: DynamicCache) -> None:
        """Store the full blocks of `cache` that are not stored yet."""
        first = self.num_blocks
        count = int(cache.get_seq_length()) // self._shape.block_tokens - first
        if count <= 0:
            return
        raw = np.empty((count, self._shape.block_bytes), np.uint8)
        CacheSource(cache, self._shape).read_blocks(first, raw)
        coded = np.empty((count, sum(self._codec.block_bytes)), np.uint8)
        if self._codec.encode(raw, coded) != count:
            raise NotFinite("the model's keys or values hold numbers that are not finite, which no codec can store")
        self._blocks.append(coded)

    def grow(self, tokens: torch.Tensor, turns: int) -> None:
        """Store the full blocks of `tokens`, int64 [1, n], over so many turns of about the same length: each loads what
        is there, computes its own, and stores that."""
        block_tokens = self._shape.block_tokens
        missing = tokens.shape[1] // block_tokens - self.num_blocks
        begin = self.num_blocks
        for turn in range(1, turns + 1):
            end = (begin + missing * turn // turns) * block_tokens
            if end > self.num_tokens:
                cache = self.load()
                run(self._model, tokens[:, :end], cache)
                self.keep(cache)


def run(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Bring the cache up to `tokens`; the logits of the last one, [1, vocabulary]."""
    while True:
        end = min(int(cache.get_seq_length()) + CHUNK_TOKENS, tokens.shape[1])
        logits = forward(model, tokens[:, :end], cache)
        if end == tokens.shape[1]:
            return logits


def read_on(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Run the tokens [1, n] that come after the cache's; the logits of every one of them, float32 [n, vocabulary]."""
    length = int(cache.get_seq_length()) + tokens.shape[1]
    output = model(
        input_ids=tokens,
        attention_mask=torch.ones((1, length), dtype=torch.int64),
        past_key_values=cache,
        use_cache=True,
    )
    logits: torch.Tensor = output.logits[0].to(torch.float32)
    return logits
