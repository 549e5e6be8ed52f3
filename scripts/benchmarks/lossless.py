"""What a lossless codec makes of the KV of a real model: how much smaller, and how fast a core is at it.

The model reads English prose (the file that TIERKV_PROMPT names, else docs/architecture.md), and its KV is taken by the
transformers integration, in blocks of 16 tokens: in bfloat16, in float32, and coded as fp8. Each variant encodes and
decodes the same blocks in one thread, in turn; the rates are bytes of blocks by processor time, so that others on the
machine count little, and each is beside a plain copy.

    ours       byte planes, and zstd with hardly a search for matches: what nvme_codec and disk_codec write
    level N    zstd as it comes, over the planes or over the blocks as they lie
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers
import zstandard
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.measure import Plan, Work, alternate
from benchmarks.report import Figure, Remark, of_values
from tierkv.core.codec import FP8, codec_of
from tierkv.integrations.kv_blocks import CacheSource, shape_of
from tierkv.storage.plane_codec import PlaneCodec

QUESTION = "how much smaller are files by a lossless codec, and what does it cost?"

BLOCK_TOKENS = 16
BLOCKS = 64
REPOSITORY = Path(__file__).resolve().parents[2]


class AtLevel(PlaneCodec):
    """zstd as it comes at a level, over the same pieces."""

    level = 1

    def compressor(self) -> zstandard.ZstdCompressor:
        return _compressor(self.level)


class AtLevel3(AtLevel):
    level = 3


@cache
def _compressor(level: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level)


@dataclass(frozen=True)
class Variant:
    name: str
    codec: PlaneCodec


def variants(width: int) -> list[Variant]:
    made = [Variant("ours", PlaneCodec(width)), Variant("level 1", AtLevel(width)), Variant("level 3", AtLevel3(width))]
    if width == 1:
        return made
    lying = [Variant("level 1, no planes", AtLevel(1)), Variant("level 3, no planes", AtLevel3(1))]
    return [*made, Variant("ours, no planes", PlaneCodec(1)), *lying]


def measure(plan: Plan) -> Iterator[Figure | Remark]:
    if plan.model is None:
        raise ValueError("name a model with --model, or start this by `scripts/bench lossless`")
    blocks = 16 if plan.quick else BLOCKS
    yield Remark(
        f"{plan.model.name}, transformers {transformers.__version__}, torch {torch.__version__}, zstandard "
        f"{zstandard.__version__} (zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}); {blocks} blocks of "
        f"{BLOCK_TOKENS} tokens; a core's rates, by processor time"
    )
    for element, width, rows in _kv(plan.model, blocks):
        yield from _of_element(plan, element, width, rows)


def _kv(model: Path, blocks: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """Element, its bytes, and the blocks: uint8 [blocks, block_bytes]."""
    prompt = Path(os.environ.get("TIERKV_PROMPT", REPOSITORY / "docs" / "architecture.md")).read_text()
    tokens = AutoTokenizer.from_pretrained(model)(prompt, return_tensors="pt").input_ids[:, : blocks * BLOCK_TOKENS]
    for element, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True)
        kept = DynamicCache()
        with torch.no_grad():
            loaded(tokens, past_key_values=kept, use_cache=True)
        shape = shape_of(kept, BLOCK_TOKENS)
        rows = np.empty((tokens.shape[1] // BLOCK_TOKENS, shape.block_bytes), np.uint8)
        CacheSource(kept, shape).read_blocks(0, rows)
        yield element, dtype.itemsize, rows
        if element == "bfloat16" and (numbers := shape.kv_shape) is not None:
            codec = codec_of(FP8, numbers)
            coded = np.empty((len(rows), sum(codec.block_bytes)), np.uint8)
            if codec.encode(rows, coded) != len(rows):
                raise ValueError("some of the model's KV is not finite")
            yield "bfloat16 as fp8", 1, coded


def _of_element(plan: Plan, element: str, width: int, rows: np.ndarray) -> Iterator[Figure]:
    stored = {variant.name: _encode_all(variant.codec, rows) for variant in variants(width)}
    target = np.empty_like(rows)
    works: dict[str, Work] = {"copy": _timed(lambda: np.copyto(target, rows))}
    for variant in variants(width):
        works[f"{variant.name} encode"] = _timed(lambda codec=variant.codec: _encode_all(codec, rows))
        works[f"{variant.name} decode"] = _timed(
            lambda codec=variant.codec, of=stored[variant.name]: _decode_all(codec, of, target)
        )
        _decode_all(variant.codec, stored[variant.name], target)
        if not np.array_equal(target, rows):
            raise ValueError(f"{element}, {variant.name}: blocks have not come back as they were")
    seconds = alternate(plan.rounds(9, 3), works)
    rates = {name: [rows.nbytes / one / 1e9 for one in each] for name, each in seconds.items()}
    for variant in variants(width):
        labels = {"what": "lossless", "element": element, "system": variant.name}
        smaller = rows.nbytes / sum(map(len, stored[variant.name]))
        yield of_values(f"{element}, {variant.name}: ratio", [smaller], unit="x", labels=labels | {"part": "ratio"})
        for part in ("encode", "decode"):
            yield of_values(
                f"{element}, {variant.name}: {part}",
                rates[f"{variant.name} {part}"],
                unit="GB/s",
                beside="a copy",
                limit=rates["copy"],
                labels=labels | {"part": part},
            )


def _encode_all(codec: PlaneCodec, rows: np.ndarray) -> list[bytes]:
    """What does not become smaller counts as it is, as in a file."""
    return [codec.encode(row.data, len(row)) or row.tobytes() for row in rows]


def _decode_all(codec: PlaneCodec, stored: list[bytes], target: np.ndarray) -> None:
    for block, row in zip(stored, target, strict=True):
        if len(block) == len(row):
            row[:] = np.frombuffer(block, np.uint8)
        else:
            codec.decode(memoryview(block), row.data)


def _timed(work: Callable[[], object]) -> Work:
    def run(_number: int) -> float:
        start = time.thread_time()
        work()
        return time.thread_time() - start

    return run
