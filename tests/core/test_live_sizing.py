"""What room is worth, as a node tells it of its last hours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.simulation import PAGE, Bench, Prompt
from tests.core.test_ghosts import GROUP as GHOST_GROUP
from tests.core.test_ghosts import ghost_of
from tests.core.test_reuse_sample import GROUP, group_of, path
from tierkv.core.counters import Counters
from tierkv.core.grants import Lease
from tierkv.core.live_sizing import (
    EDGES,
    KEPT_SECONDS,
    LEARNING_SECONDS,
    MAX_WAITING_BLOCKS,
    MAX_WINDOWS,
    WINDOW_SECONDS,
    LiveSizing,
)
from tierkv.core.purge_scope import OfTenant
from tierkv.core.reasons import Reason
from tierkv.core.size_report import SizeReport
from tierkv.core.value.cost import prefill_seconds

RATE = 1_000.0
DAY = 86_400.0


def sizing(max_samples: int = 10_000) -> LiveSizing:
    return LiveSizing(Counters(), {GHOST_GROUP: GROUP}.get, lambda _group: RATE, 8 * PAGE, max_samples=max_samples)


def found(report: SizeReport, capacity: int) -> float:
    """Tokens."""
    return sum(gain.tokens for gain in report.gains if gain.need_bytes <= capacity)


# ---- by itself


def test_what_a_capacity_finds_is_told_with_tokens_seconds_and_bytes() -> None:
    live = sizing()
    for number, blocks in enumerate(("ab", "xyz", "ab")):
        live.asked(GROUP, path(blocks), float(number))
    report = live.report(DAY, 3.0)
    assert (report.requests, report.asked_tokens, report.sampled_uses, report.rate) == (3, 7, 7, 1.0)
    assert report.first_tokens == 5
    assert [(gain.tokens, gain.num_bytes) for gain in report.gains] == [(1, PAGE), (1, PAGE)]
    assert report.gains[0].need_bytes == 4 * PAGE
    assert 5 * PAGE <= report.gains[1].need_bytes < 5 * PAGE * 1.1
    assert report.gains[1].seconds == pytest.approx(prefill_seconds(1, 1, RATE))
    assert (report.since, report.until, report.sample_began) == (0.0, 3.0, 0.0)
    assert report.seen_bytes == 5 * PAGE


def test_nothing_asked_is_told_as_nothing() -> None:
    report = sizing().report(DAY, 5.0)
    assert (report.requests, report.asked_tokens, report.gains, report.first_tokens) == (0, 0, (), 0.0)
    assert (report.since, report.until, report.samples, report.seen_bytes) == (5.0, 5.0, 0, 0)


def test_only_the_last_hours_are_told_but_what_was_used_before_is_known() -> None:
    live = sizing()
    live.asked(GROUP, path("abcd"), 100.0)
    live.asked(GROUP, path("ab"), 100.0 + 5 * WINDOW_SECONDS)
    last = live.report(WINDOW_SECONDS, 110.0 + 5 * WINDOW_SECONDS)
    assert (last.requests, last.asked_tokens, last.first_tokens) == (1, 2, 0)
    assert last.since == 100.0 + 5 * WINDOW_SECONDS
    assert last.sample_began == 100.0
    assert live.report(DAY, 110.0 + 5 * WINDOW_SECONDS).requests == 2


def test_of_more_hours_than_are_kept_the_first_are_forgotten() -> None:
    live = sizing()
    for hour in range(2 * MAX_WINDOWS):
        live.asked(GROUP, path("ab"), hour * WINDOW_SECONDS)
    assert live.report(10 * DAY, 2 * MAX_WINDOWS * WINDOW_SECONDS - 1).requests == MAX_WINDOWS


def test_asking_waits_for_nothing_and_is_looked_at_in_slices() -> None:
    live = sizing()
    for number in range(10):
        live.asked(GROUP, path([number, *range(99)]), 0.0)
    assert live.has_work
    steps = 0
    while live.has_work:
        live.step()
        steps += 1
    assert steps == 4  # three prompts each, of 256 blocks and what is over
    assert live.report(DAY, 1.0).requests == 10


def test_what_waits_is_bounded() -> None:
    live = sizing()
    keys = path(range(100))
    for _ in range(10 + MAX_WAITING_BLOCKS // 100):
        live.asked(GROUP, keys, 0.0)
    assert live._waiting_blocks <= MAX_WAITING_BLOCKS
    assert live.report(DAY, 1.0).requests == 10 + MAX_WAITING_BLOCKS // 100


def test_blocks_that_all_prompts_begin_with_are_weighed_as_often_as_they_are_asked_for() -> None:
    """One block in four prompts is everybody's; whether the sample has it or not, it is not a fourth more or less."""
    live = sizing(max_samples=150)
    for number in range(1_500):
        live.asked(GROUP, path(["system", number % 700, number % 700, number % 700]), 0.0)
        live.step()
    report = live.report(DAY, 1.0)
    assert report.rate < 0.2
    exact = 1_499 + 3 * 800
    assert found(report, report.seen_bytes * 2) == pytest.approx(exact, rel=0.25)


