"""Coding blocks as fp8 and back, in numpy, by the code that an engine's copies use; and what it costs in exactness.

    coding      raw blocks -> coded      beside numpy copying the raw blocks
    decoding    coded blocks -> raw      beside the same
    error       what came back less what was stored, in proportion to the head's mean magnitude; and at worst, in
                proportion to the number itself

Numbers are normally distributed, with a size of its own for each head: rates do not depend on them, errors hardly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Plan, alternate, timed
from benchmarks.report import Figure, of_rates, of_values
from tierkv.core.codec import Fp8, KVShape
from tierkv.core.fp8 import ElementType

QUESTION = "how fast are blocks coded as fp8 and decoded, by one thread, and how exact is what comes back?"

MODELS = {
    "SmolLM2 135M": {"layers": 30, "heads": 3, "tokens": 16, "dim": 64},
    "a model of 8B": {"layers": 32, "heads": 8, "tokens": 16, "dim": 128},
}
ELEMENTS: tuple[ElementType, ...] = ("bfloat16", "float16", "float32")
RAW_BYTES = 32 << 20
MOST_ERROR = 1 / 16
"""Of a number, but near zero: what e4m3 promises with three bits of mantissa."""


def measure(plan: Plan) -> Iterator[Figure]:
    for model, sizes in MODELS.items():
        for element in ELEMENTS:
            shape = KVShape.head_first(element=element, **sizes)
            yield from _rates(plan, f"{model}, {element}", shape)
    yield from _errors(KVShape.head_first(element="float32", **MODELS["a model of 8B"]))


def _rates(plan: Plan, name: str, shape: KVShape) -> Iterator[Figure]:
    codec = Fp8(shape)
    raw = _blocks(shape, max(1, RAW_BYTES // shape.total_raw_bytes))
    coded, back = np.zeros((len(raw), sum(codec.block_bytes)), np.uint8), np.zeros_like(raw)
    seconds = alternate(
        plan.rounds(15, 3),
        {
            "coding": timed(lambda _number: codec.encode(raw, coded)),
            "decoding": timed(lambda _number: codec.decode(coded, back)),
            "copy": timed(lambda _number: np.copyto(back, raw)),
        },
    )
    for what in ("coding", "decoding"):
        yield of_rates(f"{what}, {name}", raw.nbytes, seconds[what], beside="numpy copy", limit=seconds["copy"])


def _errors(shape: KVShape) -> Iterator[Figure]:
    codec = Fp8(shape)
    raw = _blocks(shape, 8)
    coded, back = np.empty((len(raw), sum(codec.block_bytes)), np.uint8), np.empty_like(raw)
    codec.encode(raw, coded)
    codec.decode(coded, back)
    values = raw.view(np.float32).reshape(len(raw), -1, shape.pieces[0][0].tokens * shape.pieces[0][0].dim)
    wrong = np.abs(back.view(np.float32).reshape(values.shape) - values)
    mean = np.abs(values).mean(axis=2)
    each = (wrong.mean(axis=2) / mean).mean(axis=1)
    yield of_values("mean error, of the head's mean magnitude", (100 * each).tolist(), unit="%")
    scales = np.abs(values).max(axis=2, keepdims=True) / 448
    normal = np.abs(values) >= scales / 64  # below, steps are as large as 1/512 of the scale
    worst = [
        float((one[where] / np.abs(value[where])).max())
        for one, where, value in zip(wrong, normal, values, strict=True)
    ]
    yield of_values(
        "largest error, of the number", [100 * one for one in worst], unit="%", most=100 * MOST_ERROR * 1.0001
    )


def _blocks(shape: KVShape, count: int) -> np.ndarray:
    random = np.random.default_rng(7)
    piece = shape.pieces[0][0]
    heads = len(shape.pieces[0]) * piece.heads
    sizes = np.exp(random.normal(0, 1.5, (count, heads, 1))).astype(np.float32)
    values = random.standard_normal((count, heads, piece.tokens * piece.dim), np.float32) * sizes
    if shape.element == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).reshape(count, -1).view(np.uint8)
    return values.astype(shape.element).reshape(count, -1).view(np.uint8)
