"""Numbers as float8_e4m3fn, against the format's definition, written out once more and the slow way."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tierkv.core.codec import Fp8, KVShape
from tierkv.core.fp8 import ITEM_BYTES, LARGEST, MAX_SCALES, MIN_SCALE, from_codes, scales_of, to_codes

ELEMENTS = sorted(ITEM_BYTES)
LARGEST_FINITE = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7F_FFFF}
SIGN = {"bfloat16": 0x8000, "float16": 0x8000, "float32": 0x8000_0000}


def defined(code: int) -> float:
    """OCP 8-bit floating point: e4m3."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


FINITE = [code for code in range(256) if code & 0x7F != 0x7F]


def nearest(value: float) -> int:
    """The code of the nearest number, of two equally near ones the one with an even code."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    wanted = abs(Fraction(value))
    return sign | min(range(0x7F), key=lambda code: (abs(Fraction(defined(code)) - wanted), code & 1))


def coded(values: np.ndarray) -> list[int]:
    codes = np.empty(values.shape, np.uint8)
    to_codes(values, codes)
    return codes.tolist()


def test_every_code_is_the_number_that_the_format_says() -> None:
    codes = np.array(FINITE, np.uint8)
    assert from_codes(codes).view(np.uint32).tolist() == [
        int(np.float32(defined(code)).view(np.uint32)) for code in FINITE
    ]


def test_every_number_has_its_own_code() -> None:
    assert coded(from_codes(np.array(FINITE, np.uint8))) == FINITE


def test_halfway_between_two_numbers_the_even_one_is_taken_and_next_to_it_the_nearer() -> None:
    values = []
    for below, above in zip(range(0x7E), range(1, 0x7F), strict=True):
        half = np.float32((defined(below) + defined(above)) / 2)
        for value in (half, np.nextafter(half, np.float32(0)), np.nextafter(half, np.float32(1e9))):
            values += [value, -value]
    assert coded(np.array(values, np.float32)) == [nearest(float(value)) for value in values]


@pytest.mark.scenario("B216", then="finite in, finite out: beyond 448 it saturates, and the sign of zero is kept")
def test_the_table_of_values() -> None:
    table = [
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-149, 0x00),
        (-(2.0**-149), 0x80),
        (2.0**-10, 0x00),  # halfway to the smallest, which is odd
        (2.0**-9, 0x01),
        (2.0**-6, 0x08),
        (1.0, 0x38),
        (-1.0625, 0xB8),  # halfway between 1 and 1.125
        (1.1875, 0x3A),  # halfway between 1.125 and 1.25
        (447.0, 0x7E),
        (448.0, 0x7E),
        (449.0, 0x7E),
        (1e4, 0x7E),
        (65_504.0, 0x7E),
        (-65_504.0, 0xFE),
        (3.4e38, 0x7E),
    ]
    values, codes = zip(*table, strict=True)
    assert coded(np.array(values, np.float32)) == list(codes)


@given(arrays.arrays(np.float32, 16, elements=st.floats(-500, 500, width=32)))
def test_any_number_becomes_the_nearest(values: np.ndarray) -> None:
    assert coded(values) == [nearest(float(value)) for value in values]


@given(st.floats(0, 2.0**127, width=32))
def test_a_scale_is_finite_positive_and_leaves_numbers_exact(amax: float) -> None:
    (scale,) = scales_of(np.array([amax], np.float32), "float32")
    assert MIN_SCALE <= scale <= MAX_SCALES["float32"] or (amax == 0 and scale == 1)
    assert scale.view(np.uint32) & 0xFF == 0
    assert Fraction(float(scale)) * 448 >= min(Fraction(amax), Fraction(MAX_SCALES["float32"]) * 448)
    for code in (0x01, 0x0F, 0x7E):
        exact = Fraction(defined(code)) * Fraction(float(scale))
        assert Fraction(float(np.float32(defined(code)) * scale)) == exact


@pytest.mark.parametrize("element", ELEMENTS)
def test_at_the_largest_scale_the_largest_number_is_finite(element: str) -> None:
    block = one_head(element, [LARGEST_FINITE[element], LARGEST_FINITE[element] | SIGN[element]])
    back, _coded = there_and_back(element, block)
    assert np.isfinite(as_float32(element, back)).all()
    assert np.float32(MAX_SCALES[element]) * np.float32(LARGEST) <= as_float32(element, block).max()


def one_head(element: str, words: list[int]) -> np.ndarray:
    return np.array(words, f"u{ITEM_BYTES[element]}")


def there_and_back(element: str, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of keys and values of one head and token: values are the keys."""
    shape = KVShape.head_first(element=element, layers=1, heads=1, tokens=1, dim=len(words))  # type: ignore[arg-type]
    codec = Fp8(shape)
    raw = np.concatenate([words, words]).view(np.uint8)[None]
    stored = np.full((1, sum(codec.block_bytes)), 0xAB, np.uint8)
    back = np.full_like(raw, 0xCD)
    assert codec.encode(raw, stored) == 1
    assert codec.decode(stored, back) == 1
    return back.view(words.dtype)[0, : len(words)], stored


