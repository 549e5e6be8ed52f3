"""Windows add up, and what was usual is told from the right part of a life."""

from __future__ import annotations

import pytest

from tests.core.simulation import Bench
from tierkv.core.grants import Lease
from tierkv.core.starts import (
    ENOUGH_SECONDS,
    FIRST_SECONDS,
    LATE_SECONDS,
    WINDOW_ENDS,
    LastEnd,
    Start,
    StartKind,
    Window,
    difference,
    predecessor,
    total,
    usual,
)
from tierkv.core.value.cost import prefill_seconds


def window(begins: float, ends: float, *, asked: int = 100, hit: int = 0, stored: int = 0) -> Window:
    return Window(
        begins=begins,
        seconds=ends - begins,
        asked_tokens=asked,
        hit_tokens={"host": hit},
        stored_tokens=stored,
        waits=[1, 2],
        wait_seconds=0.5,
        asked_prefill_seconds=float(asked),
        missed_prefill_seconds=float(asked - hit),
    )


def life(*windows: Window, number: int = 1, **changes: object) -> Start:
    values = {"number": number, "kind": StartKind.NODE, "began": float(number), "last_end": LastEnd.CLEAN}
    return Start(**(values | {"windows": windows} | changes))


def test_what_happened_between_two_moments_is_the_difference_of_what_had_happened_until_then() -> None:
    earlier, later = window(0, 0, asked=100, hit=60), window(0, 0, asked=250, hit=200, stored=40)
    found = difference(later, earlier, 5.0, 2.5)
    assert (found.begins, found.seconds, found.ends) == (5.0, 2.5, 7.5)
    assert (found.asked_tokens, found.hit_tokens, found.stored_tokens) == (150, {"host": 140}, 40)
    assert (found.waits, found.wait_seconds, found.missed_prefill_seconds) == ([0, 0], 0.0, 10.0)


def test_a_sum_of_windows_has_the_tiers_of_all_of_them_and_begins_with_the_first() -> None:
    disk = Window(begins=5, seconds=5, asked_tokens=10, hit_tokens={"disk": 7}, waits=[0, 1])
    found = total([window(0, 5, asked=100, hit=60), disk])
    assert (found.begins, found.seconds, found.asked_tokens) == (0, 10, 110)
    assert found.hit_tokens == {"host": 60, "disk": 7}
    assert (found.waits, found.acquires, found.all_hit_tokens) == ([1, 3], 4, 67)
    assert total([]) == Window()


def test_windows_follow_each_other_finely_in_the_first_minute_and_end_after_ten() -> None:
    assert [end for end in WINDOW_ENDS if end <= FIRST_SECONDS] == list(range(5, 61, 5))
    assert list(WINDOW_ENDS) == sorted(WINDOW_ENDS)
    assert WINDOW_ENDS[-1] == 600


def test_the_first_minute_of_a_life_is_not_what_is_usual() -> None:
    found = usual(life(window(0, 60, hit=0), window(60, 360, hit=80)))
    assert found is not None
    assert (found.asked_tokens, found.all_hit_tokens) == (100, 80)
    assert usual(life(window(0, 60, hit=50))) is None
    assert usual(life(window(0, 60), window(60, 400, asked=0))) is None
    assert usual(life()) is None


def test_only_the_last_half_hour_of_a_long_life_counts() -> None:
    late = tuple(window(600 + i * LATE_SECONDS, 900 + i * LATE_SECONDS, hit=90) for i in range(6))
    found = usual(life(window(0, 60), window(60, 600, asked=1_000_000), late=late))
    assert found is not None
    assert (found.asked_tokens, found.all_hit_tokens) == (600, 540)


def test_a_life_too_short_to_say_hands_on_what_was_usual_before_it() -> None:
    before = window(600, 2_400, hit=70)
    assert usual(life(window(0, 60), window(60, 75, hit=10), before=before)) == before
    assert usual(life(before=before)) == before
    long = usual(life(window(60, 60 + ENOUGH_SECONDS, hit=10), before=before))
    assert long is not None
    assert long.all_hit_tokens == 10


def test_the_life_before_is_the_last_that_began_earlier_and_never_an_engines() -> None:
    one, two = life(number=1), life(number=2)
    engine = life(number=3, kind=StartKind.ENGINE)
    assert predecessor([two, one, engine], before=4.0) == two
    assert predecessor([two, one, engine], before=2.0) == one
    assert predecessor([engine], before=9.0) is None


def test_an_acquire_counts_what_computing_all_of_it_would_cost_and_what_it_did_not_get() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    bench.store(bench.prompt(1, 2))
    counts = bench.state.counts
    tokens = bench.state.group_shape(bench.prompt(1).group)[1]
    rate = bench.state.limits.prefill_tokens_per_second
    lease = bench.acquire(bench.prompt(1, 2, 3, 4))
    assert isinstance(lease, Lease)
    left = prefill_seconds(2 * tokens, 2 * tokens, rate)
    assert counts.asked_prefill_seconds == pytest.approx(prefill_seconds(4 * tokens, 0, rate))
    assert counts.missed_prefill_seconds == pytest.approx(left)
    bench.release(lease)
    bench.acquire(bench.prompt(9))
    assert counts.missed_prefill_seconds == pytest.approx(left + prefill_seconds(tokens, 0, rate))
