"""Admission: what is not stored in a memory that is full, and what is not written to a drive whose day is spent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.simulation import PAGE, Bench, Prompt
from tierkv.core.admission import DAY_SECONDS, STARTS_WITH, WriteBudget
from tierkv.core.grants import NO_ROOM, Dropped, Lease, Regretted, Reservation
from tierkv.core.instructions import Write
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.state import CacheState
from tierkv.core.value.hazards import NUM_BUCKETS
from tierkv.core.value.kinds import NUM_KINDS

FILE_BYTES = 4 * PAGE  # that an extent of two blocks reserves
HOUR = 3_600.0


def bench_of(*, files_an_hour: float, **shape: object) -> Bench:
    """A budget of so many extents of two blocks; the first hour's are there."""
    bench = Bench(**({"host_slots": 40, "extent_blocks": 2, "nvme_bytes": 1 << 24} | shape))  # type: ignore[arg-type]
    per_day = int(files_an_hour * 24 * FILE_BYTES)
    bench.limits = replace(bench.limits, nvme_write_bytes_per_day=per_day)
    bench.start()
    return bench


def finish(bench: Bench, prompt: Prompt) -> None:
    bench.store(prompt)
    bench.seal(prompt)
    bench.work()


def use(bench: Bench, prompt: Prompt) -> None:
    lease = bench.load(prompt)
    bench.release(lease)


def dropped(bench: Bench) -> list[Reason]:
    return [notice.reason for notice in bench.notices if isinstance(notice, Dropped)]


def on_disk(bench: Bench) -> set[bytes]:
    return {key for _, _, key in bench.disk.files}


# ---- the budget by itself


def test_the_budget_fills_over_the_day_and_holds_a_day_s() -> None:
    budget = WriteBudget(2_400)
    budget.fill(1_000.0)
    assert budget.left == 2_400 * STARTS_WITH == 100
    budget.fill(1_000.0 + HOUR)
    assert budget.left == pytest.approx(200)
    budget.fill(500.0)  # a clock that goes back gives nothing, twice
    budget.fill(1_000.0 + HOUR)
    assert budget.left == pytest.approx(200)
    assert budget.when(300) == pytest.approx(1_000.0 + 2 * HOUR, abs=0.1)
    budget.fill(1_000.0 + 10 * DAY_SECONDS)
    assert budget.left == 2_400
    assert budget.has(1 << 40), "an extent larger than a day's budget goes when the budget is full"


def test_bytes_of_today_begin_anew_at_midnight() -> None:
    budget = WriteBudget(0)
    budget.note_written(5, 10 * DAY_SECONDS + 1.0)
    budget.note_written(6, 10 * DAY_SECONDS + 2.0)
    assert budget.written_today(10 * DAY_SECONDS + 3.0) == 11
    assert budget.written_today(11 * DAY_SECONDS) == 0
    budget.note_written(7, 11 * DAY_SECONDS)
    assert budget.written_today(11 * DAY_SECONDS + 1.0) == 7


# ---- what is written


def test_without_a_budget_everything_is_written() -> None:
    bench = bench_of(files_an_hour=0)
    for number in range(10):
        finish(bench, bench.prompt(number, 100))
    assert len(bench.disk.files) == 10


def test_past_the_budget_only_what_was_used_again_is_written() -> None:
    bench = bench_of(files_an_hour=2)
    prompts = [bench.prompt(number, 100) for number in range(4)]
    for prompt in prompts:
        finish(bench, prompt)
    assert on_disk(bench) == {prompts[0].key(0), prompts[1].key(0)}
    assert dropped(bench) == [Reason.WRITE_BUDGET] * 2
    assert bench.state.counts.dropped_writes == {Reason.WRITE_BUDGET: 2}
    use(bench, prompts[3])
    bench.tick(HOUR / 4)
    bench.work()
    assert prompts[3].key(0) not in on_disk(bench)
    bench.tick(HOUR / 3)
    bench.work()
    assert prompts[3].key(0) in on_disk(bench)
    assert prompts[2].key(0) not in on_disk(bench), "it was used once"


def test_the_core_asks_to_be_woken_when_the_budget_has_room() -> None:
    bench = bench_of(files_an_hour=1)
    first, second = bench.prompt(1, 2), bench.prompt(3, 4)
    finish(bench, first)
    finish(bench, second)
    use(bench, second)
    bench.tick(10.0)  # what else was due
    due = bench.state.next_wakeup()
    assert due is not None
    assert due == pytest.approx(1_000.0 + HOUR, abs=1.0)
    bench.tick(due + 0.01 - bench.now)
    bench.work()
    assert second.key(0) in on_disk(bench)


