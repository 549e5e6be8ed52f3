"""The estimate of reuse: against sums done the slow way, and against what is known to come true."""

from __future__ import annotations

import random
from math import log1p

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.value import hazards as module
from tierkv.core.value.hazards import NUM_BUCKETS, Hazards, age_bucket, bucket_end
from tierkv.core.value.kinds import NUM_KINDS, kind_of_new, kind_of_used
from tierkv.core.value.tuning import AS_MEASURED, Tuning

WIDTHS = [bucket_end(bucket) - (bucket_end(bucket - 1) if bucket else 0.0) for bucket in range(NUM_BUCKETS - 1)]


def test_kinds_have_the_edges_that_the_traces_gave_them() -> None:
    suffixes = (0, 1_000, 1_100, 7_000, 7_300, 31_000, 32_000, 127_000, 140_000)
    assert [kind_of_new(tokens, AS_MEASURED) for tokens in suffixes] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert [kind_of_used(1, gap, AS_MEASURED) for gap in (0, 44, 46, 224, 226, 944, 946, 3_824, 3_826, 1e9)] == [
        5, 5, 6, 6, 7, 7, 8, 8, 9, 9,
    ]  # fmt: skip
    assert [kind_of_used(hits, 0.0, AS_MEASURED) for hits in (1, 2, 3, 5, 6, 1_000)] == [5, 10, 15, 15, 20, 20]
    assert kind_of_used(1, -5.0, AS_MEASURED) == 5


def test_ages_lie_in_their_buckets() -> None:
    assert [age_bucket(age) for age in (-1.0, 0.0, 0.2, 0.3, 1.0, 7.0, 20_000.0, 1e9)] == [0, 0, 0, 1, 3, 9, 42, 43]
    for bucket in range(NUM_BUCKETS - 1):
        assert age_bucket(bucket_end(bucket) * 1.000001) == bucket + 1
        assert age_bucket(bucket_end(bucket) * 0.999999) == bucket


@given(st.lists(st.floats(0, 1), min_size=NUM_BUCKETS, max_size=NUM_BUCKETS))
def test_the_index_is_the_best_rate_over_all_times_to_give_up(chances: list[float]) -> None:
    got = module._best_rates(chances)
    widths = [*WIDTHS, module._WIDTHS[-1]]
    for first in range(NUM_BUCKETS):
        best = uses = seconds = 0.0
        through = 1.0
        for bucket in range(first, NUM_BUCKETS):
            p = chances[bucket]
            uses += through * p
            seconds += through * widths[bucket] * (1 - p / 2)
            through *= 1 - p
            best = max(best, uses / seconds)
        assert got[first] == pytest.approx(best)


def test_neighbouring_ages_tell_of_each_other_and_nothing_is_lost() -> None:
    row = [0.0] * NUM_BUCKETS
    row[0], row[10] = 4.0, 8.0
    pooled = module._pooled(row)
    assert (pooled[:3], pooled[8:13]) == ([3.0, 1.0, 0.0], [0.0, 2.0, 4.0, 2.0, 0.0])
    assert sum(pooled) == sum(row)
    assert module._pooled([5.0] * NUM_BUCKETS) == [5.0] * NUM_BUCKETS


def test_before_there_is_data_what_was_used_last_is_worth_most() -> None:
    hazards = Hazards()
    for _ in range(15):
        hazards.request(0.0)
        hazards.begin(0, 0.0, 1.0)
        hazards.end(0, 0.0, 0.0, 1.0)
    assert not hazards.has_learnt
    assert hazards.index(3, 0.0) > hazards.index(3, 1.0) > hazards.index(3, 100.0)
    hazards.request(0.0)
    assert hazards.has_learnt


def test_where_next_to_nothing_is_used_again_there_is_nothing_to_learn() -> None:
    hazards = Hazards()
    for number in range(1, 1_001):
        now = number * 0.1
        hazards.request(now)
        hazards.begin(0, now, 1.0)
        if number % 100 == 0 and number < 1_000:
            hazards.end(0, now, now, 1.0)
        assert not hazards.has_learnt
    for number in range(1_001, 2_001):
        now = number * 0.1
        hazards.request(now)
        hazards.begin(0, now, 1.0)
        hazards.end(0, now, now, number % 2)
    assert hazards.has_learnt


def test_a_kind_that_comes_back_is_worth_more_than_one_that_does_not() -> None:
    hazards = Hazards()
    hazards.request(0.0)
    for number in range(2_000):
        now = number * 1.0
        hazards.begin(0, now, 1.0)
        hazards.begin(4, now, 1.0)
        if number >= 10:
            hazards.end(0, now - 10, now, 1.0)
        hazards.request(now)
    assert hazards.index(0, 5.0) > 3 * hazards.index(4, 5.0)
    assert hazards.index(0, 5.0) > 3 * hazards.index(0, 50.0), "what has not come when it should have does not come"


def test_what_waits_is_counted_at_its_age_however_old() -> None:
    rng = random.Random(5)
    hazards = Hazards()
    hazards.request(0.0)
    now, waiting = 0.0, []
    for _ in range(400):
        now += rng.random() * 60
        used = int(now) + 0.5
        waiting.append(used)
        hazards.begin(7, used, 2.0)
        if rng.random() < 0.5:
            gone = waiting.pop(rng.randrange(len(waiting)))
            hazards.withdraw(7, gone, 2.0)
        hazards.request(now)
    by_age = hazards._waiting_by_age(7, now)
    assert sum(by_age) == pytest.approx(2.0 * len(waiting))
    for age in (100.0, 1_000.0, 5_000.0):
        older = 2.0 * sum(now - used > age for used in waiting)
        least = sum(by_age[age_bucket(age * 1.3) + 1 :])
        most = sum(by_age[age_bucket(age / 1.3) :])
        assert least <= older <= most