def test_files_take_more_than_slots_by_what_is_told() -> None:
    large = group_of(salt="large", block_bytes=4 * PAGE)
    live = sizing()
    live.asked(large, path("ab"), 0.0)
    blocks = 8 // 4
    assert live.report(DAY, 1.0).file_factor == large.file_bytes(blocks) / blocks / (4 * PAGE)


def test_what_was_purged_is_remembered_by_no_key_and_stays_counted() -> None:
    live = sizing()
    for _ in range(2):
        live.asked(GROUP, path("ab"), 0.0)
    live.forget(frozenset({GROUP.spec.group}))
    report = live.report(DAY, 1.0)
    assert (report.samples, report.seen_bytes, report.requests) == (0, 0, 2)
    assert found(report, 2 * PAGE) == 2
    live.asked(GROUP, path("xy"), 1.0)
    live.forget(None)
    assert live.report(DAY, 2.0).samples == 0


def test_a_sample_that_has_become_too_small_is_followed_by_a_larger_one_that_has_learnt_first() -> None:
    live = sizing(max_samples=100)
    for number in range(3_000):  # a flood, once
        live.asked(GROUP, path([number]), 0.0)
    thin = live.report(DAY, 1.0).rate
    assert thin < 0.05
    now, step = KEPT_SECONDS + 1.0, WINDOW_SECONDS
    while now < KEPT_SECONDS + LEARNING_SECONDS:
        for number in range(200):
            live.asked(GROUP, path([-number]), now)
        assert live.report(DAY, now).rate == thin
        now += step
    for number in range(200):
        live.asked(GROUP, path([-number]), now + step)
    report = live.report(WINDOW_SECONDS, now + step)
    assert report.rate == pytest.approx(4 * thin)
    assert report.sample_began > KEPT_SECONDS
    assert report.first_tokens == 0  # for it knows the usual ones


# ---- in the core


def ask(bench: Bench, prompt: Prompt) -> int:
    lease = bench.acquire(prompt)
    assert isinstance(lease, Lease)
    bench.release(lease)
    return lease.blocks


def report_of(bench: Bench) -> SizeReport:
    return bench.state.size_report(DAY, bench.now)


def test_what_the_node_did_stands_beside_the_estimate() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0, policy="lru")
    one, two = bench.prompt(1, 2), bench.prompt(3, 4, 5, 6)
    for prompt in (one, two, one, one):
        ask(bench, prompt)
        bench.store(prompt)
        bench.tick(120.0)
    report = report_of(bench)
    assert (report.requests, report.asked_tokens, report.first_tokens) == (4, 10, 6)
    assert report.hit_tokens == {"host": 2, "nvme": 0}
    assert report.regretted_tokens == 2
    assert found(report, 4 * PAGE) == 2
    assert found(report, EDGES[-1]) == 4
    (more,) = report.more_gains
    assert (more.tier, more.tokens, more.seconds) == ("host", 2, report.regretted_seconds)
    assert PAGE <= more.more_bytes <= 4 * PAGE


def test_what_was_generated_and_stored_is_found_in_the_next_turn() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    turn = bench.prompt(1, 2)
    ask(bench, turn)
    bench.store(turn)
    bench.store(bench.prompt(1, 2, 3), first=2)
    assert ask(bench, bench.prompt(1, 2, 3)) == 3
    assert report_of(bench).first_tokens == 2


def test_a_purge_covers_the_sample() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    prompt = bench.prompt(1, 2)
    ask(bench, prompt)
    bench.store(prompt)
    assert report_of(bench).samples == 2
    _, effects = bench.state.start_purge(b"p" * 16, OfTenant(""), bench.now)
    bench.absorb(effects)
    assert report_of(bench).samples == 0


def test_looking_at_what_was_asked_is_idle_work() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    ask(bench, bench.prompt(1, 2))
    assert bench.state.has_idle_work
    bench.absorb(bench.state.make_ready(bench.now))
    assert not bench.state.has_idle_work


def test_regret_that_room_does_not_help_against_is_no_reason_for_more_of_it() -> None:
    live = sizing()
    for reason in (Reason.EVICTED, Reason.EXPIRED):
        ghost = replace(ghost_of(0, 1), reason=reason, evicted_at=1.0)
        live.ghost_changed(ghost, 1)
        live.regretted(ghost, 2.0, 3.0)
    assert [(gain.tokens, gain.seconds) for gain in live.report(DAY, 4.0).more_gains] == [(16, 2.0)]
