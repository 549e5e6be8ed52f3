"""One eval: all prompts and all needles, with a model that is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierkv.core.codec import BlockCodec
from tierkv.core.eval_results import Measured, Needles
from tierkv.errors import ConfigError
from tierkv.evaluation.continuations import GENERATED_PROMPTS, WORST, Compared, compare, split_point
from tierkv.evaluation.needles import Fact, search
from tierkv.integrations.kv_blocks import BlockShape

LEAST_POSITIONS = 200
"""Tokens that must be compared: a share of fewer says little about one token in twenty."""

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Haystack:
    """What needles are hidden in, how and how deep: see `needles`."""

    facts: Sequence[Fact]
    hay: Sequence[int]
    start: Sequence[int]
    lengths: Sequence[int]


def usable(prompts: Sequence[list[int]], block_tokens: int, context_tokens: int | None) -> list[list[int]]:
    """The prompts that are long enough, each cut to the model's context. ConfigError("prompts") where they give too
    little to compare."""
    cut = [prompt[:context_tokens] for prompt in prompts]
    long_enough = [prompt for prompt in cut if split_point(len(prompt), block_tokens)]
    if not long_enough:
        longest = max(map(len, prompts), default=0)
        raise ConfigError(
            "prompts",
            f"none has {2 * block_tokens} tokens, as it takes for a block of {block_tokens} and what follows it; "
            f"the longest has {longest}",
        )
    return long_enough


def measure(
    model: Any,
    shape: BlockShape,
    codec: BlockCodec,
    prompts: Sequence[list[int]],
    haystack: Haystack,
    tell: Tell = lambda _stage, _done, _total: None,
) -> Measured:
    """Of prompts that are `usable`. Raises ConfigError("prompts") where they give too little to compare, NotFinite."""
    found = Compared()
    with torch.no_grad():
        for number, prompt in enumerate(prompts):
            tell("prompts", number, len(prompts))
            compare(model, shape, codec, torch.tensor([prompt]), found, generate=number < GENERATED_PROMPTS)
        if found.positions < LEAST_POSITIONS:
            raise ConfigError(
                "prompts",
                f"they give {found.positions} tokens to compare (half of each prompt), and it takes {LEAST_POSITIONS}; "
                f"give more prompts, or longer ones",
            )
        needles: list[Needles] = []
        for number, length in enumerate(haystack.lengths):
            tell(f"retrieval in {length:,} tokens", number, len(haystack.lengths))
            needles += search(
                model,
                shape,
                codec,
                facts=haystack.facts,
                hay=haystack.hay,
                start=haystack.start,
                context_tokens=length,
            )
    return _sum_up(len(prompts), found, needles)


def _sum_up(num_prompts: int, found: Compared, needles: list[Needles]) -> Measured:
    ordered = sorted(found.divergences)
    return Measured(
        prompts=num_prompts,
        positions=found.positions,
        agreement=found.agreeing / found.positions,
        kl=sum(ordered) / len(ordered),
        kl_p99=ordered[math.ceil(len(ordered) * 0.99) - 1],
        raw_perplexity=_perplexity(found.raw_loss, found.known),
        coded_perplexity=_perplexity(found.coded_loss, found.known),
        generated=found.generated,
        generated_agreement=found.generated_agreeing / found.generated,
        needles=tuple(needles),
    )


def _perplexity(loss: float, count: int) -> float:
    """Finite, whatever the model has said."""
    mean = loss / count
    return math.exp(mean) if mean < math.log(WORST) else WORST