def rate_of(hazards: Hazards, kind: int, age: float) -> float:
    """Uses a second at this age, as they are remembered, without what other kinds lend."""
    counts, bucket = hazards._counts[kind], age_bucket(age)
    chance = counts.uses[bucket] / counts.reached[bucket]
    return -log1p(-chance) / WIDTHS[bucket]


def test_a_busier_hour_does_not_make_what_is_old_look_the_more_wanted() -> None:
    """Of what waits each has the same chance, old or new; but it is ten times as high in the second half."""
    hazards = Hazards(Tuning(memory_requests=200.0, memory_units=1.0))
    waiting: list[tuple[float, float]] = []  # since, and how much
    for second in range(2_000):
        now = float(second)
        hazards.request(now)
        chance = 0.0005 if second < 1_000 else 0.005
        for since, units in waiting:
            hazards.end(3, since, now, units * chance)
        waiting = [(since, units * (1 - chance)) for since, units in waiting]
        if second % 10 == 0:
            hazards.begin(3, now, 1_000.0)
            waiting.append((now, 1_000.0))
    for age in (20.0, 50.0, 100.0, 300.0, 700.0):
        assert rate_of(hazards, 3, age) == pytest.approx(0.005, rel=0.15), age


def test_what_was_learnt_fades_with_requests() -> None:
    hazards = Hazards(Tuning(memory_requests=100.0, memory_units=1.0))
    now = 0.0

    def serve(requests: int, *, comes_back: bool) -> float:
        nonlocal now
        for _ in range(requests):
            now += 1.0
            hazards.request(now)
            hazards.begin(0, now, 10.0)
            if comes_back:
                hazards.end(0, now - 5, now, 10.0)
            hazards.begin(9, now, 10.0)  # others do come back, or nothing at all would be learnt
            hazards.end(9, now, now, 10.0)
        return rate_of(hazards, 0, 5.0)

    wanted = serve(1_000, comes_back=True)
    assert serve(250, comes_back=False) < wanted / 4
    assert serve(250, comes_back=False) < wanted / 40


def test_few_units_are_remembered_for_longer() -> None:
    def remembered(units: float) -> float:
        hazards = Hazards(Tuning(memory_requests=100.0, memory_units=1_000.0))
        for number in range(1_250):
            now = float(number)
            hazards.request(now)
            if number < 250:
                hazards.begin(1, now, units)
                hazards.end(1, now, now, units)
            else:
                hazards.begin(2, now, units)
                hazards.end(2, now, now, units)
        return sum(hazards._counts[1].uses) / (250 * units)

    assert remembered(10.0) < 0.001
    assert 0.3 < remembered(1.0) < 0.5, "a thousand units have come since"


def test_an_exposure_from_before_the_start_is_not_counted() -> None:
    hazards = Hazards()
    hazards.request(1_000.0)
    hazards.end(0, 990.0, 1_001.0, 5.0)
    hazards.forget(0, 990.0, 1_001.0, 5.0)
    hazards.begin(0, 1_001.0, 1.0)
    hazards.end(0, 1_001.0, 1_002.0, 1.0)
    assert (sum(hazards._counts[0].used), sum(hazards._counts[0].forgotten)) == (1.0, 0.0)


def test_what_waits_for_days_takes_no_slots_and_is_still_known() -> None:
    hazards = Hazards()
    hazards.request(0.0)
    hour = 3_600.0
    for number in range(24 * 7):
        hazards.begin(6, number * hour + 0.5, 1.0)
        hazards.request(number * hour + 1.0)
        hazards._learn(number * hour + 1.0)
    now = 24 * 7 * hour
    assert sum(len(slots) for slots in hazards._waiting[6]) < 20
    assert sum(hazards._waiting_by_age(6, now)) == 24 * 7
    hazards.withdraw(6, 3 * hour + 0.5, 1.0)
    hazards.withdraw(6, (24 * 7 - 2) * hour + 0.5, 1.0)
    assert sum(hazards._waiting_by_age(6, now)) == 24 * 7 - 2


def test_what_is_forgotten_counts_as_not_used_until_then() -> None:
    def index_after(forgotten: bool) -> float:
        hazards = Hazards()
        hazards.request(0.0)
        for number in range(1_000):
            hazards.begin(2, float(number), 1.0)
            if number % 2:
                hazards.end(2, float(number), number + 5.0, 1.0)
            elif forgotten:
                hazards.forget(2, float(number), number + 400.0, 1.0)
            else:
                hazards.withdraw(2, float(number), 1.0)
        for _ in range(128):
            hazards.request(2_000.0)
        return hazards.index(2, 0.0)

    assert index_after(forgotten=True) < 0.9 * index_after(forgotten=False)


def test_learning_says_that_ranks_have_changed() -> None:
    hazards = Hazards()
    versions = set()
    for number in range(NUM_KINDS * 20):
        hazards.request(float(number))
        versions.add(hazards.version)
    assert versions == set(range(len(versions)))
    assert len(versions) > 5
