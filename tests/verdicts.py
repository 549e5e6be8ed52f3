"""Verdicts as an eval would have written them, for nodes that are to store with a lossy codec."""

from __future__ import annotations

from pathlib import Path

from tierkv.core.codec_gate import CODECS
from tierkv.core.eval_results import Measured, Needles, Thresholds
from tierkv.storage.directory import DataDirectory
from tierkv.storage.verdicts import Verdict, write_verdict

FP8 = CODECS["fp8"]
LIMITS = Thresholds(min_agreement=0.9, max_kl=0.1, max_perplexity_ratio=1.1, min_retrieval=0.9)


def measured(
    *,
    agreement: float = 0.99,
    kl: float = 0.001,
    coded_perplexity: float = 10.0,
    raw_found: int = 8,
    both_found: int = 8,
) -> Measured:
    """Good in all respects but those that are given."""
    return Measured(
        prompts=4,
        positions=800,
        agreement=agreement,
        kl=kl,
        kl_p99=2 * kl,
        raw_perplexity=10.0,
        coded_perplexity=coded_perplexity,
        generated=128,
        generated_agreement=0.9,
        needles=(Needles(context_tokens=512, depth=0.5, asked=10, raw_found=raw_found, both_found=both_found),),
    )


def verdict(weights: str, adapter: str = "", *, codec: str = FP8, result: Measured | None = None) -> Verdict:
    return Verdict(
        weights=weights,
        adapter=adapter,
        codec=codec,
        model_name="a model",
        made=1_800_000_000.0,
        prompts="12" * 32,
        block_tokens=16,
        long_context=False,
        limits=LIMITS,
        measured=result or measured(),
        versions={"torch": "2"},
    )


def write_passing(data_dir: Path, weights: str, adapter: str = "") -> None:
    """What lets a node with codec = fp8 and this data directory, which is made where it is absent, store blocks of
    these weights with fp8. No node may be running there that is just being made."""
    with DataDirectory.open(data_dir) as directory:
        write_verdict(directory, verdict(weights, adapter))
