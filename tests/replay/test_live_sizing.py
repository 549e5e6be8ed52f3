"""The node's two estimates, each against what it is an estimate of, on cuts of real traces."""

from __future__ import annotations

from bisect import bisect_right
from functools import cache
from hashlib import blake2b
from itertools import accumulate

import pytest

from tests.core.simulation import make_group
from tests.core.test_reuse_sample import LIMITS
from tests.replay.test_policies import trace_of
from tierkv.core.counters import Counters
from tierkv.core.ledger import Ledger
from tierkv.core.live_sizing import EDGES, LiveSizing
from tierkv.core.reuse_sample import MAX_SAMPLES
from tierkv.core.size_report import SizeReport
from tierkv.replay.driver import Outcome, Setup, _Run
from tierkv.replay.reuse import ReuseCurve, reuse_curve
from tierkv.replay.trace import Trace

pytestmark = pytest.mark.timeout(300)  # processor time that others may want too

RATE = 12_000.0
TRACES = ("mooncake_conversation", "agent_sessions", "mooncake_synthetic")


@cache
def exact(name: str) -> ReuseCurve:
    return reuse_curve(trace_of(name), RATE)


def sampled(name: str, max_samples: int, salt: int = 0) -> SizeReport:
    trace = trace_of(name)
    (group,) = trace.groups
    spec = make_group(block_tokens=group.block_tokens, block_bytes=group.block_bytes)
    of = Ledger(LIMITS, [0]).add_group(spec)
    keys = [blake2b(b"%d %d" % (salt, block), digest_size=32).digest() for block in range(trace.num_blocks)]
    live = LiveSizing(Counters(), lambda _key: of, lambda _group: RATE, 8 * group.block_bytes, max_samples=max_samples)
    for step in trace.steps:
        live.asked(of, b"".join(map(keys.__getitem__, step.blocks)), step.time)
        live.step()
    return live.report(86_400.0, trace.steps[-1].time)


def errors(name: str, report: SizeReport) -> list[float]:
    """At each capacity that is told apart, from a thousandth of what the trace would fill up to that: points of the hit
    rate that the estimate is off."""
    trace, curve = trace_of(name), exact(name)
    filled, asked = trace.num_bytes, trace.asked_tokens
    sums = list(accumulate((gain.tokens for gain in report.gains), initial=0.0))
    needs = [gain.need_bytes for gain in report.gains]
    return [
        100 * (sums[bisect_right(needs, edge)] - curve.at(edge).tokens) / asked
        for edge in EDGES
        if filled / 1_000 < edge < filled
    ]


@pytest.mark.parametrize("name", TRACES)
def test_a_sample_of_all_blocks_is_exact(name: str) -> None:
    report = sampled(name, 100_000)
    assert report.rate == 1.0
    assert max(map(abs, errors(name, report))) < 1e-6
    assert sum(gain.seconds for gain in report.gains) == pytest.approx(exact(name).ceiling.seconds)
    assert sum(gain.num_bytes for gain in report.gains) == pytest.approx(exact(name).ceiling.num_bytes)


@pytest.mark.parametrize(
    ("name", "samples", "mean", "worst"),
    [
        ("mooncake_conversation", MAX_SAMPLES, 0.6, 2.0),
        ("mooncake_conversation", 4_096, 0.8, 2.5),
        ("mooncake_conversation", 1_024, 1.5, 4.5),
        ("agent_sessions", 1_024, 1.5, 4.5),
        ("mooncake_synthetic", 1_024, 1.5, 4.5),
    ],
)
def test_a_sample_of_few_blocks_is_off_by_no_more_than_so_many_points(
    name: str, samples: int, mean: float, worst: float
) -> None:
    """Of the hit rate, at any capacity; `mean` over all of them. Several choices of blocks, by other keys. Measured
    over eight of them: 0.28 and 0.66 with 8,192 of 43,914 blocks, 0.49 and 1.45 with 4,096, and with 1,024 of the
    trace where it fares worst 1.09 and 3.34."""
    for salt in range(4):
        report = sampled(name, samples, salt)
        assert report.samples <= samples
        off = [abs(error) for error in errors(name, report)]
        assert sum(off) / len(off) < mean
        assert max(off) < worst


@pytest.mark.parametrize(
    ("name", "worst"), [("mooncake_conversation", 2.5), ("agent_sessions", 3.0), ("mooncake_synthetic", 7.0)]
)
def test_what_regrets_say_of_twice_the_room_is_what_the_policy_makes_of_it(name: str, worst: float) -> None:
    """From 5 % of what each trace would fill to 10 %. In percent of the tokens 26.1 is told of the conversation and
    25.3 found, 71.8 and 72.5 of the sessions, 30.3 and 25.7 of the synthetic trace."""
    trace = trace_of(name)
    small, large = (int(trace.num_bytes * share) for share in (0.05, 0.1))
    outcome, report = run(trace, small)
    told = outcome.hit_tokens + sum(gain.tokens for gain in report.more_gains if gain.more_bytes <= large - small)
    found = run(trace, large)[0].hit_tokens
    assert found > 1.2 * outcome.hit_tokens  # or there would be nothing to tell
    assert 100 * abs(told - found) / trace.asked_tokens < worst


def run(trace: Trace, host_bytes: int) -> tuple[Outcome, SizeReport]:
    driven = _Run(trace, Setup(policy="density", host_bytes=host_bytes, extent_blocks=8))
    for step in trace.steps:
        driven.step(step)
    return driven.outcome(), driven._state.size_report(86_400.0, trace.steps[-1].time)
