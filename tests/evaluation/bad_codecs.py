"""Codecs made bad on purpose: fp8 with something that could go wrong in it, and that a checksum would not notice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tierkv.core.codec import FP8, KVShape, codec_of
from tierkv.integrations.identity_common import element_type
from tierkv.integrations.kv_blocks import BlockShape

Harm = Callable[[np.ndarray, np.ndarray], None]


def fp8_of(shape: BlockShape) -> HarmedFp8:
    """As it is."""
    return HarmedFp8(shape, lambda _scales, _numbers: None)


class HarmedFp8:
    """`harm` is shown scales float32 [block, scale] and numbers uint8 [block, number] before they are decoded."""

    name = FP8

    def __init__(self, shape: BlockShape, harm: Harm) -> None:
        kv_shape = KVShape.head_first(
            element=element_type(shape.dtype),  # type: ignore[arg-type]
            layers=shape.layers,
            heads=shape.heads,
            tokens=shape.block_tokens,
            dim=shape.head_dim,
        )
        self._codec = codec_of(FP8, kv_shape)
        self._harm = harm
        self._scale_bytes = shape.pieces * 4
        self._numbers_bytes = shape.pieces * shape.block_tokens * shape.head_dim
        self.raw_bytes, self.block_bytes = self._codec.raw_bytes, self._codec.block_bytes

    def encode(self, raw: np.ndarray, coded: np.ndarray) -> int:
        return self._codec.encode(raw, coded)

    def decode(self, coded: np.ndarray, raw: np.ndarray) -> int:
        harmed = coded.copy()
        self._harm(harmed[:, : self._scale_bytes].view("<f4"), harmed[:, -self._numbers_bytes :])
        return self._codec.decode(harmed, raw)


def lose_two_bits(_scales: np.ndarray, numbers: np.ndarray) -> None:
    """One bit of mantissa is left of three."""
    numbers &= 0xFC


def mix_scales(scales: np.ndarray, _numbers: np.ndarray) -> None:
    """Each head has its neighbour's scale."""
    scales[:] = np.roll(scales, 1, axis=1)


def forget_values(_scales: np.ndarray, numbers: np.ndarray) -> None:
    numbers[:] = 0
