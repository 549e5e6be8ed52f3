"""What the model says behind a prefix that was kept as it is, and behind the same one coded.

    prompt    [ prefix, kept over some turns           | continuation                     ]
    compared                                             at each token the prediction of the next one
    then      [ all full blocks kept                                            | rest ] -> generated greedily

Each prediction is made from the true tokens before it, so one difference does not make all that follow it differ; in
what is generated it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tierkv.core.codec import BlockCodec
from tierkv.evaluation.kept_prefix import KeptPrefix, RawBlocks, read_on, run
from tierkv.integrations.kv_blocks import BlockShape

TURNS = 4
MOST_CONTINUED = 512
READ_TOKENS = 128
"""Read on at once: each has a logit for every word of the vocabulary."""

GENERATED_TOKENS = 32
GENERATED_PROMPTS = 16
"""Of so many prompts, the first ones: generating takes a pass for each token."""

WORST = 1e9
"""Stands for what is not finite: a codec that breaks the model is bad, and JSON has no infinity."""


@dataclass(slots=True)
class Compared:
    """Sums over all tokens that were compared; logarithms are natural. `known`: those whose successor is known."""

    agreeing: int = 0
    divergences: list[float] = field(default_factory=list)
    known: int = 0
    raw_loss: float = 0.0
    coded_loss: float = 0.0
    generated: int = 0
    generated_agreeing: int = 0

    @property
    def positions(self) -> int:
        return len(self.divergences)

    def add(self, raw: torch.Tensor, coded: torch.Tensor, next_tokens: torch.Tensor) -> None:
        """Logits [n, vocabulary] of both, and the tokens that follow: [n], or [n - 1] at the end of a prompt."""
        one, other = raw.log_softmax(-1), coded.log_softmax(-1)
        self.agreeing += int((raw.argmax(-1) == coded.argmax(-1)).sum())
        divergence = (one.exp() * (one - other)).sum(-1).clamp_min(0.0)
        self.divergences += torch.nan_to_num(divergence, nan=WORST, posinf=WORST).tolist()
        count = len(next_tokens)
        picked = next_tokens.unsqueeze(-1)
        self.known += count
        self.raw_loss -= float(one[:count].gather(-1, picked).sum())
        self.coded_loss -= float(other[:count].gather(-1, picked).sum())


def split_point(num_tokens: int, block_tokens: int) -> int:
    """Tokens of the prefix: about half of the prompt, in whole blocks; 0 for a prompt that is too short."""
    prefix = num_tokens // 2 // block_tokens * block_tokens
    return prefix if num_tokens - prefix >= 2 else 0


def compare(
    model: Any,
    shape: BlockShape,
    codec: BlockCodec,
    tokens: torch.Tensor,
    found: Compared,
    *,
    generate: bool,
) -> None:
    """Add one prompt, int64 [1, n], whose `split_point` is not 0."""
    prefix = split_point(tokens.shape[1], shape.block_tokens)
    end = min(tokens.shape[1], prefix + MOST_CONTINUED)
    kept = [KeptPrefix(model, shape, one) for one in (RawBlocks(shape), codec)]
    for one in kept:
        one.grow(tokens[:, :prefix], TURNS)
    caches = [one.load() for one in kept]
    for begin in range(prefix, end, READ_TOKENS):
        until = min(begin + READ_TOKENS, end)
        raw, coded = (read_on(model, tokens[:, begin:until], cache) for cache in caches)
        found.add(raw, coded, tokens[0, begin + 1 : until + 1])
    if generate:
        for one, cache in zip(kept, caches, strict=True):
            one.keep(cache)
        answers = [_generate(model, one, tokens[:, :end]) for one in kept]
        found.generated += GENERATED_TOKENS
        found.generated_agreeing += _length_of_common_start(*answers)


def _generate(model: Any, kept: KeptPrefix, tokens: torch.Tensor) -> list[int]:
    """The likeliest tokens after `tokens`, whatever they are: an end is a token like any other here."""
    cache = kept.load()
    if int(cache.get_seq_length()) == tokens.shape[1]:  # the last token has to be computed for what follows it
        _forget_last(cache)
    chosen: list[int] = []
    while True:
        chosen.append(int(run(model, tokens, cache).argmax(-1)))
        if len(chosen) == GENERATED_TOKENS:
            return chosen
        tokens = torch.cat([tokens, torch.tensor([[chosen[-1]]])], dim=1)


def _forget_last(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]


def _length_of_common_start(one: list[int], other: list[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        if left != right:
            return index
    return len(one)
