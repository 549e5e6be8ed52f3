"""Facts hidden in a long context, and asked for at its end: what a lossy prefix loses first.

    [ the user's prompts, one behind the other, as long as is wanted, with facts at several depths ] question -> answer

The context is kept as a node keeps it; then each fact is asked for on its own, behind the same context. It counts as
recalled when every token of its answer is the likeliest one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch

from tierkv.core.codec import BlockCodec
from tierkv.core.eval_results import Needles
from tierkv.evaluation.kept_prefix import KeptPrefix, RawBlocks, read_on
from tierkv.integrations.kv_blocks import BlockShape

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (512, 1_024)
LONG_LENGTHS = (2_048, 8_192, 32_768)
FACTS_EACH = 2
TURNS = 2
QUESTION_ROOM = 96
"""Tokens of a context that are left free, for the question and its answer."""

NAMES = ("Lisbon", "Oslo", "Cairo", "Lima", "Quito", "Seoul", "Paris", "Delhi", "Tokyo", "Rome")
CODES = ("48213", "70956", "13684", "95027", "36471", "82590", "61348", "27805", "50739", "94162")


@dataclass(frozen=True, slots=True)
class Fact:
    depth: float
    statement: list[int]
    question: list[int]
    answer: list[int]


def lengths_for(context_tokens: int | None, *, long_context: bool) -> list[int]:
    """Contexts that fit into a model's. The longest one of those asked for is cut to what there is room for."""
    wanted = LENGTHS + LONG_LENGTHS if long_context else LENGTHS
    if context_tokens is None:
        return list(wanted)
    return sorted({min(length, context_tokens) for length in wanted})


def make_facts(encode: Callable[[str], list[int]]) -> list[Fact]:
    """FACTS_EACH for every depth. `encode` makes token ids of a text, with nothing added."""
    facts = []
    for number, depth in enumerate(depth for depth in DEPTHS for _ in range(FACTS_EACH)):
        name, code = NAMES[number % len(NAMES)], CODES[number % len(CODES)]
        facts.append(
            Fact(
                depth,
                encode(f"\nThe secret code of {name} is {code}.\n"),
                encode(f"\nQuestion: What is the secret code of {name}? Answer: The secret code of {name} is"),
                encode(f" {code}"),
            )
        )
    return facts


def hide(facts: Sequence[Fact], hay: Sequence[int], start: Sequence[int], context_tokens: int) -> list[int]:
    """`context_tokens` token ids less QUESTION_ROOM: `start` (what the tokenizer puts first), then hay over and over,
    with each fact at its depth."""
    room = context_tokens - QUESTION_ROOM - len(start) - sum(len(fact.statement) for fact in facts)
    straw = list(islice(cycle(hay), max(0, room)))
    made, used = list(start), 0
    for fact in facts:
        until = round(len(straw) * fact.depth)
        made += straw[used:until] + fact.statement
        used = until
    return made + straw[used:]


def recall(model: Any, shape: BlockShape, codec: BlockCodec, context: list[int], facts: Sequence[Fact]) -> list[bool]:
    """Which facts are recalled behind the context."""
    tokens = torch.tensor([context])
    kept = KeptPrefix(model, shape, codec)
    kept.grow(tokens, TURNS)
    cache = kept.load()
    before = [(layer.keys, layer.values) for layer in cache.layers]
    rest = context[kept.num_tokens :]
    recalled = []
    for fact in facts:
        asked = torch.tensor([rest + fact.question + fact.answer[:-1]])
        logits = read_on(model, asked, cache)
        recalled.append(logits[-len(fact.answer) :].argmax(-1).tolist() == fact.answer)
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            layer.keys, layer.values = keys, values
    return recalled


def search(
    model: Any,
    shape: BlockShape,
    codec: BlockCodec,
    *,
    facts: Sequence[Fact],
    hay: Sequence[int],
    start: Sequence[int],
    context_tokens: int,
) -> list[Needles]:
    """One row for each depth."""
    context = hide(facts, hay, start, context_tokens)
    raw = recall(model, shape, RawBlocks(shape), context, facts)
    coded = recall(model, shape, codec, context, facts)
    rows = []
    for depth in DEPTHS:
        found = [(one, other) for fact, one, other in zip(facts, raw, coded, strict=True) if fact.depth == depth]
        rows.append(
            Needles(
                context_tokens=context_tokens,
                depth=depth,
                asked=len(found),
                raw_found=sum(one for one, _ in found),
                both_found=sum(one and other for one, other in found),
            )
        )
    return rows
