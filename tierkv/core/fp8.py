"""Numbers as float8_e4m3fn: a sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f and 0xff are NaN.

    largest 448 = 1.75 * 2**8     smallest normal 2**-6     smallest 2**-9

What a scale is, for a head whose largest magnitude is `amax`:

    amax == 0   1
    else        amax / 448, rounded up to 16 significant bits, and kept within [2**-100, largest / 448]

The 16 bits make number * scale exact in float32, so that reading has one rounding (to the element type), on every
machine the same; and the largest number of a head comes back as what gives the same scale again: coding what was read
makes the same bytes. Below 2**-100 nothing is gained, and float32 would leave its normal numbers. The upper bound keeps
what is read finite.

The arithmetic is float32 throughout, the conversion integer work on its bits: numpy has no such element types. It was
measured against the package ml_dtypes, which converts at about a half (to) and a tenth (from) of its speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeGuard

import numpy as np

ElementType = Literal["bfloat16", "float16", "float32"]
ITEM_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


def is_element(name: str) -> TypeGuard[ElementType]:
    return name in ITEM_BYTES


Pieces = np.ndarray
"""[piece, head, token, dim]: of the raw block as unsigned integers of the element's size, anyhow strided; of the coded
one as uint8, contiguous. Their scales are float32 [piece, head]."""

LARGEST = 448.0
MIN_SCALE = 2.0**-100
CHUNK_ELEMENTS = 65_536
"""So many numbers are worked on at once: what is made of them stays in the processor's caches."""

_NAN = 0x7F  # without its sign
_INFINITE: dict[str, int] = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
_LARGEST_FINITE = {
    "bfloat16": float.fromhex("0x1.fep127"),
    "float16": 65_504.0,
    "float32": float.fromhex("0x1.fffffep127"),
}

_SIGNIFICANT = np.uint32(0xFFFF_FF00)  # of a float32, to keep 16 bits of its mantissa


def max_scale(element: str) -> float:
    """The largest scale with 16 significant bits at which 448 comes back finite."""
    bits = np.float32(_LARGEST_FINITE[element] / LARGEST).view(np.uint32) & _SIGNIFICANT
    return float(bits.view(np.float32))


MAX_SCALES = {element: max_scale(element) for element in ITEM_BYTES}


def scales_of(amax: np.ndarray, element: str) -> np.ndarray:
    """float32, of the largest magnitudes, float32 and finite."""
    quotient = amax / np.float32(LARGEST)
    bits = (quotient.view(np.uint32) + np.uint32(0xFF)) & _SIGNIFICANT
    scales = np.clip(bits.view(np.float32), np.float32(MIN_SCALE), np.float32(MAX_SCALES[element]))
    scales[amax == 0] = 1
    return scales


def to_codes(values: np.ndarray, codes: np.ndarray) -> None:
    """The e4m3 numbers nearest to float32 `values` (ties to even, saturating, finite), as uint8 into `codes`.

    A magnitude is added to a power of two at which float32 has exactly the steps that e4m3 has near it: the sum is the
    rounding, and what the sum's mantissa counts are those steps.
    """
    bits = values.view(np.int32)
    magnitudes = bits & 0x7FFF_FFFF
    np.minimum(magnitudes, 0x43E0_0000, out=magnitudes)  # 448
    exponents = magnitudes & 0x7F80_0000
    np.maximum(exponents, 0x3C80_0000, out=exponents)  # 2**-6: below it the steps stay as they are
    anchors = exponents + 0x0A00_0000  # 2**20 above
    steps = (magnitudes.view(np.float32) + anchors.view(np.float32)).view(np.int32)
    steps -= anchors
    exponents >>= 20
    exponents -= 0x3C8
    steps += exponents
    signs = bits >> 24
    signs &= 0x80
    steps |= signs
    codes[...] = steps


def from_codes(codes: np.ndarray) -> np.ndarray:
    """float32 of e4m3 numbers that are no NaN. The bits stand in a float32 as in a number 2**120 times too small."""
    bits = codes.view(np.int8).astype(np.int32)
    bits <<= 20
    bits &= -0x7810_0000  # the sign, and seven bits from the 20th on
    values = bits.view(np.float32)
    values *= np.float32(2.0**120)
    return values


def _encode(element: str, raw: Pieces, scales: np.ndarray, codes: Pieces) -> bool:
    for part in _chunks(raw):
        words = np.ascontiguousarray(raw[part])
        mask = words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)
        largest = (words & mask).max(axis=(2, 3))
        if int(largest.max()) >= _INFINITE[element]:
            return False
        found = scales_of(_WIDEN[element](largest), element)
        values = _WIDEN[element](words)
        values /= found[:, :, None, None]
        to_codes(values, codes[part])
        scales[part] = found
    return True


def _decode(element: str, scales: np.ndarray, codes: Pieces, raw: Pieces) -> bool:
    if not ((scales >= np.float32(MIN_SCALE)) & (scales <= np.float32(MAX_SCALES[element]))).all():
        return False  # a NaN is neither
    for part in _chunks(raw):
        numbers = codes[part]
        if ((numbers & np.uint8(_NAN)) == _NAN).any():
            return False
        values = from_codes(numbers)
        values *= scales[part][:, :, None, None]
        raw[part] = _NARROW[element](values)
    return True


def _chunks(raw: Pieces) -> list[slice]:
    count, *rest = raw.shape
    step = max(1, CHUNK_ELEMENTS // int(np.prod(rest)))
    return [slice(begin, begin + step) for begin in range(0, count, step)]


def _widen_bfloat16(words: np.ndarray) -> np.ndarray:
    wide = words.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _narrow_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    return rounded


_WIDEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": _widen_bfloat16,
    "float16": lambda words: words.view(np.float16).astype(np.float32),
    "float32": lambda words: words.view(np.float32).copy(),
}
_NARROW: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": _narrow_bfloat16,
    "float16": lambda values: values.astype(np.float16).view(np.uint16),
    "float32": lambda values: values.view(np.uint32),
}

ENCODERS: dict[str, Callable[[Pieces, np.ndarray, Pieces], bool]] = {
    element: partial(_encode, element) for element in ITEM_BYTES
}
"""raw, scales, codes -> whether every number was finite; scales and codes are written."""
DECODERS: dict[str, Callable[[np.ndarray, Pieces, Pieces], bool]] = {
    element: partial(_decode, element) for element in ITEM_BYTES
}
"""scales, codes, raw -> whether scales and numbers make sense; raw is written."""
