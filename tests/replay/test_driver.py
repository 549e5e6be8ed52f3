from __future__ import annotations

import random
from typing import Any

import pytest

from tests.replay.small import BLOCK_BYTES, BLOCK_TOKENS, hits_of_lru, trace_of, trace_of_steps
from tierkv.core.prefix_tree import PrefixTree
from tierkv.core.value.lru import LeastRecentlyUsed
from tierkv.errors import ConfigError
from tierkv.replay.driver import Outcome, Setup, replay
from tierkv.replay.optimum import belady, infinite
from tierkv.replay.trace import Trace, TraceBuilder, TraceGroup, Verb

FILE = 4096 + BLOCK_BYTES
RESERVED = 2 * 4096 + BLOCK_BYTES  # what the core sets aside for a file of one block


def run(trace: Trace, blocks: int, *, policy: str = "lru", extent_blocks: int = 1, **rest: Any) -> Outcome:
    setup = Setup(policy=policy, host_bytes=blocks * BLOCK_BYTES, extent_blocks=extent_blocks, **rest)
    return replay(trace, setup)


def hits(outcome: Outcome) -> int:
    return outcome.hit_tokens // BLOCK_TOKENS


def random_trace(seed: int, prompts: int = 120) -> Trace:
    """Branching prompts of up to six blocks, some of them far more popular than others."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abc") for _ in range(draw.randint(1, 6))) for _ in range(30)]
    return trace_of(*(draw.choice(words[: draw.randint(1, 30)]) for _ in range(prompts)))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [6, 9, 20])
def test_extents_of_one_block_under_lru_are_a_plain_lru(seed: int, capacity: int) -> None:
    trace = random_trace(seed)
    assert hits(run(trace, capacity)) == hits_of_lru(trace, capacity)


def test_with_room_for_all_nothing_is_lost_and_nothing_evicted() -> None:
    trace = random_trace(1)
    outcome = run(trace, trace.num_blocks)
    assert outcome.hit_tokens == infinite(trace, 12_000.0).hit_tokens
    assert outcome.saved_seconds == pytest.approx(infinite(trace, 12_000.0).saved_seconds)
    assert outcome.stored_bytes == trace.num_bytes
    assert sum(outcome.evicted_blocks.values()) == 0


@pytest.mark.parametrize("extent_blocks", [1, 2, 8])
def test_nothing_beats_the_optimum(extent_blocks: int) -> None:
    for seed in range(4):
        trace = random_trace(seed)
        bound = belady(trace, 9 * BLOCK_BYTES, 12_000.0)
        assert bound is not None
        assert 0 < run(trace, 9, extent_blocks=extent_blocks).hit_tokens <= bound.hit_tokens


def test_a_fault_in_the_order_of_eviction_changes_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of("a", "x", "a", "y", "a", "z", "a")
    assert hits(run(trace, 2)) == 3
    monkeypatch.setattr(LeastRecentlyUsed, "key", lambda _order, extent, index: -extent.used_at(index))
    assert hits(run(trace, 2)) < 3


def test_a_fault_in_how_the_core_looks_up_changes_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = random_trace(2)
    before = hits(run(trace, 9))
    walk = PrefixTree.walk
    monkeypatch.setattr(PrefixTree, "walk", lambda tree, group, keys: walk(tree, group, keys)[:1])
    assert hits(run(trace, 9)) < before


def test_what_left_memory_is_found_on_nvme_and_charged_for() -> None:
    trace = trace_of("ab", "cd", "ab")
    outcome = run(trace, 2, nvme_bytes=4 * RESERVED, load_bytes_per_second=float(BLOCK_BYTES), prefill_rate=1.0)
    assert (outcome.host_hit_tokens, outcome.nvme_hit_tokens) == (0, 2 * BLOCK_TOKENS)
    assert outcome.load_seconds == pytest.approx(2.0)
    assert outcome.saved_seconds == pytest.approx(infinite(trace, 1.0).saved_seconds - 2.0)
    assert outcome.read_bytes == 2 * BLOCK_BYTES
    assert outcome.written_bytes == 4 * FILE
    assert outcome.evicted_blocks == {"host": 4, "nvme": 0}


def test_without_nvme_it_is_lost() -> None:
    assert hits(run(trace_of("ab", "cd", "ab"), 2)) == 0


def test_nvme_evicts_at_its_own_capacity() -> None:
    outcome = run(trace_of("ab", "cd", "ef", "gh"), 2, nvme_bytes=4 * RESERVED)
    assert outcome.evicted_blocks["nvme"] > 0


def test_a_drive_that_is_slower_than_what_is_stored_turns_blocks_away() -> None:
    """What is not written yet may not leave memory, so there is no room for the next."""
    trace = trace_of("ab", "cd", "ef", gap=1.0)
    slow = run(trace, 2, nvme_bytes=8 * RESERVED, write_bytes_per_second=FILE / 10)
    assert slow.refused_blocks == {"no_room": 4}
    fast = run(trace, 2, nvme_bytes=8 * RESERVED, write_bytes_per_second=FILE * 10)
    assert fast.refused_blocks == {}
    assert fast.written_bytes == 6 * FILE


def test_a_prompt_larger_than_the_cache_is_kept_as_far_as_it_goes() -> None:
    outcome = run(trace_of("abcd", "abcd"), 3)
    assert hits(outcome) == 3
    assert outcome.refused_blocks == {"no_room": 2}


def test_questions_store_nothing() -> None:
    trace = trace_of_steps((Verb.ASK, "ab"), (Verb.ASK, "ab"), (Verb.STORE, "abc"), (Verb.ASK, "abc"))
    outcome = run(trace, 4)
    assert hits(outcome) == 3
    assert outcome.asked_tokens == 7 * BLOCK_TOKENS


def test_groups_of_several_block_sizes_share_the_memory() -> None:
    builder = TraceBuilder()
    for name, size in (("small", 4096), ("large", 65_536)):
        group = builder.add_group(TraceGroup(name, 4, size))
        for time in range(3):
            builder.add(float(time), Verb.SERVE, group, builder.path(group, "abc"), 12)
    trace = builder.build("two sizes", "")
    outcome = replay(trace, Setup(policy="lru", host_bytes=2 * 64 * 2**20))
    assert outcome.hit_tokens == 2 * 2 * 12


def test_a_capacity_that_holds_no_block_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hold no block"):
        replay(trace_of("a"), Setup(policy="lru", host_bytes=BLOCK_BYTES - 1))
