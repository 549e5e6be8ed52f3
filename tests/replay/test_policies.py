"""Policies on cuts of real traces, each beside others of the same run."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.replay.small import hits_of_lru
from tierkv.replay.capacity import Capacity
from tierkv.replay.driver import Setup, replay
from tierkv.replay.formats import read_trace
from tierkv.replay.optimum import belady, infinite
from tierkv.replay.reading import ReadOptions
from tierkv.replay.trace import Trace

TRACES = Path(__file__).parent / "traces"
NAMES = ("mooncake_conversation", "mooncake_synthetic", "agent_sessions")


@cache
def trace_of(name: str) -> Trace:
    return read_trace(TRACES / f"{name}.jsonl.xz", ReadOptions())


@cache
def hit_rate(name: str, capacity: str, policy: str) -> float:
    """With extents of one block."""
    trace = trace_of(name)
    host_bytes = Capacity.parse(capacity).bytes_of(trace)
    outcome = replay(trace, Setup(policy=policy, host_bytes=host_bytes, extent_blocks=1))
    return outcome.hit_tokens / outcome.asked_tokens


@pytest.mark.parametrize("name", NAMES)
def test_the_core_with_lru_is_a_plain_lru_of_blocks(name: str) -> None:
    trace = trace_of(name)
    blocks = Capacity.parse("3%").bytes_of(trace) // 512 // ReadOptions().token_bytes
    assert hit_rate(name, "3%", "lru") == pytest.approx(512 * hits_of_lru(trace, blocks) / trace.asked_tokens)


@pytest.mark.parametrize(
    ("name", "optimum", "forever"),
    [("mooncake_conversation", 0.277, 0.342), ("mooncake_synthetic", 0.273, 0.694), ("agent_sessions", 0.375, 0.951)],
)
def test_the_bounds_of_a_cut_stay_what_they_are(name: str, optimum: float, forever: float) -> None:
    trace = trace_of(name)
    bound = belady(trace, Capacity.parse("3%").bytes_of(trace), 12_000.0)
    assert bound is not None
    assert bound.hit_tokens / trace.asked_tokens == pytest.approx(optimum, abs=0.0006)
    assert infinite(trace, 12_000.0).hit_tokens / trace.asked_tokens == pytest.approx(forever, abs=0.0006)