def as_float32(element: str, words: np.ndarray) -> np.ndarray:
    if element == "bfloat16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(np.float16 if element == "float16" else np.float32).astype(np.float32)


def finite_words(element: str) -> st.SearchStrategy[np.ndarray]:
    magnitudes = st.integers(0, LARGEST_FINITE[element])
    words = st.builds(lambda word, negative: word | (SIGN[element] if negative else 0), magnitudes, st.booleans())
    # a head whose numbers are alike in size, as in real KV, and one whose numbers are anything
    base = st.integers(0, LARGEST_FINITE[element] * 3 // 4)
    near = base.flatmap(
        lambda low: st.lists(
            st.builds(
                lambda word, negative: (low + word) | (SIGN[element] if negative else 0),
                st.integers(0, LARGEST_FINITE[element] // 16),
                st.booleans(),
            ),
            min_size=1,
            max_size=24,
        )
    )
    return st.one_of(st.lists(words, min_size=1, max_size=24), near).map(lambda found: one_head(element, found))


@pytest.mark.scenario("B216", then="what is finite comes back finite and within the stated error")
@pytest.mark.parametrize("element", ELEMENTS)
@given(draw=st.data())
def test_what_comes_back_is_finite_and_within_the_stated_error(element: str, draw: st.DataObject) -> None:
    words = draw.draw(finite_words(element))
    back, stored = there_and_back(element, words)
    values, returned = as_float32(element, words), as_float32(element, back)
    assert np.isfinite(returned).all()
    assert np.signbit(values).tolist() == np.signbit(returned).tolist()
    scale = float(stored[0, :4].view("<f4")[0])
    step = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[element]
    smallest = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[element]
    for before, after in zip(values.tolist(), returned.tolist(), strict=True):
        if abs(before) <= 448 * scale:
            error = max(abs(before) / 16, scale / 1024) * (1 + 2.0**-20)
            assert abs(after - before) <= error + step * abs(after) + smallest
        else:
            assert scale == MAX_SCALES[element]


@pytest.mark.parametrize("element", ELEMENTS)
@given(draw=st.data())
def test_coding_what_was_read_makes_the_same_bytes(element: str, draw: st.DataObject) -> None:
    """Where the element type has finer steps than e4m3 at that place, which is so but for its own smallest numbers."""
    floor = {"bfloat16": 0x0C00, "float16": 0x2C00, "float32": 0x0C00_0000}[element]
    magnitudes = st.integers(floor, floor + (LARGEST_FINITE[element] - floor) // 2)
    words = one_head(element, draw.draw(st.lists(magnitudes, min_size=1, max_size=24)))
    if element == "float16":  # 448 steps of the largest number's scale reach down to its own smallest
        words = (words & 0x83FF) | 0x4000
    back, stored = there_and_back(element, words)
    again, stored_again = there_and_back(element, back)
    assert stored.tobytes() == stored_again.tobytes()
    assert back.tobytes() == again.tobytes()


@pytest.mark.scenario("B217", then="a head of zeros is stored with scale 1 and comes back as exact zeros")
@pytest.mark.parametrize("element", ELEMENTS)
def test_zeros_have_scale_one_and_stay_zeros_with_their_signs(element: str) -> None:
    words = one_head(element, [0, SIGN[element], 0])
    back, stored = there_and_back(element, words)
    assert stored[0, :4].view("<f4").tolist() == [1.0]
    assert back.tolist() == words.tolist()
