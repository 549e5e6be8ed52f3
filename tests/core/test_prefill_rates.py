"""What is believed of the times that engines report."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulation import PAGE, Bench, make_group
from tierkv.core.prefill_rates import (
    ENOUGH_TOKENS,
    FASTEST,
    MOST_STEP,
    MOST_WEIGHT,
    PRICE_STEP,
    WINDOW,
    PrefillRate,
    PrefillRates,
    PrefillSample,
)
from tierkv.core.value.cost import DOUBLING_TOKENS, prefill_seconds

SETTING = 12_000.0

rates = st.floats(100.0, 1e6)


def sample(rate: float, *, tokens: int = 2_048, first_token: int = 0) -> PrefillSample:
    """Of an engine with this rate at the start of a prompt."""
    return PrefillSample(tokens, first_token, prefill_seconds(tokens, first_token, rate))


samples = st.builds(
    lambda rate, tokens, first: sample(rate, tokens=tokens, first_token=first),
    rates,
    st.integers(1, 20_000),
    st.integers(0, 200_000),
)


def measured(*told: PrefillSample) -> PrefillRate:
    rate = PrefillRate(SETTING)
    for one in told:
        rate.report([one])
    return rate


def test_the_setting_counts_until_enough_has_been_told() -> None:
    rate = PrefillRate(SETTING)
    tokens = 0
    while tokens + 2_048 < ENOUGH_TOKENS:
        tokens += 2_048
        assert not rate.report([sample(400.0)])
        assert (rate.tokens_per_second, rate.is_measured) == (SETTING, False)
    assert rate.report([sample(400.0)])
    assert rate.is_measured
    assert rate.tokens_per_second == rate.priced_tokens_per_second == pytest.approx(400.0)
    assert rate.samples == ENOUGH_TOKENS // 2_048


def test_one_long_stretch_alone_is_not_enough() -> None:
    assert not measured(sample(1.0, tokens=100 * ENOUGH_TOKENS)).is_measured


def test_the_rate_is_the_one_at_the_start_whatever_the_positions_were() -> None:
    """Attention makes tokens far behind cost more: that is the model's, not the engine's."""
    told = [sample(5_000.0, first_token=position) for position in range(0, 4 * DOUBLING_TOKENS, 4_096)]
    assert told[-1].seconds > 4 * told[0].seconds
    assert measured(*told).tokens_per_second == pytest.approx(5_000.0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(samples, min_size=1, max_size=4), min_size=1, max_size=30))
def test_in_any_order_the_rate_is_within_what_was_told(reports: list[list[PrefillSample]]) -> None:
    rate = PrefillRate(SETTING)
    for report in reports:
        rate.report(report)
    told = [one.rate for report in reports for one in report]
    weights = sum(min(one.tokens, MOST_WEIGHT) for report in reports for one in report)
    assert rate.is_measured == (weights >= ENOUGH_TOKENS)
    if rate.is_measured:
        assert min(told) <= rate.tokens_per_second <= max(told)
    else:
        assert rate.tokens_per_second == SETTING


def enough(told: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """As many more as make an estimate."""
    lacking = ENOUGH_TOKENS - sum(min(tokens, MOST_WEIGHT) for _, tokens in told)
    return told + [(1.0, MOST_WEIGHT)] * max(0, -(-lacking // MOST_WEIGHT))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.95, 1.05), st.integers(256, 8_192)), min_size=4, max_size=40).map(enough),
    st.integers(0, 40),
    st.sampled_from([1e-3, 1e3]),
    st.integers(1, 100_000),
)
def test_one_that_is_wrong_by_a_factor_of_a_thousand_moves_nothing_out_of_what_the_others_tell(
    others: list[tuple[float, int]], place: int, wrong: float, tokens: int
) -> None:
    right = [sample(3_000.0 * jitter, tokens=of_it) for jitter, of_it in others]
    told = list(right)
    told.insert(place, sample(3_000.0 * wrong, tokens=tokens))
    rate = measured(*told)
    known = [one.rate for one in right]
    assert min(known) <= rate.tokens_per_second <= max(known)


def test_an_engine_that_stands_still_for_a_third_of_the_time_changes_nothing() -> None:
    rate = PrefillRate(SETTING)
    for number in range(3 * WINDOW):
        rate.report([sample(8.0 if number % 3 == 0 else 3_000.0)])
        if rate.is_measured:
            assert rate.tokens_per_second == pytest.approx(3_000.0)


def test_a_faster_engine_is_believed_in_steps() -> None:
    rate = measured(*[sample(1_000.0)] * WINDOW)
    before, reports = rate.tokens_per_second, 0
    while rate.tokens_per_second < 0.99 * 50_000.0:
        rate.report([sample(50_000.0)] * 64)
        assert rate.tokens_per_second <= before * MOST_STEP * (1 + 1e-9)
        before, reports = rate.tokens_per_second, reports + 1
        assert reports < 20
    rate.report([sample(50_000.0)])
    assert rate.tokens_per_second == pytest.approx(50_000.0)


def test_what_can_not_be_is_left_out() -> None:
    rate = PrefillRate(SETTING)
    impossible = [
        PrefillSample(2_048, 0, float("nan")),
        PrefillSample(2_048, 0, float("inf")),
        PrefillSample(2_048, 0, -1.0),
        PrefillSample(2_048, 0, 0.0),
        PrefillSample(-5, 0, 1.0),
        PrefillSample(2_048, -1, 1.0),
        PrefillSample(2**40, 0, 1.0),
        sample(2 * FASTEST),
        PrefillSample(1, 0, 3_000.0),
    ]
    for one in impossible * 20:
        rate.report([one])
    assert rate.samples == 0
    assert not rate.is_measured


def test_the_price_follows_when_the_rate_has_moved_by_a_quarter() -> None:
    rate = measured(*[sample(1_000.0)] * WINDOW)
    assert not any(rate.report([sample(1_000.0 * 0.99 * PRICE_STEP)] * 64) for _ in range(4))
    assert rate.tokens_per_second == pytest.approx(1_000.0 * 0.99 * PRICE_STEP)
    assert rate.priced_tokens_per_second == pytest.approx(1_000.0)
    assert [rate.report([sample(1_300.0)] * 64) for _ in range(3)] == [False, True, False]
    assert rate.priced_tokens_per_second == pytest.approx(1_300.0)


def test_tenants_and_adapters_of_a_model_share_a_rate_and_layouts_do_not() -> None:
    known, identity = PrefillRates(SETTING), make_group().identity
    replace = msgspec.structs.replace
    assert known.of(replace(identity, salt="acme", adapter="ab" * 32)) is known.of(identity)
    assert known.of(replace(identity, layout=replace(identity.layout, engine="other"))) is not known.of(identity)
    assert known.of(replace(identity, weights="cd" * 32)) is not known.of(identity)


# ---- what it is used for


def tell(bench: Bench, rate: float, group: bytes = b"") -> None:
    """Until it is believed."""
    for _ in range(40):
        bench.state.report_prefill(group or bench.spec.group, [sample(rate)] * 64)
    assert bench.state.prefill_tokens_per_second(group or bench.spec.group) == pytest.approx(rate)


def test_what_was_asked_for_is_counted_at_the_engine_s_own_rate() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    tell(bench, 100.0)
    bench.acquire(bench.prompt(1, 2))
    assert bench.state.counts.asked_prefill_seconds == pytest.approx(prefill_seconds(2, 0, 100.0))
    assert bench.state.counts.missed_prefill_seconds == bench.state.counts.asked_prefill_seconds


def test_every_tier_ranks_anew_when_a_price_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(host_slots=4)
    bench.store(bench.prompt(1, 2))
    ledger = bench.state._ledger
    orders = {"host": ledger.host_order(PAGE), "nvme": ledger.nvme_order, "disk": ledger.disk_order}
    heard = []
    for tier, order in orders.items():
        monkeypatch.setattr(order, "repriced", lambda tier=tier: heard.append(tier))
    tell(bench, 100.0)
    assert set(heard) == set(orders)


def test_the_books_tell_what_a_model_is_reckoned_with() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    (row,) = bench.state.prefill_rates()
    assert (row.tokens_per_second, row.samples) == (bench.limits.prefill_tokens_per_second, 0)
    bench.absorb(bench.state.open_group(make_group(salt="acme"), bench.now))
    tell(bench, 100.0)
    (row,) = bench.state.prefill_rates()
    assert row.tokens_per_second == pytest.approx(100.0)
    assert row.samples == WINDOW
    assert bench.state.prefill_tokens_per_second(b"nobody's") == bench.limits.prefill_tokens_per_second