def test_of_what_waits_the_dearest_is_written_first() -> None:
    bench = bench_of(files_an_hour=1, policy="lru")
    finish(bench, bench.prompt(1, 2))
    seldom, often = bench.prompt(3, 4), bench.prompt(5, 6)
    for prompt, uses in ((seldom, 1), (often, 5)):
        finish(bench, prompt)
        for _ in range(uses):
            use(bench, prompt)
    bench.tick(HOUR)
    bench.work()
    assert often.key(0) in on_disk(bench)
    assert seldom.key(0) not in on_disk(bench)


def test_a_second_computation_counts_as_use_though_the_first_copy_was_evicted() -> None:
    bench = bench_of(files_an_hour=1, host_slots=2)
    finish(bench, bench.prompt(1, 2))
    twice = bench.prompt(3, 4)
    bench.tick(1.0)
    finish(bench, twice)
    bench.tick(1.0)
    finish(bench, bench.prompt(5, 6))
    assert bench.match(twice) == (0, 0)
    bench.tick(1.0)
    lease = bench.acquire(twice)
    assert isinstance(lease, Lease)
    assert [notice.blocks for notice in bench.notices if isinstance(notice, Regretted)] == [2]
    finish(bench, twice)
    extent = bench.state._ledger.tree.heads[twice.key(0)]
    assert (extent.hits, extent.uses) == (0, 1)
    bench.tick(HOUR)
    bench.work()
    assert twice.key(0) in on_disk(bench)


def test_what_hangs_on_an_extent_that_is_not_written_is_not_written_before_it() -> None:
    bench = bench_of(files_an_hour=1)
    finish(bench, bench.prompt(9, 9))
    parent, whole = bench.prompt(1, 2), bench.prompt(1, 2, 3, 4)
    finish(bench, whole)
    use(bench, whole)
    for keys in ({parent.key(0)}, {parent.key(0), whole.key(2)}):
        bench.tick(HOUR)
        bench.work()
        assert on_disk(bench) >= keys
        assert len(on_disk(bench)) == 1 + len(keys)


def test_what_waited_and_is_gone_is_not_written() -> None:
    bench = bench_of(files_an_hour=1, host_slots=2)
    finish(bench, bench.prompt(1, 2))
    bench.tick(1.0)
    gone = bench.prompt(3, 4)
    finish(bench, gone)
    use(bench, gone)
    bench.tick(1.0)
    finish(bench, bench.prompt(5, 6))
    bench.tick(HOUR)
    assert not [op for op in bench.worker.waiting if isinstance(op, Write)]
    assert bench.state.next_wakeup() is None or bench.state.next_wakeup() > bench.now  # type: ignore[operator]


def test_of_too_many_that_wait_the_cheapest_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.core.admission.MOST_WAITING", 4)
    bench = bench_of(files_an_hour=1)
    finish(bench, bench.prompt(1, 2))
    for number in range(10, 15):
        finish(bench, bench.prompt(number, 7))
        for _ in range(number):
            use(bench, bench.prompt(number, 7))
    assert bench.state.counts.dropped_writes[Reason.WRITE_BUDGET] == 5 + 3
    assert len(bench.state._cascade.admission._known) == 3, "one was used again after it was given up"


# ---- what is stored


def refused(bench: Bench, prompt: Prompt, *, rank: int = 0) -> Reservation:
    answer = bench.reserve(prompt, rank=rank)
    assert isinstance(answer, Reservation)
    return answer


def favourites(**shape: object) -> Bench:
    """Memory is full of what is used all the time, and that is known."""
    bench = Bench(**({"host_slots": 8, "nvme_bytes": 0, "extent_blocks": 2} | shape))  # type: ignore[arg-type]
    ranks = tuple(range(bench.spec.identity.parallel.shards))
    for number in range(4):
        for rank in ranks:
            bench.store(bench.prompt(number, 9), rank=rank)
        bench.seal(bench.prompt(number, 9))
    for turn in range(40):
        bench.tick(1.0)
        bench.release(bench.load(bench.prompt(turn % 4, 9), ranks=ranks))
    return bench


def welcome_anything(bench: Bench) -> None:
    """As if nothing were ever used again."""
    hazards = bench.state._ledger.reuse.hazards
    hazards._index = [[0.0] * NUM_BUCKETS for _ in range(NUM_KINDS)]
    hazards.version += 1


