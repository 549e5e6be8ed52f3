"""Which prefixes save the most, and how much: from leases as they are granted."""

from __future__ import annotations

import pytest

from tests.core.simulation import Bench, Prompt
from tierkv.core.grants import Lease
from tierkv.core.hottest import HALF_LIFE_SECONDS, HotPrefix, Hottest


def hit(bench: Bench, prompt: Prompt, times: int = 1) -> None:
    for _ in range(times):
        lease = bench.acquire(prompt)
        assert isinstance(lease, Lease)
        assert lease.blocks
        bench.release(lease)


def hottest(bench: Bench, most: int = 10) -> list[HotPrefix]:
    return bench.state.hottest(most, bench.now)


def test_what_was_hit_once_is_no_prefix_that_saves_yet() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    assert hottest(bench) == []
    hit(bench, prompt)
    assert hottest(bench) == []


def test_a_prefix_is_told_with_its_tokens_its_hits_and_what_they_saved() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, block_tokens=2, extent_blocks=2)
    prompt = bench.prompt(*range(12))
    bench.store(prompt)
    hit(bench, prompt, times=4)
    (found,) = hottest(bench)
    assert (found.first_token, found.tokens) == (0, 12)
    assert found.key == prompt.key(5)  # of its last block
    assert found.hits == 3  # the first made it worth watching
    assert found.saved_tokens == 3 * 12
    assert found.mean_depth == pytest.approx(6.0)


def test_a_prompt_that_many_begin_with_is_a_prefix_of_its_own() -> None:
    bench = Bench(host_slots=32, nvme_bytes=0, extent_blocks=2)
    system, one, two = bench.prompt(1, 2), bench.prompt(1, 2, 3, 4), bench.prompt(1, 2, 5, 6)
    bench.store(system)
    bench.seal(system)
    for prompt in (one, two):
        bench.store(prompt)
    for _ in range(6):
        hit(bench, one)
        hit(bench, two)
    found = {prefix.key: prefix for prefix in hottest(bench)}
    assert [prefix.key for prefix in hottest(bench, 1)] == [system.key(1)]
    assert (found[system.key(1)].first_token, found[system.key(1)].tokens) == (0, 2)
    assert (found[one.key(3)].first_token, found[one.key(3)].tokens) == (2, 4)
    assert [found[key].saved_tokens for key in (system.key(1), one.key(3), two.key(3))] == [11 * 2, 5 * 2, 5 * 2]


def test_each_token_that_was_saved_is_counted_for_one_prefix() -> None:
    bench = Bench(host_slots=64, nvme_bytes=0, extent_blocks=2)
    prompt = bench.prompt(*range(20))
    bench.store(prompt)
    saved = 0
    for number in range(40):
        blocks = 2 + number * 7 % 19
        hit(bench, prompt.first(blocks))
        saved += blocks
    counted = sum(prefix.saved_tokens for prefix in hottest(bench, 99))
    assert 0.8 * saved < counted <= saved


def test_only_what_a_lease_reached_is_saved() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, extent_blocks=4)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store(prompt)
    hit(bench, prompt.first(1), times=3)
    assert hottest(bench)[0].saved_tokens == 2


def test_what_was_evicted_or_purged_is_no_longer_shown() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    hit(bench, prompt, times=3)
    assert hottest(bench)
    bench.fill_host()
    assert hottest(bench) == []


def test_what_saves_now_comes_before_what_saved_long_ago() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    old, young = bench.prompt(1), bench.prompt(2)
    bench.store(old)
    hit(bench, old, times=10)
    bench.tick(6 * HALF_LIFE_SECONDS)
    bench.store(young)
    hit(bench, young, times=3)
    assert [prefix.key for prefix in hottest(bench)] == [young.key(0), old.key(0)]
    assert hottest(bench)[1].saved_tokens == 9  # what it saved is not forgotten


def test_time_may_pass_for_ever() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    prompt = bench.prompt(1)
    bench.store(prompt)
    for _ in range(4):
        hit(bench, prompt, times=2)
        bench.tick(100 * HALF_LIFE_SECONDS)
    (found,) = hottest(bench)
    assert (found.hits, found.saved_tokens) == (7, 7)
    assert 0.0 <= found.recent_tokens < 1e-20


def test_the_table_is_bounded_and_keeps_what_is_hit_all_the_time() -> None:
    bench = Bench(host_slots=256, nvme_bytes=0)
    table = Hottest(kept=4)
    bench.state._ledger.hottest = table
    favourite = bench.prompt(1)
    bench.store(favourite)
    for number in range(2, 60):
        passing = bench.prompt(number)
        bench.store(passing)
        hit(bench, passing, times=2)
        hit(bench, favourite)
        bench.tick(1.0)
        assert len(table) <= 8
    found = hottest(bench)[0]
    assert found.key == favourite.key(0)
    assert found.hits == 57
