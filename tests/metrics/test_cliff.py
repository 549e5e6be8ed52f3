"""What a restart has cost, reckoned by hand beside the code."""

from __future__ import annotations

import pytest

from tierkv.core.starts import LastEnd, Start, StartKind, Window
from tierkv.metrics import LATENCY_BOUNDS, Latency
from tierkv.metrics.cliff import cliff_of, figures, quantile

RATE = 1_000.0


def window(begins: float, ends: float, *, asked: int, hit: int, wait: float = 0.0, acquires: int = 10) -> Window:
    latency = Latency()
    for _ in range(acquires):
        latency.observe(wait)
    return Window(
        begins=begins,
        seconds=ends - begins,
        asked_tokens=asked,
        hit_tokens={"host": hit},
        waits=latency.counts,
        wait_seconds=latency.total_seconds,
        asked_prefill_seconds=asked / RATE,
        missed_prefill_seconds=(asked - hit) / RATE,
    )


BEFORE = window(600.0, 2_400.0, asked=1_800_000, hit=1_440_000)  # 80 %, 1,000 tokens a second


def start(*windows: Window, before: Window | None = BEFORE, **changes: object) -> Start:
    values = {
        "number": 1,
        "kind": StartKind.NODE,
        "began": 0.0,
        "last_end": LastEnd.KILLED,
        "rate": RATE,
        "is_ready": True,
        "ready_seconds": 4.0,
    }
    return Start(**(values | {"windows": windows, "before": before} | changes))


def test_the_first_minute_is_held_against_what_was_usual_before() -> None:
    found = cliff_of(
        start(
            window(0, 5, asked=5_000, hit=0),
            window(5, 60, asked=55_000, hit=44_000),
            window(60, 120, asked=60_000, hit=0),
        )
    )
    assert found.first.asked_tokens == 60_000
    assert found.first.hit_rate == pytest.approx(44 / 60)
    assert found.usual is not None
    assert (found.usual.hit_rate, found.usual_from) == (0.8, "before")


def test_lost_prefill_is_what_was_computed_beyond_the_usual_share_until_it_was_back() -> None:
    found = cliff_of(
        start(
            window(0, 5, asked=5_000, hit=0),  # 5,000 missed, 1,000 are usual
            window(5, 10, asked=5_000, hit=2_000),  # 3,000 missed, 1,000 are usual
            window(10, 15, asked=5_000, hit=4_000),  # as usual
            window(15, 600, asked=600_000, hit=480_000),
        )
    )
    assert found.lost_prefill_seconds == pytest.approx((4_000 + 2_000) / RATE)
    assert found.back_seconds == 15.0
    # 800 hit tokens a second were usual: in the 4 s until it was ready, 3,200 tokens' worth
    assert found.away_prefill_seconds == pytest.approx(3.2)
    assert found.cost_seconds == pytest.approx(9.2)


def test_one_good_window_in_a_bad_stretch_is_not_being_back() -> None:
    lucky = window(5, 10, asked=10, hit=10)
    found = cliff_of(start(window(0, 5, asked=5_000, hit=0), lucky, window(10, 15, asked=5_000, hit=1_000)))
    assert found.back_seconds is None
    assert found.watched_seconds == 15.0


def test_a_good_window_is_no_return_when_the_minute_after_it_is_bad_though_all_ends_well() -> None:
    good, bad = window(0, 5, asked=5_000, hit=4_000), window(5, 60, asked=55_000, hit=27_500)
    found = cliff_of(
        start(good, bad, window(60, 75, asked=15_000, hit=12_000), window(75, 600, asked=10**6, hit=800_000))
    )
    assert found.back_seconds == 75.0


def test_a_window_in_which_nothing_was_asked_is_no_return() -> None:
    quiet = window(0, 5, asked=0, hit=0, acquires=0)
    found = cliff_of(start(quiet, window(5, 10, asked=1_000, hit=900)))
    assert found.back_seconds == 10.0
    assert cliff_of(start(quiet)).back_seconds is None
    assert cliff_of(start(quiet)).first.hit_rate is None


def test_a_time_to_first_token_is_the_wait_and_the_missed_prefill_of_an_acquire() -> None:
    found = figures(window(0, 5, asked=5_000, hit=3_000, wait=0.05, acquires=10))
    assert found.first_token_seconds == pytest.approx(0.05 + 2_000 / RATE / 10)
    assert found.asked_prefill_seconds == 5.0
    assert found.missed_prefill_seconds == 2.0
    assert figures(window(0, 5, asked=0, hit=0, acquires=0)).first_token_seconds is None


def test_a_first_start_is_held_against_its_own_end() -> None:
    first = start(
        window(0, 60, asked=60_000, hit=0), window(60, 360, asked=300_000, hit=240_000), before=None, ready_seconds=0.0
    )
    found = cliff_of(first)
    assert found.usual is not None
    assert (found.usual.hit_rate, found.usual_from) == (0.8, "after")
    assert found.lost_prefill_seconds == pytest.approx((60_000 - 12_000) / RATE)


def test_without_anything_to_hold_it_against_nothing_is_said() -> None:
    found = cliff_of(start(window(0, 5, asked=5_000, hit=0), before=None))
    assert found.usual is None
    assert found.usual_from == ""
    assert found.cost_seconds is None
    assert found.back_seconds is None
    assert cliff_of(start(before=None, is_ready=False)).first.seconds == 0.0


def test_an_engine_was_away_and_the_node_was_not() -> None:
    found = cliff_of(start(window(0, 5, asked=5_000, hit=0), kind=StartKind.ENGINE))
    assert found.away_seconds is None
    assert found.away_prefill_seconds is None
    assert found.cost_seconds == found.lost_prefill_seconds == pytest.approx(4.0)


def test_a_node_that_was_never_ready_was_away_for_nobody_knows_how_long() -> None:
    assert cliff_of(start(is_ready=False, ready_seconds=0.0)).away_seconds is None


def test_a_quantile_lies_within_the_bucket_of_the_value_it_stands_for() -> None:
    latency = Latency()
    for _ in range(99):
        latency.observe(0.003)
    latency.observe(99.0)
    assert 0.0025 <= (quantile(latency.counts, 0.5) or 0) <= 0.005
    assert 0.0025 <= (quantile(latency.counts, 0.99) or 0) <= 0.005
    assert quantile(latency.counts, 1.0) == LATENCY_BOUNDS[-1]
    assert quantile([0] * len(latency.counts), 0.5) is None
    assert quantile([], 0.5) is None
    assert quantile([1, 2], 0.5) is None
