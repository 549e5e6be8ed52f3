"""Stories about CacheState, each from something that went wrong in another cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest

from tests.core.simulation import FILE_HEADER_BYTES, PAGE, Bench, Disk, file_of
from tierkv.core.grants import (
    GRANTED,
    NO_ROOM,
    PENDING,
    PRESENT,
    Committed,
    Dropped,
    Evicted,
    Lease,
    Refused,
    Reservation,
    SealReady,
    Waiting,
)
from tierkv.core.instructions import Read, Remove, SetAside, TierHealth, Write
from tierkv.core.reasons import Reason


@pytest.fixture(autouse=True)
def _no_bench_is_left_with_grants(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """When its engines are gone and its worker is done, nothing is held and nothing leaks."""
    benches: list[Bench] = []
    begin = Bench.start

    def start(self: Bench, *arguments: object, **named: object) -> None:
        begin(self, *arguments, **named)  # type: ignore[arg-type]
        benches.append(self)

    monkeypatch.setattr(Bench, "start", start)
    yield
    for bench in {id(bench): bench for bench in benches}.values():
        for session in [b"engine", b"other"]:
            bench.absorb(bench.state.end_session(session, bench.now))
        bench.work()
        bench.tick(1_000.0)
        bench.work()
        assert (bench.state.num_leases, bench.state.num_tickets, bench.state.num_sessions) == (0, 0, 0)
        host = bench.state.tiers()[0]
        assert host.reserved_bytes == 0


# ---- slots are reused only when nobody can touch them any more


@pytest.mark.scenario(
    "B033",
    then="it is a miss at once, its bytes stay as they are for the reader through a hundred stores, and exactly one "
    "slot is free when the reader lets go",
)
def test_a_block_found_bad_is_a_miss_at_once_and_its_memory_is_free_when_its_reader_lets_go() -> None:
    bench = Bench(host_slots=3, nvme_bytes=0, extent_blocks=1)
    prompt = bench.prompt(1)
    bench.store(prompt)
    lease = bench.load(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 0, bench.now))
    assert bench.match(prompt) == (0, 0)
    for token in range(100, 200):
        bench.store(bench.prompt(token))
        bench.check_lease(prompt, lease)
    assert bench.host_used() == 3
    bench.release(lease)
    assert bench.host_used() == 2


@pytest.mark.scenario(
    "B030",
    then="eviction passes over the block that is in use and takes another one; its reader gets its own bytes",
)
def test_eviction_takes_another_block_than_the_one_that_is_being_read_from() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0, extent_blocks=1)
    first, second = bench.prompt(1), bench.prompt(2)
    bench.store(first)
    bench.store(second)
    lease = bench.load(first)  # older than the second, and in use
    bench.store(bench.prompt(3))
    assert bench.match(first) == (1, 1)
    assert bench.match(second) == (0, 0)
    bench.check_lease(first, lease)


@pytest.mark.scenario(
    "B031",
    then="the store is refused at once with the reason no_room; the copy that was running and the file that was "
    "being written get their own bytes",
)
def test_a_store_is_refused_while_every_slot_is_leased_or_being_written_to_disk() -> None:
    bench = Bench(host_slots=2, extent_blocks=1)
    leased, written = bench.prompt(1), bench.prompt(2)
    bench.store_durably(leased)
    lease = bench.load(leased)
    bench.store(written)
    bench.seal(written)  # its write is on its way and held up
    refused = bench.reserve(bench.prompt(3))
    assert refused == Reservation(
        grant=refused.grant, states=bytes([NO_ROOM]), offsets=[], generations=[], reason=Reason.NO_ROOM
    )
    bench.work()  # the file gets its own blocks
    assert bench.flushed(written) == 1
    bench.release(lease)
    assert bench.store(bench.prompt(3)).states == bytes([GRANTED])


def test_a_ticket_s_slots_come_back_only_with_the_end_of_its_holder_however_long_it_takes() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    bench.state.open_session(b"other", bench.now)
    ticket = bench.reserve(bench.prompt(1, 2), session=b"other")
    assert isinstance(ticket, Reservation)
    bench.tick(10_000.0)
    assert bench.reserve(bench.prompt(3)).states == bytes([NO_ROOM])
    bench.absorb(bench.state.end_session(b"other", bench.now))
    assert bench.state.commit(ticket.grant, bench.now) == (Refused(Reason.SESSION_GONE), [])
    assert bench.store(bench.prompt(3)).states == bytes([GRANTED])


@pytest.mark.scenario(
    "B041",
    then="the second end of a grant changes nothing, and the slots of the next two grants differ",
)
def test_ending_a_grant_twice_changes_nothing_and_slots_have_one_owner() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0, extent_blocks=1)
    prompt = bench.prompt(1)
    aborted = bench.reserve(bench.prompt(9))
    for _ in range(2):
        bench.absorb(bench.state.abort(aborted.grant, bench.now))
    ticket = bench.store(prompt)
    bench.absorb(bench.state.abort(ticket.grant, bench.now))  # too late: it is committed
    assert bench.match(prompt) == (1, 1)
    lease = bench.load(prompt)
    for _ in range(2):
        bench.release(lease)
    assert bench.host_used() == 1
    one, two = bench.reserve(bench.prompt(2)), bench.reserve(bench.prompt(3))
    assert len({*ticket.offsets, *one.offsets, *two.offsets}) == 3


@pytest.mark.scenario("B042", then="what was granted stays as it was told, whatever is granted or freed later")
def test_answers_are_not_views_of_what_the_core_goes_on_changing() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0, extent_blocks=4)
    prompt = bench.prompt(1, 2)
    ticket = bench.store(prompt)
    lease = bench.load(prompt)
    before = (list(ticket.offsets), [list(part.offsets) for part in lease.parts])
    bench.store(bench.prompt(1, 2, 3, 4))
    assert (ticket.offsets, [part.offsets for part in lease.parts]) == before


# ---- publishing is one step


@pytest.mark.scenario("B034", then="a miss in memory until it is committed, and its own bytes then")
def test_a_block_is_no_hit_while_it_is_written() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    ticket = bench.reserve(prompt)
    assert bench.match(prompt) == (0, 0)
    assert bench.acquire(prompt) == Lease(grant=b"grant 2", blocks=0, nvme_blocks=0, cached_blocks=0, parts=())
    bench.fill(prompt, ticket)
    assert bench.commit(ticket) == Committed(visible=2, staged=0)
    bench.load(prompt)


@pytest.mark.scenario("B034", then="a miss on disk while its file is being written")
def test_a_block_is_no_hit_after_a_restart_while_its_file_was_being_written() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.seal(prompt)
    assert [type(op) for op in bench.worker.waiting] == [Write]
    bench.start()
    assert bench.match(prompt) == (0, 0)


def test_two_stores_of_one_key_make_one_block_and_the_second_may_try_again_after_the_first_fails() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    first = bench.reserve(prompt)
    second = bench.reserve(prompt)
    assert second.states == bytes([PENDING, PENDING])
    bench.absorb(bench.state.abort(first.grant, bench.now))
    third = bench.store(prompt)
    assert third.states == bytes([GRANTED, GRANTED])
    assert bench.store(prompt).states == bytes([PRESENT, PRESENT])
    assert bench.host_used() == 2
    bench.seal(prompt)
    bench.work()
    assert [file.keys for file in bench.disk.files.values()] == [prompt.keys]


def test_a_commit_sent_twice_is_answered_alike_and_done_once() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    prompt = bench.prompt(1, 2)
    ticket = bench.store(prompt)
    assert bench.commit(ticket) == Committed(visible=2, staged=0)
    assert bench.host_used() == 2


@pytest.mark.scenario("B047", then="the commit of an attempt that was given up is refused and publishes nothing")
@pytest.mark.scenario(
    "B038",
    then="slots belong to their ticket until it ends; the commit of one that has ended publishes nothing, so that a "
    "key never leads to bytes of another request",
)
def test_the_commit_of_a_stale_attempt_publishes_nothing() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    prompt = bench.prompt(1)
    stale = bench.reserve(prompt)
    bench.absorb(bench.state.abort(stale.grant, bench.now))
    attempt = bench.reserve(prompt)
    assert attempt.offsets == stale.offsets
    assert bench.commit(stale) == Refused(Reason.GRANT_ENDED)
    assert bench.match(prompt) == (0, 0)
    bench.fill(prompt, attempt)
    bench.commit(attempt)
    bench.load(prompt)


def test_an_abort_that_overtakes_its_reserve_counts() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    bench.absorb(bench.state.abort(b"early", bench.now))
    assert bench.reserve(bench.prompt(1), grant=b"early") == Refused(Reason.GRANT_ENDED)
    assert bench.host_used() == 0


def test_a_block_committed_before_its_predecessor_appears_with_it() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    prompt = bench.prompt(1, 2, 3)
    head = bench.reserve(bench.prompt(1))
    tail = bench.reserve(prompt, first=1)
    bench.fill(prompt, tail, first=1)
    assert bench.commit(tail) == Committed(visible=0, staged=2)
    assert bench.match(prompt) == (0, 0)
    bench.fill(prompt, head)
    assert bench.commit(head) == Committed(visible=1, staged=0)
    assert bench.match(prompt) == (3, 3)
    bench.load(prompt)


def test_a_block_whose_predecessor_never_comes_is_given_up_in_time() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, first=1)
    bench.tick(59.0)
    assert bench.host_used() == 1
    bench.tick(1.0)
    assert bench.host_used() == 0
    bench.store(prompt)
    assert bench.match(prompt) == (2, 2)


def test_a_reset_that_races_with_a_store_leaves_no_block_behind_a_parent_that_is_gone() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    prompt, stem = bench.prompt(1, 2), bench.prompt(1)
    bench.store(stem)
    ticket = bench.reserve(prompt)  # of the second block, held up
    bench.absorb(bench.state.report_bad(prompt.group, stem.keys, 0, bench.now))
    bench.store(bench.prompt(7))
    bench.fill(prompt, ticket, first=0)
    assert bench.commit(ticket) == Committed(visible=0, staged=1)
    assert bench.match(prompt) == (0, 0)
    bench.store(stem)
    assert bench.match(prompt) == (2, 2)
    bench.load(prompt)


@pytest.mark.parametrize("reason", [Reason.IO_ERROR, Reason.DISK_FULL, Reason.READ_ONLY])
@pytest.mark.parametrize("leaves_file", [False, True])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failed_write_leaves_no_file_and_no_bytes_and_the_blocks_stay_in_memory(
    reason: Reason, leaves_file: bool, failing_rank: int
) -> None:
    bench = Bench(host_slots=4, ranks=2)
    prompt = bench.prompt(1, 2)
    for rank in range(2):
        bench.store(prompt, rank=rank)
    bench.seal(prompt)
    for op in list(bench.worker.waiting):
        bench.worker.run(op, reason if op.rank == failing_rank else None, leaves_file=leaves_file)
    bench.absorb(bench.state.report(TierHealth(False, 0, 0, reason), bench.now))
    bench.hear()
    assert bench.flushed(prompt) == 0
    bench.work()
    assert bench.disk.files == {}
    assert bench.nvme_used() == 0
    assert bench.match(prompt) == (2, 2)
    assert Dropped(group=prompt.group, key=prompt.key(0), blocks=2, num_bytes=4 * PAGE, reason=reason) in bench.notices
    bench.absorb(bench.state.report(TierHealth(True, 0, 0), bench.now))  # it has passed
    bench.work()
    assert bench.flushed(prompt) == 2


def test_nothing_leaves_memory_before_it_is_on_disk_while_the_writer_is_held_up() -> None:
    bench = Bench(host_slots=4, extent_blocks=4)
    prompts = [bench.prompt(token, token, token, token) for token in (1, 2, 3)]
    bench.store(prompts[0])
    bench.seal(prompts[0])
    assert bench.reserve(prompts[1]).states == bytes([NO_ROOM] * 4)
    assert bench.match(prompts[0]) == (4, 4)
    bench.work()
    for prompt in prompts[1:]:
        bench.store_durably(prompt)
    assert not bench.state.counts.dropped_unwritten_bytes
    for prompt in prompts:
        assert bench.match(prompt)[0] == 4
        bench.release(bench.load(prompt))


# ---- prefixes and ranks


@pytest.mark.scenario(
    "B056",
    then="the hit ends before the hole and nothing behind it is read; when the missing block is stored the whole "
    "prompt is a hit, three blocks from memory and five from disk",
)
def test_a_hole_in_the_middle_ends_the_hit_and_reads_nothing_behind_it() -> None:
    bench = Bench(host_slots=8, extent_blocks=8)
    prompt = bench.prompt(0, 1, 2, 3, 4, 5, 6, 7)
    for end in (2, 3, 8):
        bench.store_durably(prompt.first(end))
    bench.disk.lose((prompt.group, 0, prompt.key(2)))
    bench.start()
    bench.release(bench.load(prompt.first(2)))
    assert bench.match(prompt) == (2, 2)
    lease = bench.acquire(prompt)
    assert isinstance(lease, Lease)
    assert (lease.blocks, lease.cached_blocks) == (2, 2)
    assert not bench.worker.waiting
    assert bench.store(prompt).states == bytes([PRESENT] * 2 + [GRANTED] + [PRESENT] * 5)
    assert bench.match(prompt) == (8, 3)
    bench.load(prompt)


@pytest.mark.scenario("B057", then="the victims are the last blocks, one by one, and what is left is a hit")
@pytest.mark.parametrize("extent_blocks", [1, 2, 3, 8])
def test_eviction_goes_from_the_tail_of_a_chain(extent_blocks: int) -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, extent_blocks=extent_blocks)
    chain = bench.prompt(*range(8))
    bench.store(chain)
    for left, token in [(7, 100), (6, 101), (5, 102)]:
        bench.tick(1.0)
        bench.store(bench.prompt(token))
        assert bench.match(chain) == (left, left)
    evicted = [notice for notice in bench.notices if isinstance(notice, Evicted)]
    assert sum(notice.blocks for notice in evicted) == 3
    assert {(notice.tier, notice.to, notice.reason) for notice in evicted} == {("host", "dropped", Reason.EVICTED)}
    bench.load(chain)


def test_an_eviction_tells_what_went_and_how_old_and_how_often_hit_it_was() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0, extent_blocks=4)
    chain = bench.prompt(*range(4))
    stored = bench.now
    bench.store(chain)
    bench.tick(3.0)
    hit = bench.now
    bench.release(bench.load(bench.prompt(*range(3))))
    bench.tick(2.0)
    bench.store(bench.prompt(100))
    bench.tick(2.0)
    bench.store(bench.prompt(101))
    tail, hot = [notice for notice in bench.notices if isinstance(notice, Evicted)]
    assert (tail.key, tail.first_token, tail.tokens) == (chain.key(3), 3 * chain.block_tokens, chain.block_tokens)
    assert (tail.created, tail.last_used, tail.hits) == (stored, stored, 0)
    assert (hot.key, hot.first_token, hot.tokens) == (chain.key(2), 2 * chain.block_tokens, chain.block_tokens)
    assert (hot.created, hot.last_used, hot.hits) == (stored, hit, 1)


@pytest.mark.scenario("B207", then="it stays with the prefix it hangs on; the victims are others, each hit five times")
def test_a_new_entry_is_not_the_victim_of_its_own_store_nor_is_its_prefix() -> None:
    bench = Bench(host_slots=10, nvme_bytes=0, extent_blocks=1, policy="lru")
    for token in range(10):
        bench.store(bench.prompt(token))
    for _ in range(5):
        for token in range(10):  # the one that will be continued is the oldest of them
            bench.tick(1.0)
            bench.release(bench.load(bench.prompt(token)))
    longer = bench.prompt(0, 50, 51)
    bench.store(longer)
    assert bench.match(longer) == (3, 3)
    assert sum(bench.match(bench.prompt(token))[0] for token in range(10)) == 8


def test_what_was_used_last_goes_last() -> None:
    bench = Bench(host_slots=3, nvme_bytes=0, extent_blocks=1)
    for token in (1, 2, 3):
        bench.store(bench.prompt(token))
        bench.tick(1.0)
    bench.release(bench.load(bench.prompt(1)))
    bench.tick(1.0)
    bench.store(bench.prompt(4))
    assert [bench.match(bench.prompt(token))[0] for token in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_a_cold_tail_goes_before_a_head_that_is_asked_for() -> None:
    bench = Bench(host_slots=5, nvme_bytes=0, extent_blocks=4)
    whole = bench.prompt(1, 2, 3, 4)
    bench.store(whole)
    bench.tick(1.0)
    bench.store(bench.prompt(9))
    bench.tick(1.0)
    bench.release(bench.load(whole.first(2)))
    bench.store(bench.prompt(8, 8))
    assert bench.match(whole) == (2, 2)
    assert bench.match(bench.prompt(9)) == (1, 1)


def test_a_match_is_what_every_rank_has() -> None:
    bench = Bench(host_slots=12, ranks=2, extent_blocks=1)
    prompt = bench.prompt(0, 1, 2, 3, 4, 5)
    bench.store(prompt, rank=0)
    assert bench.match(prompt) == (0, 0)
    bench.store(prompt.first(3), rank=1)
    assert bench.match(prompt) == (3, 3)
    bench.store(prompt, rank=1)
    assert bench.match(prompt) == (6, 6)
    lease = bench.load(prompt, ranks=(0, 1))
    assert [part.rank for part in lease.parts] == [0, 1]


@pytest.mark.scenario("B199", then="without rank 1's file of block 3 both ranks are told of three blocks, then of six")
def test_a_rank_s_missing_file_shortens_the_match_of_all_until_it_is_stored_again() -> None:
    bench = Bench(host_slots=12, ranks=2, extent_blocks=1)
    prompt = bench.prompt(0, 1, 2, 3, 4, 5)
    bench.store_durably(prompt)
    bench.disk.lose((prompt.group, 1, prompt.key(3)))
    bench.start()
    assert bench.match(prompt) == (3, 0)
    lease = bench.load(prompt, ranks=(0, 1))
    assert (lease.blocks, lease.nvme_blocks) == (3, 3)
    bench.release(lease)
    bench.work()
    bench.store_durably(prompt)
    assert bench.match(prompt)[0] == 6
    assert bench.flushed(prompt) == 6
    bench.load(prompt, ranks=(0, 1))


def test_a_parent_comes_back_with_other_boundaries() -> None:
    bench = Bench(host_slots=8, extent_blocks=2)
    prompt = bench.prompt(0, 1, 2, 3)
    bench.store_durably(prompt)  # two extents of two
    bench.disk.lose((prompt.group, 0, prompt.key(0)))
    bench.start()
    assert bench.match(prompt) == (0, 0)
    bench.store_durably(prompt.first(1))
    assert bench.match(prompt) == (1, 1)
    bench.store_durably(prompt)
    assert bench.match(prompt) == (4, 2)
    bench.start()
    assert bench.match(prompt) == (4, 0)
    bench.load(prompt)


def test_a_growing_extent_stops_at_another_one_s_head_and_adopts_it() -> None:
    bench = Bench(host_slots=8, extent_blocks=8)
    prompt = bench.prompt(0, 1, 2, 3)
    bench.store_durably(prompt.first(2))
    bench.store_durably(prompt)
    bench.disk.lose((prompt.group, 0, prompt.key(0)))
    bench.start()  # only the extent of blocks 2 and 3
    bench.store(prompt.first(1))
    assert bench.store(prompt).states == bytes([PRESENT, GRANTED, PRESENT, PRESENT])
    assert bench.match(prompt) == (4, 2)
    bench.load(prompt)


# ---- leases


@pytest.mark.scenario(
    "B064",
    then="leases that nobody uses end with the process that holds them, and a store that found no room is served",
)
def test_leases_that_are_never_read_end_with_their_session() -> None:
    bench = Bench(host_slots=16, nvme_bytes=0, extent_blocks=1)
    bench.state.open_session(b"other", bench.now)
    for token in range(16):
        bench.store(bench.prompt(token))
        assert isinstance(bench.acquire(bench.prompt(token), session=b"other"), Lease)
    newcomer = bench.prompt(20, 21, 22, 23)
    assert bench.reserve(newcomer).states == bytes([NO_ROOM] * 4)
    bench.absorb(bench.state.end_session(b"other", bench.now))
    assert bench.state.num_leases == 0
    assert bench.store(newcomer).states == bytes([GRANTED] * 4)


@pytest.mark.scenario(
    "B064",
    then="a lease that may be revoked is, when it is held too long and the memory is needed, and its reader can tell",
)
def test_a_revocable_lease_held_too_long_is_taken_back_and_its_reader_can_tell() -> None:
    bench = Bench(host_slots=1, nvme_bytes=0)
    prompt = bench.prompt(1)
    bench.store(prompt)
    lease = bench.acquire(prompt, revocable=True)
    assert isinstance(lease, Lease)
    bench.tick(29.0)
    assert bench.reserve(bench.prompt(2)).states == bytes([NO_ROOM])
    bench.tick(1.0)
    bench.check_lease(prompt, lease)  # nobody has needed the memory yet
    bench.store(bench.prompt(2))
    (part,) = lease.parts
    assert [bench.generations[offset // PAGE] for offset in part.offsets] != part.generations
    bench.release(lease)


def test_a_lease_that_is_not_revocable_is_never_taken_back() -> None:
    bench = Bench(host_slots=1, nvme_bytes=0)
    prompt = bench.prompt(1)
    bench.store(prompt)
    lease = bench.load(prompt)
    bench.tick(1_000_000.0)
    assert bench.reserve(bench.prompt(2)).states == bytes([NO_ROOM])
    bench.check_lease(prompt, lease)


@pytest.mark.scenario(
    "B074",
    then="after each of twenty loads that are given up in the middle every slot is free or holds a cached block",
)
@pytest.mark.scenario(
    "B068",
    then="nothing stays reserved, however often a load is given up while its read is under way",
)
@pytest.mark.parametrize("ends", ["release", "session ends"])
@pytest.mark.parametrize("when", ["before the read is done", "after it"])
def test_a_load_given_up_with_reads_in_flight_leaks_no_slot_however_often(ends: str, when: str) -> None:
    bench = Bench(host_slots=4, extent_blocks=2)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store_durably(prompt)
    for _ in range(20):
        bench.fill_host()
        assert bench.match(prompt) == (4, 0)
        bench.state.open_session(b"other", bench.now)
        lease = bench.acquire(prompt, session=b"other")
        assert isinstance(lease, Waiting)
        if when == "after it":
            bench.worker.run_all()
        if ends == "release":
            bench.absorb(bench.state.release(f"grant {bench.numbers}".encode(), None, bench.now))
        else:
            bench.absorb(bench.state.end_session(b"other", bench.now))
        bench.work()
        assert bench.state.num_leases == 0
        host = bench.state.tiers()[0]
        assert host.reserved_bytes == 0
        assert host.used_bytes <= host.capacity_bytes
        bench.notices.clear()


def test_loads_of_other_lengths_one_after_the_other_have_each_their_own() -> None:
    bench = Bench(host_slots=30, nvme_bytes=0, extent_blocks=4)
    prompts = {blocks: bench.prompt(*range(100 * blocks, 101 * blocks)) for blocks in (10, 2, 1)}
    for prompt in prompts.values():
        bench.store(prompt)
    for blocks in (10, 2, 10, 1):
        lease = bench.load(prompts[blocks])
        assert lease.blocks == blocks
        bench.release(lease)


def test_a_part_of_a_lease_ends_alone() -> None:
    bench = Bench(host_slots=2, ranks=2, nvme_bytes=0)
    prompt = bench.prompt(1)
    for rank in range(2):
        bench.store(prompt, rank=rank)
    lease = bench.load(prompt, ranks=(0, 1))
    bench.release(lease, rank=0)
    assert bench.reserve(bench.prompt(2)).states == bytes([NO_ROOM])
    bench.check_lease(prompt, lease)
    bench.release(lease, rank=1)
    assert bench.reserve(bench.prompt(2)).states == bytes([GRANTED])


def test_a_session_holds_no_more_than_its_share() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, session_bytes=3 * PAGE)
    bench.state.open_session(b"other", bench.now)
    ticket = bench.reserve(bench.prompt(1, 2, 3, 4))
    assert (ticket.states, ticket.reason) == (bytes([GRANTED] * 3 + [NO_ROOM]), Reason.SESSION_CAP)
    assert bench.reserve(bench.prompt(5)).states == bytes([NO_ROOM])
    assert bench.reserve(bench.prompt(5), session=b"other").states == bytes([GRANTED])
    bench.fill(bench.prompt(1, 2, 3, 4), ticket)
    bench.commit(ticket)
    lease = bench.acquire(bench.prompt(1, 2, 3), session=b"other")
    assert isinstance(lease, Lease)
    assert (lease.blocks, lease.cached_blocks, lease.reason) == (2, 3, Reason.SESSION_CAP)


# ---- failed loads


def test_an_error_while_reading_shortens_the_load_and_may_be_tried_again() -> None:
    bench = Bench(host_slots=4, extent_blocks=4)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store_durably(prompt)
    bench.fill_host()
    assert isinstance(bench.acquire(prompt), Waiting)
    (read,) = bench.worker.waiting
    bench.worker.run(read, Reason.IO_ERROR, valid=2)
    bench.hear()
    lease = bench.ready()
    assert (lease.blocks, lease.nvme_blocks, lease.cached_blocks, lease.reason) == (2, 2, 4, Reason.IO_ERROR)
    bench.check_lease(prompt, lease)
    bench.release(lease)
    assert bench.load(prompt).blocks == 4


@pytest.mark.parametrize("harm", ["lost", "damaged"])
def test_a_file_that_is_not_right_fails_one_load_and_is_stored_again(harm: str) -> None:
    bench = Bench(host_slots=4, extent_blocks=4)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store_durably(prompt)
    bench.fill_host()
    name = (prompt.group, 0, prompt.key(0))
    if harm == "lost":
        bench.disk.lose(name)
    else:
        bench.disk.damage(name, 0)
    lease = bench.load(prompt)
    assert (lease.blocks, lease.reason) == (0, Reason.NOT_FOUND if harm == "lost" else Reason.CHECKSUM)
    assert bench.match(prompt) == (0, 0)
    assert bench.load(prompt).blocks == 0
    assert not [op for op in bench.worker.waiting if isinstance(op, Read)]
    bench.store_durably(prompt)
    bench.fill_host()
    assert bench.load(prompt).blocks == 4


def test_blocks_reported_bad_are_a_miss_their_file_goes_and_they_can_be_stored_again() -> None:
    bench = Bench(host_slots=4, extent_blocks=1)
    prompt = bench.prompt(1, 2, 3)
    bench.store_durably(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 1, bench.now))
    assert bench.match(prompt) == (1, 1)
    bench.work()
    assert [name[2] for name in bench.disk.files] == [prompt.key(0)]
    bench.store_durably(prompt)
    assert bench.flushed(prompt) == 3
    bench.load(prompt)


def test_a_deadline_gives_what_is_there() -> None:
    bench = Bench(host_slots=4, extent_blocks=2)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store_durably(prompt)
    bench.fill_host()
    assert isinstance(bench.acquire(prompt, seconds=2.0), Waiting)
    first = next(op for op in bench.worker.runnable() if op.key == prompt.key(0))
    bench.worker.run(first)
    bench.hear()
    assert bench.state.next_wakeup() == bench.now + 2.0
    bench.tick(2.0)
    lease = bench.ready()
    assert (lease.blocks, lease.cached_blocks, lease.reason) == (2, 4, Reason.DEADLINE)
    bench.check_lease(prompt, lease)


# ---- block arithmetic


@pytest.mark.scenario(
    "B254",
    then="for each number of tokens the hit is the number of full blocks, in memory and from disk",
)
@pytest.mark.parametrize("block_tokens", [1, 3])
@pytest.mark.parametrize("nvme_bytes", [0, 1 << 30])
def test_a_hit_is_the_full_blocks_for_every_length(block_tokens: int, nvme_bytes: int) -> None:
    for num_tokens in range(4 * block_tokens + 1):
        bench = Bench(host_slots=4, block_tokens=block_tokens, extent_blocks=2, nvme_bytes=nvme_bytes)
        prompt = bench.prompt(*range(num_tokens))
        full = num_tokens // block_tokens
        assert bench.store(prompt).states == bytes([GRANTED] * full)
        assert bench.match(prompt) == (full, full)
        assert bench.host_used() == full
        bench.seal(prompt)
        bench.work()
        if nvme_bytes:
            assert bench.flushed(prompt) == full
            bench.start()
            assert bench.match(prompt) == (full, 0)
        assert bench.load(prompt).blocks == full
        for more in range(1, block_tokens):
            assert bench.match(bench.prompt(*range(num_tokens), *[7] * more))[0] <= (num_tokens + more) // block_tokens


@pytest.mark.scenario(
    "B253",
    then="a load takes what memory has and the rest from disk, and a store only what is missing, whichever of the "
    "two is longer",
)
@pytest.mark.parametrize(("in_host", "on_nvme"), [(6, 4), (4, 6), (0, 6), (6, 0)])
def test_host_and_nvme_may_hold_prefixes_of_other_lengths(in_host: int, on_nvme: int) -> None:
    bench = Bench(host_slots=6, extent_blocks=2)
    prompt = bench.prompt(*range(6))
    bench.store_durably(prompt.first(on_nvme))
    bench.start()
    if in_host > on_nvme:
        assert bench.store(prompt.first(in_host)).states.count(GRANTED) == in_host - on_nvme
    bench.release(bench.load(prompt.first(in_host)))
    assert bench.match(prompt) == (6, in_host)
    lease = bench.load(prompt)
    assert (lease.blocks, lease.nvme_blocks) == (6, 6 - in_host)


@pytest.mark.scenario("B253", then="nothing asked is answered with nothing, by every call of the core")
def test_calls_of_length_zero_are_fine() -> None:
    bench = Bench(host_slots=2)
    nothing = bench.prompt()
    assert bench.match(nothing) == (0, 0)
    ticket = bench.store(nothing)
    assert (ticket.states, ticket.offsets, ticket.reason) == (b"", [], None)
    assert bench.load(nothing).blocks == 0
    assert bench.flushed(nothing) == 0
    bench.absorb(bench.state.report_bad(nothing.group, b"", 0, bench.now))
    bench.store(bench.prompt(1))
    assert bench.acquire(bench.prompt(1), max_blocks=0).blocks == 0
    assert bench.reserve(bench.prompt(1), first=1).states == b""


@pytest.mark.scenario(
    "B080",
    then="each store is answered block by block: none stored, four refused, no_room; when there is room the same "
    "stores succeed",
)
@pytest.mark.scenario("B255", then="no free slot is an answer, and the next store after a release is served")
def test_a_full_pool_is_a_normal_answer_for_as_many_stores_as_come() -> None:
    bench = Bench(host_slots=10, nvme_bytes=0, extent_blocks=1)
    held = bench.prompt(*range(10))
    bench.store(held)
    lease = bench.load(held)
    for token in range(100, 105):
        refused = bench.reserve(bench.prompt(token, token, token, token))
        assert (refused.states, refused.offsets, refused.reason) == (bytes([NO_ROOM] * 4), [], Reason.NO_ROOM)
    bench.release(lease)
    for token in range(100, 102):
        assert bench.store(bench.prompt(token, token, token, token)).states == bytes([GRANTED] * 4)


# ---- capacity


def test_what_is_larger_than_a_tier_is_refused_before_anything_is_given_up_for_it() -> None:
    file_bytes = FILE_HEADER_BYTES + PAGE
    bench = Bench(host_slots=4, extent_blocks=2, nvme_bytes=file_bytes)
    small, large = bench.prompt(1), bench.prompt(2, 2)
    bench.store_durably(small)
    bench.store_durably(large)
    assert bench.match(small) == (1, 1)
    assert [file.keys for file in bench.disk.files.values()] == [small.keys]
    assert [notice.reason for notice in bench.notices if isinstance(notice, Dropped)] == [Reason.LARGER_THAN_TIER]


def test_room_on_nvme_is_made_before_it_is_used() -> None:
    file_bytes = FILE_HEADER_BYTES + PAGE
    bench = Bench(host_slots=8, extent_blocks=1, nvme_bytes=2 * file_bytes)
    for token in range(6):
        prompt = bench.prompt(token)
        bench.store(prompt)
        bench.seal(prompt)
        while bench.worker.waiting:
            bench.worker.run(bench.worker.waiting[0])
            assert bench.disk.used_bytes <= bench.limits.nvme_bytes
            bench.hear()
            assert bench.disk.used_bytes <= bench.nvme_used() <= bench.limits.nvme_bytes
        bench.tick(1.0)
    assert [bench.flushed(bench.prompt(token)) for token in range(6)] == [0, 0, 0, 0, 1, 1]


def test_a_start_with_less_room_evicts_down_to_it_oldest_leaves_first() -> None:
    bench = Bench(host_slots=8, extent_blocks=1)
    chain = bench.prompt(0, 1, 2, 3)
    bench.store_durably(chain)
    smaller = Bench(host_slots=8, extent_blocks=1, nvme_bytes=2 * (FILE_HEADER_BYTES + PAGE), disk=bench.disk)
    smaller.work()
    assert smaller.match(chain) == (2, 0)
    assert len(smaller.disk.files) == 2


# ---- the worker and the front die


def test_every_order_of_rows_makes_the_same_tree() -> None:
    bench = Bench(host_slots=8, extent_blocks=1)
    chain, branch = bench.prompt(0, 1, 2), bench.prompt(0, 7)
    bench.store_durably(chain)
    bench.store_durably(branch)
    for order in permutations(bench.disk.files):
        bench.start(order)
        assert bench.match(chain) == (3, 0)
        assert bench.match(branch) == (2, 0)
    bench.load(chain)


def test_a_hundred_blocks_are_all_there_after_a_restart() -> None:
    bench = Bench(host_slots=100, extent_blocks=4)
    prompts = [bench.prompt(token, *range(9)) for token in range(10)]
    for prompt in prompts:
        bench.store_durably(prompt)
    used = bench.nvme_used()
    bench.start()
    assert bench.nvme_used() == used
    for prompt in prompts:
        assert bench.match(prompt) == (10, 0)
        bench.release(bench.load(prompt))


def test_an_orphan_waits_for_its_parent() -> None:
    bench = Bench(host_slots=4, extent_blocks=1)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.disk.lose((prompt.group, 0, prompt.key(0)))
    bench.start()
    assert bench.match(prompt) == (0, 0)
    bench.store(prompt)
    assert bench.match(prompt) == (2, 1)
    bench.load(prompt)


def test_a_dead_worker_s_writes_are_done_again_and_their_bytes_stay_booked_meanwhile() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.seal(prompt)
    booked = bench.nvme_used()
    bench.worker.die(1)  # after it had written the file, before it told
    bench.absorb(bench.state.worker_died(bench.now))
    assert bench.disk.used_bytes == bench.nvme_used() == booked
    bench.absorb(bench.state.worker_started(bench.now))
    assert [type(op) for op in bench.worker.waiting] == [Write]
    bench.work()
    assert bench.flushed(prompt) == 2
    assert bench.nvme_used() == booked


def test_a_dead_worker_s_reads_are_done_again_for_those_who_still_wait() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.fill_host()
    assert isinstance(bench.acquire(prompt), Waiting)
    bench.worker.die(0)
    bench.absorb(bench.state.worker_died(bench.now))
    bench.absorb(bench.state.worker_started(bench.now))
    bench.work()
    bench.check_lease(prompt, bench.ready())


def test_a_late_removal_never_takes_the_file_of_a_newer_extent_of_the_same_name() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 0, bench.now))
    (remove,) = bench.worker.waiting
    assert isinstance(remove, SetAside)
    bench.worker.run(remove, Reason.IO_ERROR)
    bench.hear()
    bench.store(prompt)
    bench.seal(prompt)
    assert bench.worker.waiting == []  # the old file is still to go
    bench.tick(1.0)
    assert [type(op) for op in bench.worker.waiting] == [Remove]
    bench.work()
    assert bench.flushed(prompt) == 2
    bench.start()
    assert bench.match(prompt) == (2, 0)


def test_a_new_extent_waits_for_the_write_of_a_condemned_one_of_the_same_name() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.seal(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 0, bench.now))
    bench.store(prompt)
    bench.seal(prompt)
    assert len(bench.worker.waiting) == 1
    bench.work()
    assert bench.flushed(prompt) == 2
    assert {file_of(op) for op in bench.worker.waiting} == set()
    assert len(bench.disk.files) == 1


@pytest.mark.parametrize("end", ["the write is done", "the worker dies"])
def test_what_is_left_of_an_extent_found_bad_while_it_was_written_is_written_again(end: str) -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.seal(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 1, bench.now))
    if end == "the worker dies":
        bench.worker.die(1)
        bench.absorb(bench.state.worker_died(bench.now))
        bench.absorb(bench.state.worker_started(bench.now))
    bench.work()
    assert bench.flushed(prompt) == 1
    assert [file.keys for file in bench.disk.files.values()] == [prompt.first(1).keys]


def test_a_seal_that_waits_is_answered_when_all_is_flushed_or_by_its_deadline() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    for seal_id, seconds in [(1, 1.0), (2, 60.0)]:
        answer, effects = bench.state.seal(
            seal_id=seal_id,
            group=prompt.group,
            keys=prompt.keys,
            wait_flushed=True,
            deadline=bench.now + seconds,
            now=bench.now,
        )
        assert isinstance(answer, Waiting)
        bench.absorb(effects)
    bench.tick(1.0)
    bench.work()
    ready = {n.seal_id: n.answer for n in bench.notices if isinstance(n, SealReady)}
    assert (ready[1].flushed_blocks, ready[1].reason) == (0, Reason.DEADLINE)
    assert (ready[2].flushed_blocks, ready[2].reason) == (2, None)


@pytest.mark.parametrize("first_bad", [0, 1])
def test_a_seal_that_waits_never_calls_flushed_what_was_found_bad_meanwhile(first_bad: int) -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    answer, effects = bench.state.seal(
        seal_id=1,
        group=prompt.group,
        keys=prompt.keys,
        wait_flushed=True,
        deadline=bench.now + 60.0,
        now=bench.now,
    )
    assert isinstance(answer, Waiting)
    bench.absorb(effects)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, first_bad, bench.now))
    bench.work()
    (ready,) = [n.answer for n in bench.notices if isinstance(n, SealReady)]
    assert (ready.blocks, ready.reason) == (first_bad, Reason.NOT_FOUND)
    assert ready.flushed_blocks <= first_bad


def test_a_group_without_files_is_never_written() -> None:
    bench = Bench(host_slots=4, persistent=False)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    assert bench.disk.files == {}
    assert bench.flushed(prompt) == 0
    assert bench.match(prompt) == (2, 2)
    assert Disk().used_bytes == 0
