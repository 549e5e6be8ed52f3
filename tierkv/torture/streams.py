"""The bytes of a stamped block: of each layer a stream of its own, which tells whose it is wherever a piece turns up.

    owner   = the first 8 bytes of BLAKE3(block key | u16 rank | u16 layer)         the key: identity and tokens so far
    word i  = mix(owner + (i + 1) * STEP)      64 bits, little-endian; the rest of a layer that is no multiple is cut

That is SplitMix64 (Steele, Lea, Flood 2014). `mix` can be inverted, so two words that follow one another prove a piece
of such a stream, and with a table of owners they say of which and from where in it: see `tierkv.torture.oracle`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from tierkv.core.keys import split_keys

WORD_BYTES = 8
STEP = np.uint64(0x9E3779B97F4A7C15)

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNMIX_1, _UNMIX_2 = np.uint64(pow(int(_MIX_1), -1, 2**64)), np.uint64(pow(int(_MIX_2), -1, 2**64))
_30, _27, _31, _60, _54, _62 = (np.uint64(bits) for bits in (30, 27, 31, 60, 54, 62))


def owner_of(key: bytes, rank: int, layer: int) -> int:
    """The number that the stream of one layer of one block starts from."""
    return int.from_bytes(blake3(key + struct.pack("<HH", rank, layer)).digest(length=WORD_BYTES), "little")


def rows_of(keys: bytes, layers: Sequence[int], *, rank: int = 0) -> np.ndarray:
    """What the blocks of packed `keys` hold: [blocks, bytes of all layers], layer after layer."""
    split = split_keys(keys)
    rows = np.empty((len(split), sum(layers)), np.uint8)
    start = 0
    for layer, num_bytes in enumerate(layers):
        owners = np.array([owner_of(key, rank, layer) for key in split], np.uint64)
        rows[:, start : start + num_bytes] = _streams(owners, num_bytes)
        start += num_bytes
    return rows


def _streams(owners: np.ndarray, num_bytes: int) -> np.ndarray:
    """[owners, num_bytes]"""
    steps = np.arange(1, -(-num_bytes // WORD_BYTES) + 1, dtype=np.uint64) * STEP
    words: np.ndarray = mix(owners[:, None] + steps).astype("<u8", copy=False)
    return words.view(np.uint8)[:, :num_bytes]


def mix(words: np.ndarray) -> np.ndarray:
    mixed = (words ^ (words >> _30)) * _MIX_1
    mixed = (mixed ^ (mixed >> _27)) * _MIX_2
    return np.asarray(mixed ^ (mixed >> _31))


def unmix(words: np.ndarray) -> np.ndarray:
    """The inverse of `mix`."""
    unmixed = (words ^ (words >> _31) ^ (words >> _62)) * _UNMIX_2
    unmixed = (unmixed ^ (unmixed >> _27) ^ (unmixed >> _54)) * _UNMIX_1
    return np.asarray(unmixed ^ (unmixed >> _30) ^ (unmixed >> _60))
