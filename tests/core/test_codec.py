"""Where the numbers of a block stand, before and after coding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tierkv.core.codec import FP8, Fp8, Kind, KVShape, Piece, codec_of, coded_layout
from tierkv.core.identity import Layout
from tierkv.errors import ConfigError

LAYERS, HEADS, TOKENS, DIM = 2, 3, 4, 5
SHAPE = KVShape.head_first(element="bfloat16", layers=LAYERS, heads=HEADS, tokens=TOKENS, dim=DIM)
SCALES = 2 * LAYERS * HEADS


def random_words(count: int, seed: int = 7) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def block(words: np.ndarray) -> np.ndarray:
    return words.view(np.uint8)[None]


def encoded(shape: KVShape, raw: np.ndarray) -> np.ndarray:
    codec = Fp8(shape)
    coded = np.full((len(raw), sum(codec.block_bytes)), 0x5A, np.uint8)
    assert codec.encode(raw, coded) == len(raw)
    return coded


def decoded(shape: KVShape, coded: np.ndarray) -> np.ndarray:
    raw = np.full((len(coded), shape.total_raw_bytes), 0x5A, np.uint8)
    assert Fp8(shape).decode(coded, raw) == len(coded)
    return raw


@pytest.mark.scenario("B221", then="one formula: a coded block is its scales, up to a multiple of 16, and its numbers")
def test_a_coded_block_is_scales_and_numbers_and_half_as_large() -> None:
    codec = Fp8(SHAPE)
    assert codec.raw_bytes == (2 * 2 * LAYERS * HEADS * TOKENS * DIM,)
    assert codec.block_bytes == (SCALES * 4 + 2 * LAYERS * HEADS * TOKENS * DIM,)
    shape = KVShape.head_first(element="float16", layers=1, heads=3, tokens=1, dim=1)
    assert Fp8(shape).block_bytes == (32 + 6,)


def test_the_bytes_of_a_coded_block_are_these() -> None:
    """Bit by bit: what was stored yesterday must be read tomorrow."""
    shape = KVShape.head_first(element="float32", layers=1, heads=1, tokens=2, dim=2)
    raw = np.array([[448.0, -1.0, 0.0, 0.4375, 7.0, -0.0, 3.5, 0.1]], np.float32).view(np.uint8)
    coded = encoded(shape, raw)
    assert coded[0, :8].view("<f4").tolist() == [1.0, 1 / 64]
    assert coded[0, 8:16].tolist() == [0] * 8
    assert coded[0, 16:].tolist() == [0x7E, 0xB8, 0x00, 0x2E, 0x7E, 0x80, 0x76, 0x4D]
    assert decoded(shape, coded).view(np.float32).tolist() == [[448.0, -1.0, 0.0, 0.4375, 7.0, -0.0, 3.5, 0.1015625]]


def test_no_head_has_an_effect_on_another() -> None:
    words = random_words(SHAPE.total_raw_bytes // 2)
    head = TOKENS * DIM
    changed = words.copy()
    changed[head : 2 * head] = (random_words(head, seed=8).astype(np.uint32) + 0x300).astype(np.uint16)
    before, after = encoded(SHAPE, block(words))[0], encoded(SHAPE, block(changed))[0]
    scales, numbers = np.flatnonzero(before[: 4 * SCALES] != after[: 4 * SCALES]), before[4 * SCALES :]
    assert set((scales // 4).tolist()) == {1}
    differing = np.flatnonzero(numbers != after[4 * SCALES :])
    assert set((differing // head).tolist()) == {1}


def token_first(padding: int = 0) -> KVShape:
    """[layer][kv][token][head][dim and padding]"""
    row = DIM + padding
    pieces = tuple(
        Piece(
            layer=number // 2,
            kind=(Kind.KEYS, Kind.VALUES)[number % 2],
            heads=HEADS,
            tokens=TOKENS,
            dim=DIM,
            start=number * HEADS * TOKENS * row,
            head_stride=row,
            token_stride=HEADS * row,
        )
        for number in range(2 * LAYERS)
    )
    return KVShape(element="bfloat16", raw_bytes=(2 * 2 * LAYERS * HEADS * TOKENS * row,), pieces=(pieces,))


def test_the_order_of_tokens_and_heads_in_an_engine_changes_nothing_in_the_coded_block() -> None:
    words = random_words(SHAPE.total_raw_bytes // 2)
    turned = words.reshape(2 * LAYERS, HEADS, TOKENS, DIM).transpose(0, 2, 1, 3).copy().reshape(-1)
    coded = encoded(SHAPE, block(words))
    assert encoded(token_first(), block(turned)).tobytes() == coded.tobytes()
    back = decoded(token_first(), coded).view(np.uint16).reshape(2 * LAYERS, TOKENS, HEADS, DIM)
    assert back.transpose(0, 2, 1, 3).tobytes() == decoded(SHAPE, coded).tobytes()


def test_layers_that_differ_are_coded_each_by_its_own_shape() -> None:
    def piece(heads: int, dim: int, start: int) -> Piece:
        return Piece(
            layer=0,
            kind=Kind.KEYS,
            heads=heads,
            tokens=TOKENS,
            dim=dim,
            start=start,
            head_stride=TOKENS * dim,
            token_stride=dim,
        )

    shape = KVShape(
        element="bfloat16",
        raw_bytes=(2 * TOKENS * (6 + 5 + 6), 2 * TOKENS * 8),
        pieces=((piece(2, 3, 0), piece(1, 5, 6 * TOKENS), piece(2, 3, 11 * TOKENS)), (piece(2, 4, 0),)),
    )
    assert Fp8(shape).block_bytes == (32 + TOKENS * 17, 16 + TOKENS * 8)
    words = random_words(shape.total_raw_bytes // 2)
    back = decoded(shape, encoded(shape, block(words))).view(np.uint16)
    values, returned = ((found.astype(np.uint32) << 16).view(np.float32) for found in (words, back[0]))
    assert np.abs(values - returned).max() <= np.abs(values).max() / 14


@pytest.mark.scenario("B218", then="stored bytes do not depend on padding, whatever it holds")
@pytest.mark.parametrize("filling", [0x0000, 0x7FC0, 0x7F80, 0x7F7F])
def test_padding_is_neither_stored_nor_looked_at_and_comes_back_as_zeros(filling: int) -> None:
    shape = token_first(padding=3)
    words = random_words(2 * LAYERS * HEADS * TOKENS * DIM).reshape(-1, DIM)
    padded = np.full((len(words), DIM + 3), filling, np.uint16)
    padded[:, :DIM] = words
    coded = encoded(shape, block(padded.reshape(-1)))
    assert coded.tobytes() == encoded(token_first(), block(words.reshape(-1))).tobytes()
    back = decoded(shape, coded).view(np.uint16).reshape(-1, DIM + 3)
    assert not back[:, DIM:].any()


@pytest.mark.scenario("B216", then="a block with inf or NaN is refused, and those before it are coded")
@pytest.mark.parametrize("word", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
@pytest.mark.parametrize("place", [0, 77, -1])
def test_a_block_with_a_number_that_is_not_finite_is_refused(word: int, place: int) -> None:
    raw = np.stack([random_words(SHAPE.total_raw_bytes // 2, seed) for seed in range(3)])
    raw[1, place] = word
    coded = np.zeros((3, sum(Fp8(SHAPE).block_bytes)), np.uint8)
    assert Fp8(SHAPE).encode(raw.view(np.uint8), coded) == 1
    assert coded[0].tobytes() == encoded(SHAPE, raw[:1].view(np.uint8)).tobytes()


@pytest.mark.scenario("B217", then="a scale of 0, below 0, NaN, inf or 1e-45 is damage: the block does not count")
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-45, 3e38])
@pytest.mark.parametrize("which", [0, SCALES - 1])
def test_a_scale_that_no_coding_makes_is_damage(scale: float, which: int) -> None:
    raw = np.stack([random_words(SHAPE.total_raw_bytes // 2, seed) for seed in range(3)]).view(np.uint8)
    coded = encoded(SHAPE, raw)
    coded[1, 4 * which : 4 * which + 4].view("<f4")[:] = scale
    assert Fp8(SHAPE).decode(coded, np.empty_like(raw)) == 1


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_number_that_no_coding_makes_is_damage(code: int) -> None:
    coded = encoded(SHAPE, block(random_words(SHAPE.total_raw_bytes // 2)))
    coded[0, -1] = code
    assert Fp8(SHAPE).decode(coded, np.empty((1, SHAPE.total_raw_bytes), np.uint8)) == 0


def test_a_layout_says_what_is_stored_and_keeps_what_the_engine_has() -> None:
    layout = Layout(dtype="bfloat16", block_bytes=SHAPE.raw_bytes, axes="a", block_tokens=TOKENS, engine="e")
    codec = codec_of(FP8, SHAPE)
    coded = coded_layout(layout, codec)
    assert (coded.codec, coded.block_bytes) == (FP8, codec.block_bytes)
    assert (coded.dtype, coded.axes, coded.engine) == (layout.dtype, layout.axes, layout.engine)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ConfigError, match="fp4"):
        codec_of("fp4", SHAPE)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"start": 1}, "ends at element"),
        ({"heads": 0}, "below 1"),
        ({"token_stride": 0}, "shares elements"),
        ({"start": 0}, "shares elements"),
    ],
)
def test_a_shape_that_can_not_be_is_refused(change: dict[str, int], problem: str) -> None:
    first, *middle, last = SHAPE.pieces[0]
    wrong = replace(last, **({"start": last.start + 1} if change.get("start") == 1 else change))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=problem):
        KVShape(element="bfloat16", raw_bytes=SHAPE.raw_bytes, pieces=((first, *middle, wrong),))


def test_rows_that_lie_apart_are_coded_in_place() -> None:
    raw = np.stack([random_words(SHAPE.total_raw_bytes // 2, seed) for seed in range(2)]).view(np.uint8)
    size = sum(Fp8(SHAPE).block_bytes)
    slots = np.full((2, size + 100), 0x77, np.uint8)
    assert Fp8(SHAPE).encode(raw, slots[:, :size]) == 2
    assert slots[:, :size].tobytes() == encoded(SHAPE, raw).tobytes()
    assert (slots[:, size:] == 0x77).all()
