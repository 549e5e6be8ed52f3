from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest

from tests.replay.small import BLOCK_BYTES, BLOCK_TOKENS, trace_of, trace_of_steps
from tierkv.core.value.cost import prefill_seconds
from tierkv.replay.optimum import belady, infinite
from tierkv.replay.trace import Trace, TraceBuilder, TraceGroup, Verb

RATE = 1_000.0


def hits(trace: Trace, blocks: int) -> int:
    bound = belady(trace, blocks * BLOCK_BYTES, RATE)
    assert bound is not None
    return bound.hit_tokens // BLOCK_TOKENS


def most_hits(trace: Trace, capacity: int) -> int:
    """By trying every set of blocks that could be kept after each step."""

    @cache
    def from_step(number: int, there: frozenset[int]) -> int:
        if number == len(trace.steps):
            return 0
        blocks = list(trace.steps[number].blocks)
        found = next((index for index, block in enumerate(blocks) if block not in there), len(blocks))
        offered = sorted(there | set(blocks))
        kept = (set(some) for size in range(min(capacity, len(offered)) + 1) for some in combinations(offered, size))
        return found + max(from_step(number + 1, frozenset(some)) for some in kept)

    return from_step(0, frozenset())


@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_of_what_to_keep_has_more_hits(seed: int) -> None:
    draw = random.Random(seed)
    prompts = ["".join(draw.choice("ab") for _ in range(draw.randint(1, 3))) for _ in range(7)]
    trace = trace_of(*prompts)
    for capacity in (1, 2, 3):
        assert hits(trace, capacity) == most_hits(trace, capacity), prompts


def test_what_is_new_may_be_refused() -> None:
    """LRU would lose "a" to each of the others."""
    assert hits(trace_of("a", "x", "a", "y", "a", "z", "a"), 1) == 3


def test_only_what_was_stored_can_be_found() -> None:
    trace = trace_of_steps((Verb.ASK, "ab"), (Verb.ASK, "ab"), (Verb.STORE, "ab"), (Verb.ASK, "abc"))
    assert hits(trace, 4) == 2
    assert infinite(trace, RATE).hit_tokens == 2 * BLOCK_TOKENS


def test_infinite_finds_everything_that_was_ever_stored() -> None:
    trace = trace_of("abc", "xyz", "abd", "xyz")
    assert infinite(trace, RATE).hit_tokens == 5 * BLOCK_TOKENS
    assert belady(trace, trace.num_bytes, RATE) == infinite(trace, RATE)


def test_seconds_are_those_of_the_blocks_that_were_found() -> None:
    bound = infinite(trace_of("abc", "abd"), RATE)
    assert bound.saved_seconds == pytest.approx(prefill_seconds(2 * BLOCK_TOKENS, 0, RATE))


def test_among_blocks_of_several_sizes_there_is_no_answer() -> None:
    builder = TraceBuilder()
    for size in (1, 2):
        group = builder.add_group(TraceGroup("g", 4, size))
        builder.add(0.0, Verb.SERVE, group, builder.path(group, "a"), 4)
    assert belady(builder.build("mixed", ""), 10, RATE) is None