def test_new_blocks_that_are_worth_less_than_what_would_go_for_them_are_refused_by_name() -> None:
    bench = favourites()
    ticket = refused(bench, bench.prompt(50, 51))
    assert ticket.states == bytes([NO_ROOM] * 2)
    assert ticket.reason is Reason.WORTH_LESS
    assert bench.state.counts.refused_blocks == {Reason.WORTH_LESS: 2}
    assert all(bench.match(bench.prompt(number, 9)) == (2, 2) for number in range(4))
    (ghost,) = bench.state._ledger.ghosts
    assert (ghost.key, ghost.blocks, ghost.reason) == (bench.prompt(50).key(0), 2, Reason.WORTH_LESS)


def test_where_nothing_is_ever_asked_for_again_everything_new_is_taken() -> None:
    bench = Bench(host_slots=8, extent_blocks=2)
    for number in range(280):  # more requests than it takes to learn
        bench.tick(0.1)
        prompt = bench.prompt(2 * number, 2 * number + 1)
        assert not bench.acquire(prompt).blocks  # type: ignore[union-attr]
        assert len(bench.store(prompt).offsets) == 2, f"request {number} was refused"
        bench.seal(prompt)
        bench.work()
    assert bench.state.counts.refused_blocks == {}


def test_what_was_refused_is_known_when_it_is_asked_for_again_and_comes_in_then() -> None:
    bench = favourites()
    wanted = bench.prompt(50, 51)
    for _ in range(40):
        bench.tick(1.0)
        lease = bench.acquire(wanted)
        assert isinstance(lease, Lease)
        if lease.blocks:
            break
        ticket = refused(bench, wanted)
        if ticket.offsets:
            bench.fill(wanted, ticket)
            bench.commit(ticket)
    assert bench.match(wanted) == (2, 2)
    assert bench.state._ledger.tree.heads[wanted.key(0)].uses > 0


def test_asking_for_what_was_refused_is_a_use_of_it_and_storing_it_then_is_none() -> None:
    bench = favourites()
    wanted = bench.prompt(50, 51)
    refused(bench, wanted)
    lease = bench.acquire(wanted)
    assert isinstance(lease, Lease)
    (ghost,) = bench.state._ledger.ghosts
    assert (ghost.hits, ghost.uses, ghost.asked) == (0, 1, True)
    welcome_anything(bench)
    bench.store(wanted)
    assert bench.state._ledger.tree.heads[wanted.key(0)].uses == 1


def test_asking_for_room_again_at_once_is_no_second_use() -> None:
    bench = favourites()
    for _ in range(3):
        refused(bench, bench.prompt(50, 51))
    (ghost,) = bench.state._ledger.ghosts
    assert (ghost.uses, ghost.asked) == (0, False)


def test_while_there_is_room_nothing_is_refused() -> None:
    bench = favourites(host_slots=10)
    assert refused(bench, bench.prompt(50, 51)).reason is None


def test_of_two_ranks_the_one_that_asks_first_decides_for_both() -> None:
    bench = favourites(ranks=2, host_slots=16)
    wanted = bench.prompt(50, 51)
    assert refused(bench, wanted, rank=1).reason is Reason.WORTH_LESS
    welcome_anything(bench)
    assert refused(bench, wanted, rank=0).reason is Reason.WORTH_LESS


def test_by_last_use_nothing_is_refused() -> None:
    bench = favourites(policy="lru")
    assert refused(bench, bench.prompt(50, 51)).reason is None


def test_a_file_that_is_worth_less_than_those_on_a_full_drive_is_not_written() -> None:
    bench = Bench(host_slots=40, nvme_bytes=4 * FILE_BYTES + PAGE, extent_blocks=2)
    for number in range(4):
        bench.store_durably(bench.prompt(number, 9))
    for turn in range(40):
        bench.tick(1.0)
        use(bench, bench.prompt(turn % 4, 9))
    bench.store_durably(bench.prompt(50, 51))
    extent = bench.state._ledger.tree.heads[bench.prompt(50).key(0)]
    assert extent.nvme is FileState.ABSENT
    assert dropped(bench) == [Reason.WORTH_LESS]
    assert len(bench.disk.files) == 4


def test_a_core_without_nvme_has_no_budget_to_keep() -> None:
    bench = bench_of(files_an_hour=1, nvme_bytes=0)
    finish(bench, bench.prompt(1, 2))
    assert isinstance(bench.state, CacheState)
    assert dropped(bench) == []
