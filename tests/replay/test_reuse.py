from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.replay.small import BLOCK_BYTES, BLOCK_TOKENS, hits_of_lru, trace_of, trace_of_steps
from tests.replay.test_driver import random_trace
from tierkv.core.value.cost import prefill_seconds
from tierkv.replay.optimum import infinite
from tierkv.replay.reuse import Found, reuse_curve
from tierkv.replay.sizing import Demand, Point, Sizing, size
from tierkv.replay.trace import Trace, TraceBuilder, TraceGroup, Verb

RATE = 1_000.0


@pytest.mark.parametrize("seed", range(10))
def test_at_every_capacity_the_curve_is_what_lru_finds(seed: int) -> None:
    trace = random_trace(seed)
    curve = reuse_curve(trace, RATE)
    longest = max(len(step.blocks) for step in trace.steps)
    for blocks in range(longest, trace.num_blocks + 2):
        assert curve.at(blocks * BLOCK_BYTES).tokens == hits_of_lru(trace, blocks) * BLOCK_TOKENS


def test_its_end_is_a_cache_that_never_forgets() -> None:
    trace = random_trace(3)
    curve, most = reuse_curve(trace, RATE), infinite(trace, RATE)
    assert curve.ceiling.tokens == most.hit_tokens
    assert curve.ceiling.seconds == pytest.approx(most.saved_seconds)
    assert curve.at(curve.ceiling_bytes - 1).tokens < curve.ceiling.tokens
    assert curve.at(0) == Found()


def test_a_hit_needs_its_block_and_all_that_was_used_since() -> None:
    curve = reuse_curve(trace_of("ab", "xyz", "ab"), RATE)
    assert curve.needs == [4 * BLOCK_BYTES, 5 * BLOCK_BYTES]
    assert curve.found[0] == Found(BLOCK_TOKENS, pytest.approx(prefill_seconds(BLOCK_TOKENS, 0, RATE)), BLOCK_BYTES)


def test_what_nobody_stored_is_not_found_and_takes_no_room() -> None:
    trace = trace_of_steps((Verb.STORE, "ab"), (Verb.ASK, "xyz"), (Verb.ASK, "abc"), (Verb.ASK, "abc"))
    curve = reuse_curve(trace, RATE)
    assert curve.needs == [BLOCK_BYTES, 2 * BLOCK_BYTES]
    assert curve.ceiling.tokens == 4 * BLOCK_TOKENS


def test_blocks_of_several_sizes_count_as_they_are() -> None:
    builder = TraceBuilder()
    small, large = (builder.add_group(TraceGroup(str(size), 4, size)) for size in (10, 1000))
    for time, group in enumerate((small, large, small)):
        builder.add(float(time), Verb.SERVE, group, builder.path(group, "a"), 4)
    assert reuse_curve(builder.build("two sizes", ""), RATE).needs == [1010]


def test_the_knee_is_where_most_is_had_for_little() -> None:
    """Nineteen of twenty hits need two blocks, the last one a dozen."""
    prompts = ["a", "x"] * 20 + list("bcdefghijk") + ["x"]
    curve = reuse_curve(trace_of(*prompts), RATE)
    assert curve.knee_bytes() == 2 * BLOCK_BYTES
    assert curve.need_for(0.9) == 2 * BLOCK_BYTES
    assert curve.ceiling_bytes == 11 * BLOCK_BYTES


def test_a_trace_without_reuse_has_no_curve() -> None:
    curve = reuse_curve(trace_of("a", "b"), RATE)
    assert (curve.ceiling_bytes, curve.knee_bytes(), curve.need_for(0.9)) == (0, 0, 0)
    assert curve.at(2**40) == Found()


# ---- sizes


def sizing(trace: Trace, *, host: int | None = None, nvme: int | None = None, step: int = BLOCK_BYTES) -> Sizing:
    load_rate = BLOCK_BYTES / 1e-4  # a tenth of a millisecond a block
    demand = Demand.of(trace, RATE)
    return size(demand, load_rate=load_rate, host_bytes=host, nvme_bytes=nvme, step_bytes=step)


def test_seconds_are_those_of_a_day() -> None:
    trace = trace_of("ab", "ab", gap=43_200.0)
    made = sizing(trace)
    assert trace.seconds == 43_200.0
    assert made.ceiling.host_seconds == pytest.approx(2 * infinite(trace, RATE).saved_seconds)
    assert made.ceiling.hit_rate == pytest.approx(0.5)


def test_the_next_step_is_what_it_would_add() -> None:
    made = sizing(trace_of("a", "b", "a", gap=43_200.0), host=BLOCK_BYTES)
    assert made.host.host_seconds == 0.0
    assert made.host.host_next == pytest.approx(made.ceiling.host_seconds)
    assert made.ceiling.host_next == 0.0


def test_nvme_saves_what_memory_does_not_hold_less_its_loading() -> None:
    trace = trace_of("a", "b", "a", gap=43_200.0)  # a day, and one hit that needs two blocks
    made = sizing(trace, host=BLOCK_BYTES, nvme=2 * BLOCK_BYTES)
    assert made.nvme is not None
    assert made.nvme.nvme_seconds == pytest.approx(infinite(trace, RATE).saved_seconds - 1e-4)
    assert made.nvme.nvme_next == 0.0
    assert sizing(trace, host=BLOCK_BYTES, nvme=BLOCK_BYTES).nvme == Point(
        capacity_bytes=BLOCK_BYTES,
        hit_rate=0.0,
        host_seconds=0.0,
        host_next=pytest.approx(infinite(trace, RATE).saved_seconds),
        nvme_seconds=None,
        nvme_next=None,
    )


def test_files_that_take_more_than_memory_need_more_room() -> None:
    demand = replace(Demand.of(trace_of("a", "b", "a"), RATE), file_factor=1.5)
    for nvme, found in ((2 * BLOCK_BYTES, False), (3 * BLOCK_BYTES, True)):
        made = size(demand, load_rate=1e12, host_bytes=BLOCK_BYTES, nvme_bytes=nvme, step_bytes=BLOCK_BYTES)
        assert made.nvme is not None
        assert bool(made.nvme.nvme_seconds) is found


def test_capacities_are_round_and_go_up_to_the_ceiling() -> None:
    draw = random.Random(1)
    made = sizing(trace_of(*("".join(draw.choices("abcdef", k=4)) for _ in range(50))))
    sizes = [point.capacity_bytes for point in made.points]
    assert sizes == sorted(sizes)
    assert sizes[-1] // 2 < made.ceiling.capacity_bytes <= sizes[-1]
    assert all(one & (one - 1) == 0 for one in sizes)
