"""What is remembered of acquires: what they asked, what they got, and why the first missing block was missing."""

from __future__ import annotations

import pytest

from tests.core.simulation import Bench, Prompt
from tierkv.core.absence import Absence
from tierkv.core.grants import Lease, Reservation, Waiting
from tierkv.core.keys import KEY_BYTES
from tierkv.core.purge_scope import OfTenant
from tierkv.core.reasons import Reason
from tierkv.core.recent import BLOCKS_BEHIND, RecentAcquire, RecentAcquires, Refusal, Refusals


def latest(bench: Bench) -> RecentAcquire:
    return next(iter(bench.state.recent))


def acquire(bench: Bench, prompt: Prompt, name: str = "", seconds: float = 10.0) -> Lease | Waiting:
    answer, effects = bench.state.acquire(
        grant=bench.grant(),
        session=b"engine",
        group=prompt.group,
        keys=prompt.keys,
        max_blocks=100,
        deadline=bench.now + seconds,
        name=name,
        now=bench.now,
    )
    bench.absorb(effects)
    assert isinstance(answer, Lease | Waiting)
    return answer


def record(keys: int, cached: int = 0, group: bytes = b"g") -> RecentAcquire:
    return RecentAcquire(
        grant=b"grant",
        name="",
        session=b"engine",
        group=group,
        keys=bytes(keys * KEY_BYTES),
        asked_blocks=keys,
        cached_blocks=cached,
        host_blocks=0,
        absence=Absence.UNKNOWN,
        asked_at=1.0,
    )


def test_a_miss_is_remembered_by_name_with_what_it_asked_and_got() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    bench.store(bench.prompt(1, 2))
    lease = acquire(bench, bench.prompt(1, 2, 3), "cmpl-1")
    assert isinstance(lease, Lease)
    seen = latest(bench)
    assert (seen.name, seen.grant, seen.group) == ("cmpl-1", lease.grant, bench.spec.group)
    assert (seen.asked_blocks, seen.cached_blocks, seen.host_blocks, seen.blocks) == (3, 2, 2, 2)
    assert seen.is_miss
    assert (seen.absence, seen.reason) == (Absence.UNKNOWN, None)
    bench.release(lease)


def test_what_got_all_that_it_asked_for_is_no_miss() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    bench.store(bench.prompt(1, 2))
    lease = acquire(bench, bench.prompt(1, 2))
    assert isinstance(lease, Lease)
    assert (latest(bench).is_answered, latest(bench).is_miss, latest(bench).absence) == (True, False, None)
    bench.release(lease)


def test_one_that_waits_for_the_disk_is_no_miss_yet_and_is_told_the_answer_when_it_comes() -> None:
    bench = Bench(host_slots=8)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store_durably(prompt)
    bench.start()
    assert isinstance(acquire(bench, prompt, "late"), Waiting)
    assert not latest(bench).is_answered
    bench.now += 0.5
    bench.work()
    lease = bench.ready()
    seen = latest(bench)
    assert (seen.blocks, seen.nvme_blocks, seen.host_blocks) == (4, 4, 0)
    assert seen.answered_at - seen.asked_at == pytest.approx(0.5)
    bench.release(lease)


def test_one_that_the_disk_keeps_waiting_got_less_for_a_reason() -> None:
    bench = Bench(host_slots=8)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.start()
    assert isinstance(acquire(bench, prompt, seconds=1.0), Waiting)
    bench.tick(1.0)
    assert (latest(bench).blocks, latest(bench).reason, latest(bench).absence) == (0, Reason.DEADLINE, None)
    bench.work()


def test_one_whose_session_ended_while_it_waited_got_nothing() -> None:
    bench = Bench(host_slots=8)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.start()
    assert isinstance(acquire(bench, prompt), Waiting)
    bench.absorb(bench.state.end_session(b"engine", bench.now))
    assert (latest(bench).is_miss, latest(bench).reason) == (True, Reason.SESSION_GONE)
    bench.work()


def test_a_block_that_was_being_written_is_told_from_one_that_waits_for_its_predecessor() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    whole = bench.prompt(1, 2)
    ticket = bench.reserve(whole)
    assert isinstance(ticket, Reservation)
    acquire(bench, whole)
    assert latest(bench).absence is Absence.PENDING
    bench.absorb(bench.state.abort(ticket.grant, bench.now))
    acquire(bench, whole)
    assert latest(bench).absence is Absence.UNKNOWN


def test_a_block_that_one_rank_has_not_committed_is_staged() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, ranks=2)
    prompt = bench.prompt(1)
    bench.store(prompt, rank=0)
    acquire(bench, prompt)
    assert latest(bench).absence is Absence.STAGED


def test_a_block_that_was_refused_room_is_remembered_as_that() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    held = bench.prompt(1, 2)
    bench.store(held)
    lease = acquire(bench, held)
    assert isinstance(lease, Lease)
    other = bench.prompt(7, 8)
    bench.store(other)  # nothing of it has room
    acquire(bench, other)
    assert latest(bench).absence is Absence.REFUSED
    refused = bench.state.refusals.find(other.group, other.key(0))
    assert refused == Refusal(2, Reason.NO_ROOM, bench.now)
    bench.release(lease)


def test_what_is_remembered_is_bounded_by_bytes_and_the_oldest_goes_first() -> None:
    recent = RecentAcquires(capacity_bytes=3_000)
    for keys in range(1, 9):
        recent.note(record(keys))
    assert recent.num_bytes <= 3_000
    assert [one.asked_blocks for one in recent] == [8, 7, 6]
    assert recent.num_bytes == sum(one.num_bytes for one in recent)


def test_no_more_keys_are_kept_than_a_look_behind_what_was_cached_needs() -> None:
    recent = RecentAcquires()
    long, short = record(10_000, cached=10), record(100, cached=10)
    recent.note(long)
    recent.note(short)
    assert len(long.keys) == (10 + BLOCKS_BEHIND) * KEY_BYTES
    assert len(short.keys) == 100 * KEY_BYTES
    assert long.asked_blocks == 10_000


def test_the_oldest_refusal_is_forgotten_first() -> None:
    refusals = Refusals(capacity=2)
    for key in (b"1", b"2", b"1", b"3"):
        refusals.note(b"g", key, Refusal(1, Reason.NO_ROOM, 0.0))
    assert len(refusals) == 2
    assert refusals.find(b"g", b"2") is None
    assert refusals.find(b"g", b"1") is not None


def test_a_purge_leaves_no_memory_of_who_asked_for_what() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0)
    prompt = bench.prompt(1, 2, 3)
    bench.store(prompt.first(2))
    lease = acquire(bench, prompt, "secret")
    assert isinstance(lease, Lease)
    bench.release(lease)
    _, effects = bench.state.start_purge(b"purge", OfTenant(""), bench.now)
    bench.absorb(effects)
    assert list(bench.state.recent) == []
