"""A report of evictions adds up, whatever is asked for."""

from __future__ import annotations

import pytest

from tierkv.core import eviction_report
from tierkv.core.eviction_report import NUM_BUCKETS, summarize
from tierkv.core.journal import Account, AnyRow, EvictionRow, Posting, RegretRow

GROUPS = [bytes([n]) * 32 for n in (1, 2)]


def evicted(at: float, number: int, target: str = "dropped") -> EvictionRow:
    key = number.to_bytes(32, "big")
    source = "nvme" if target == "dropped" else "host"
    return EvictionRow(
        at, GROUPS[number % 2], key, 16 * number, source, target, 2, 32, 4096 * (number + 1), at - 60.0, at - 20.0,
        number % 3, 0.5, "evicted",
    )  # fmt: skip


def regretted(at: float, number: int) -> RegretRow:
    return RegretRow(at, GROUPS[number % 2], number.to_bytes(32, "big"), "nvme", 2, 32, 0.25, at - 5.0, "evicted")


def rows() -> list[AnyRow]:
    found: list[AnyRow] = [evicted(100.0 + n, n, "dropped" if n % 4 else "nvme") for n in range(50)]
    found += [regretted(150.0 + n, n) for n in range(0, 20, 3)]
    return [*found, Posting(120.0, GROUPS[0], Account.COPIED, Account.NVME, 10)]


@pytest.mark.parametrize("by_prefix", [False, True])
def test_lines_and_buckets_come_to_what_the_rows_do(by_prefix: bool) -> None:
    report = summarize(rows(), 100.0, 200.0, by_prefix=by_prefix)
    evictions = [row for row in rows() if isinstance(row, EvictionRow)]
    regrets = [row for row in rows() if isinstance(row, RegretRow)]
    assert sum(line.evictions for line in report.lines) == len(evictions)
    assert sum(line.num_bytes for line in report.lines) == sum(row.num_bytes for row in evictions)
    assert sum(line.regrets for line in report.lines) == len(regrets)
    assert sum(line.regret_seconds for line in report.lines) == pytest.approx(0.25 * len(regrets))
    assert len(report.buckets) == NUM_BUCKETS
    assert sum(bucket.dropped_tokens + bucket.moved_tokens for bucket in report.buckets) == 32 * len(evictions)
    assert sum(bucket.regret_tokens for bucket in report.buckets) == 32 * len(regrets)
    for bucket in report.buckets:
        assert sum(bucket.dropped_bytes_by.values()) == bucket.dropped_bytes
        assert sum(bucket.regret_seconds_by.values()) == pytest.approx(bucket.regret_seconds)
    reasons = {row.reason for row in evictions if row.target == "dropped"}
    assert {reason for bucket in report.buckets for reason in bucket.dropped_bytes_by} == reasons
    assert all(line.idle_seconds == pytest.approx(20.0 * line.tokens) for line in report.lines if line.evictions)
    assert all(line.age_seconds == pytest.approx(60.0 * line.tokens) for line in report.lines if line.evictions)


def test_what_lies_outside_of_the_span_does_not_count() -> None:
    report = summarize(rows(), 110.0, 120.0)
    assert sum(line.evictions for line in report.lines) == 11
    assert report.buckets[0].start == 110.0
    assert summarize([], 1.0, 2.0).lines == ()


def test_a_regret_stands_on_the_line_of_the_eviction_that_it_is_about() -> None:
    report = summarize([evicted(1.0, 5), evicted(2.0, 7), regretted(3.0, 5)], 0.0, 9.0, by_prefix=True)
    lines = {line.first_token: line for line in report.lines}
    assert (lines[80].evictions, lines[80].regrets) == (1, 1)
    assert (lines[112].evictions, lines[112].regrets) == (1, 0)


def test_of_very_many_prefixes_the_largest_and_the_most_regretted_have_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_report, "MAX_PREFIXES", 3)
    many = [evicted(1.0, 2 * n + 1) for n in range(20)]
    report = summarize([*many, regretted(2.0, 1)], 0.0, 9.0, by_prefix=True)
    keys = {int.from_bytes(line.key, "big") for line in report.lines if line.key}
    assert {39, 37, 35, 1} <= keys
    assert len(keys) <= 6
    (rest,) = [line for line in report.lines if not line.key]
    assert rest.evictions + sum(line.evictions for line in report.lines if line.key) == 20
