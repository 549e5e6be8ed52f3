from __future__ import annotations

import pytest

from tests.replay.small import BLOCK_BYTES, trace_of
from tierkv.replay.trace import TraceBuilder, TraceGroup, Verb, spread_ticks


def test_an_id_behind_another_prefix_is_another_block() -> None:
    trace = trace_of("abx", "aby", "bx")
    assert trace.num_blocks == 6
    assert [list(step.blocks) for step in trace.steps] == [[0, 1, 2], [0, 1, 3], [4, 5]]


def test_the_same_ids_in_another_group_are_other_blocks() -> None:
    builder = TraceBuilder()
    groups = [builder.add_group(TraceGroup(name, 4, size)) for name, size in (("one", 10), ("two", 30))]
    for group in groups:
        builder.add(0.0, Verb.SERVE, group, builder.path(group, "ab"), 8)
    trace = builder.build("two groups", "")
    assert trace.num_blocks == 4
    assert trace.num_bytes == 2 * 10 + 2 * 30
    assert trace.block_bytes is None


def test_steps_are_put_in_the_order_of_their_times() -> None:
    builder = TraceBuilder()
    group = builder.add_group(TraceGroup("g", 4, 1))
    for time in (2.0, 1.0, 3.0):
        builder.add(time, Verb.SERVE, group, builder.path(group, "a"), 4)
    assert [step.time for step in builder.build("t", "").steps] == [1.0, 2.0, 3.0]


def test_sums_count_questions_and_not_what_is_stored_behind_them() -> None:
    asked, stored = trace_of("ab", "c"), trace_of("ab", verb=Verb.STORE)
    assert (asked.num_requests, asked.asked_tokens, asked.num_bytes) == (2, 12, 3 * BLOCK_BYTES)
    assert (stored.num_requests, stored.asked_tokens) == (0, 0)


def test_keys_differ() -> None:
    keys = trace_of("abc", "abd").block_keys()
    assert len(set(keys)) == len(keys) == 4
    assert {len(key) for key in keys} == {32}


def test_requests_of_one_tick_are_laid_over_the_time_to_the_next() -> None:
    assert list(spread_ticks([0.0, 0.0, 0.0, 3.0, 3.0], 3.0)) == pytest.approx([0.0, 1.0, 2.0, 3.0, 4.5])


def test_a_tick_is_never_longer_than_the_clock_says() -> None:
    assert list(spread_ticks([0.0, 0.0, 90.0], 3.0)) == pytest.approx([0.0, 1.5, 90.0])
