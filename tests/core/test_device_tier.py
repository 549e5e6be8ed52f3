"""The GPU tier: what is stored on a device, what is found there, and what becomes of it when its worker dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from tests.core.simulation import PAGE, Bench, Prompt, stamps
from tierkv.core.addresses import pool_bases
from tierkv.core.evicting import EvictState
from tierkv.core.explain import Question
from tierkv.core.grants import PENDING, Committed, Evicted, Lease, Refused, Reservation, SealAnswer, SealReady, Waiting
from tierkv.core.instructions import Download, Upload, Zero
from tierkv.core.journal import Balances
from tierkv.core.purge_scope import OfPrefix, OfTenant
from tierkv.core.purges import PurgePhase, PurgeState
from tierkv.core.reasons import Reason
from tierkv.core.state import CacheState


@pytest.fixture(autouse=True)
def _no_bench_is_left_with_grants(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """When its engines are gone and its workers are done, nothing is held and nothing leaks."""
    benches: list[Bench] = []
    begin = Bench.start

    def start(self: Bench, *arguments: object, **named: object) -> None:
        begin(self, *arguments, **named)  # type: ignore[arg-type]
        benches.append(self)

    monkeypatch.setattr(Bench, "start", start)
    yield
    for bench in benches:
        for session in [b"engine", b"other"]:
            bench.absorb(bench.state.end_session(session, bench.now))
        bench.copy()
        bench.work()
        bench.tick(1_000.0)
        bench.copy()
        bench.work()
        assert (bench.state.num_leases, bench.state.num_tickets, bench.state.num_sessions) == (0, 0, 0)
        assert [tier.reserved_bytes for tier in bench.state.tiers() if tier.tier in ("gpu", "host")] == [0, 0]


def bench_with(
    *device_slots: int,
    host_slots: int = 8,
    nvme_bytes: int = 0,
    extent_blocks: int = 2,
    ranks: int = 1,
    policy: str = "density",
    mapped: bool = True,
) -> Bench:
    bench = Bench(
        host_slots=host_slots,
        nvme_bytes=nvme_bytes,
        extent_blocks=extent_blocks,
        ranks=ranks,
        policy=policy,
        device_slots=device_slots,
    )
    if mapped:
        bench.state.map_device(b"engine", 0)
    return bench


def on_device(bench: Bench, offsets: list[int]) -> list[bool]:
    return [offset >= bench.devices[0].base for offset in offsets]


def used(bench: Bench, device: int = 0) -> int:
    """Slots of a device's pool that extents have."""
    return bench.state.device_tiers()[device].used_bytes // PAGE


def store(bench: Bench, prompt: Prompt) -> Reservation:
    """On the device, landed."""
    ticket = bench.store(prompt, on_device=True)
    bench.copy()
    return ticket


# ---- storing


def test_what_is_stored_on_a_device_is_seen_when_it_is_in_host_memory_too() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    ticket = bench.reserve(prompt, on_device=True)
    assert isinstance(ticket, Reservation)
    assert on_device(bench, ticket.offsets) == [True, True]
    assert ticket.generations == [bench.generations[offset // PAGE] for offset in ticket.offsets]
    bench.fill(prompt, ticket)
    assert bench.commit(ticket) == Committed(0, 2)
    assert bench.commit(ticket) == Committed(0, 2)  # a repeated message
    assert bench.match(prompt) == (0, 0)
    assert bench.reserve(prompt) == Reservation(
        grant=b"grant 2", states=bytes([PENDING, PENDING]), offsets=[], generations=[]
    )
    bench.copy()
    assert bench.match(prompt) == (2, 2)
    assert used(bench) == 2
    lease = bench.load(prompt, on_device=True)
    assert (lease.device_blocks, lease.parts[0].offsets) == (2, ticket.offsets)
    assert bench.state.counts.hit_tokens == {"gpu": 2, "host": 0, "nvme": 0}


def test_who_has_mapped_no_pool_stores_and_finds_in_host_memory() -> None:
    bench = bench_with(4, mapped=False)
    prompt = bench.prompt(1)
    ticket = bench.store(prompt, on_device=True)
    assert on_device(bench, ticket.offsets) == [False]
    assert bench.match(prompt) == (1, 1)
    assert bench.load(prompt, on_device=True).device_blocks == 0


def test_a_holder_that_has_mapped_the_pool_may_still_ask_for_host_memory() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1)
    store(bench, prompt)
    lease = bench.load(prompt)
    assert (lease.device_blocks, on_device(bench, lease.parts[0].offsets)) == (0, [False])


def test_a_pool_that_is_smaller_than_a_ticket_takes_its_first_blocks() -> None:
    bench = bench_with(2)
    prompt = bench.prompt(1, 2, 3)
    ticket = store(bench, prompt)
    assert on_device(bench, ticket.offsets) == [True, True, False]
    lease = bench.load(prompt, on_device=True)
    assert (lease.blocks, lease.device_blocks) == (3, 2)


def test_an_aborted_ticket_leaves_neither_memory_with_less_room() -> None:
    bench = bench_with(2, host_slots=2)
    ticket = bench.reserve(bench.prompt(1, 2), on_device=True)
    assert isinstance(ticket, Reservation)
    bench.absorb(bench.state.abort(ticket.grant, bench.now))
    assert bench.host_used() == 0
    again = bench.reserve(bench.prompt(3, 4), on_device=True)
    assert isinstance(again, Reservation)
    assert on_device(bench, again.offsets) == [True, True]


def test_a_session_that_ends_after_its_commit_has_stored() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, on_device=True)
    bench.absorb(bench.state.end_session(b"engine", bench.now))
    bench.copy()
    assert bench.match(prompt) == (2, 2)


def test_a_session_that_ends_before_its_commit_has_stored_nothing() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    ticket = bench.reserve(prompt, on_device=True)
    assert isinstance(ticket, Reservation)
    bench.fill(prompt, ticket)
    bench.absorb(bench.state.end_session(b"engine", bench.now))
    bench.copy()
    assert bench.match(prompt) == (0, 0)
    assert [tier.reserved_bytes for tier in bench.state.device_tiers()] == [0]


def test_a_copy_that_failed_has_stored_nothing() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, on_device=True)
    (worker,) = bench.devices
    worker.run(worker.waiting[0], Reason.IO_ERROR)
    bench.copy()
    assert bench.match(prompt) == (0, 0)
    assert bench.host_used() == 0
    assert bench.state.counts.dropped_landings == {Reason.IO_ERROR: 2}


def test_blocks_of_two_ranks_appear_when_both_have_landed() -> None:
    bench = bench_with(4, 4, ranks=2)
    bench.state.open_session(b"other", bench.now)
    bench.state.map_device(b"other", 1)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, rank=0, on_device=True)
    bench.store(prompt, rank=1, session=b"other", on_device=True)
    first, second = bench.devices
    second.run_all()
    bench.absorb(bench.state.device_report(1, second.unheard.pop()[1], bench.now))
    assert bench.match(prompt) == (0, 0)
    first.run_all()
    bench.absorb(bench.state.device_report(0, first.unheard.pop()[1], bench.now))
    assert bench.match(prompt) == (2, 2)
    assert (used(bench, 0), used(bench, 1)) == (2, 2)
    answer, effects = bench.state.acquire(
        grant=b"both",
        session=b"engine",
        group=prompt.group,
        keys=prompt.keys,
        holders=((0, b"engine"), (1, b"other")),
        max_blocks=2,
        deadline=bench.now,
        on_device=True,
        now=bench.now,
    )
    bench.absorb(effects)
    assert isinstance(answer, Lease)
    bench.check_lease(prompt, answer)
    bases = [bench.devices[0].base, bench.devices[1].base]
    assert [part.offsets[0] for part in answer.parts] == bases


def test_a_duplicate_gives_up_both_slots() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    mine = bench.reserve(prompt.first(1), on_device=True)
    assert isinstance(mine, Reservation)
    bench.state.open_session(b"other", bench.now)
    bench.absorb(bench.state.end_session(b"other", bench.now))
    bench.fill(prompt.first(1), mine)
    bench.commit(mine)
    bench.copy()
    store(bench, prompt)
    assert used(bench) == 2
    assert bench.host_used() == 2


def test_a_seal_that_waits_for_the_flush_waits_for_the_landing_before_it() -> None:
    bench = bench_with(4, nvme_bytes=1 << 30)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, on_device=True)
    answer, effects = bench.state.seal(
        seal_id=7, group=prompt.group, keys=prompt.keys, wait_flushed=True, deadline=bench.now + 9, now=bench.now
    )
    assert answer == Waiting()
    bench.absorb(effects)
    bench.copy()
    bench.work()
    (ready,) = [notice for notice in bench.notices if isinstance(notice, SealReady)]
    assert (ready.seal_id, ready.answer.blocks, ready.answer.flushed_blocks) == (7, 2, 2)


def test_a_seal_that_does_not_wait_seals_what_lands_later() -> None:
    bench = bench_with(4, nvme_bytes=1 << 30)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, on_device=True)
    bench.seal(prompt)
    bench.copy()
    bench.work()
    assert bench.flushed(prompt) == 2


def test_a_seal_right_after_the_commit_says_that_the_blocks_are_on_their_way() -> None:
    bench = bench_with(4, nvme_bytes=1 << 30)
    first, whole = bench.prompt(1, 2), bench.prompt(1, 2, 3)
    bench.store(first, on_device=True)
    assert sealed(bench, first) == SealAnswer(0, 0, Reason.PENDING)
    bench.copy()
    assert sealed(bench, first) == SealAnswer(2, 0)
    bench.store(whole, on_device=True)
    assert sealed(bench, whole) == SealAnswer(2, 0, Reason.PENDING)
    assert sealed(bench, bench.prompt(7)) == SealAnswer(0, 0, Reason.NOT_FOUND)


def sealed(bench: Bench, prompt: Prompt) -> SealAnswer | Waiting:
    answer, effects = bench.state.seal(
        seal_id=7, group=prompt.group, keys=prompt.keys, wait_flushed=False, deadline=bench.now, now=bench.now
    )
    bench.absorb(effects)
    return answer


def test_a_shutdown_writes_what_lands_after_it_began() -> None:
    bench = bench_with(4, nvme_bytes=1 << 30)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, on_device=True)
    bench.absorb(bench.state.begin_shutdown(bench.now))
    assert bench.state.dirty().num_bytes == 2 * PAGE
    bench.copy()
    bench.work()
    assert bench.state.dirty().num_bytes == 0
    assert bench.flushed(prompt) == 2


# ---- the worker dies


def test_what_had_not_landed_when_the_worker_died_is_lost_and_its_host_slots_are_free() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, on_device=True)
    assert bench.host_used() == 2
    bench.lose_device()
    assert bench.host_used() == 0
    assert bench.match(prompt) == (0, 0)
    assert bench.state.counts.dropped_landings == {Reason.DEVICE_DOWN: 2}
    bench.state.map_device(b"engine", 0)  # late, of the pool that is no more
    assert on_device(bench, bench.store(prompt, on_device=True).offsets) == [False, False]


def test_a_ticket_for_a_pool_that_is_no_more_is_refused_and_its_host_slots_wait_for_that() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    ticket = bench.reserve(prompt, on_device=True)
    assert isinstance(ticket, Reservation)
    bench.lose_device()
    assert bench.host_used() == 2
    assert ticket.generations != [bench.generations[offset // PAGE] for offset in ticket.offsets]
    bench.absorb(bench.state.device_worker_started(0, 4 * PAGE, bench.now))
    bench.devices[0].is_up = True
    assert bench.commit(ticket) == Refused(Reason.DEVICE_DOWN)
    assert bench.host_used() == 0
    assert bench.match(prompt) == (0, 0)


def test_a_lease_of_a_dead_pool_can_be_told_and_what_is_asked_next_comes_from_host_memory() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    store(bench, prompt)
    lease = bench.load(prompt, on_device=True)
    (part,) = lease.parts
    bench.lose_device()
    now = [bench.generations[offset // PAGE] for offset in part.offsets]
    assert all(before != after for before, after in zip(part.generations, now, strict=True))
    assert used(bench) == 0
    assert bench.match(prompt) == (2, 2)
    assert bench.load(prompt, on_device=True).device_blocks == 0
    (tier,) = bench.state.device_tiers()
    assert (tier.capacity_bytes, tier.reason) == (0, Reason.DEVICE_DOWN)


def test_a_new_pool_may_be_smaller_and_begins_empty() -> None:
    bench = bench_with(4)
    store(bench, bench.prompt(1, 2))
    bench.lose_device()
    bench.absorb(bench.state.device_worker_started(0, PAGE, bench.now))
    bench.devices[0].is_up = True
    assert bench.state.device_tiers()[0].capacity_bytes == PAGE
    bench.state.map_device(b"engine", 0)
    ticket = store(bench, bench.prompt(3, 4))
    assert on_device(bench, ticket.offsets) == [True, False]


def test_a_report_of_a_dead_worker_is_of_no_use() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1)
    bench.store(prompt, on_device=True)
    (worker,) = bench.devices
    worker.run_all()
    late = worker.unheard[0][1]
    bench.lose_device()
    bench.absorb(bench.state.device_report(0, late, bench.now))
    assert bench.match(prompt) == (0, 0)


# ---- promotion


def test_what_a_lease_has_found_in_host_memory_is_on_the_device_for_the_next_one() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    first = bench.load(prompt, on_device=True)
    assert first.device_blocks == 0
    bench.release(first)
    (copy,) = bench.devices[0].waiting
    assert isinstance(copy, Upload)
    bench.copy()
    assert bench.load(prompt, on_device=True).device_blocks == 2
    assert bench.state.counts.uploaded_blocks == 2


def test_the_first_hit_takes_free_room_and_no_more() -> None:
    bench = bench_with(2, extent_blocks=2)
    old = bench.prompt(1, 2)
    store(bench, old)
    bench.tick(1.0)
    new = bench.prompt(3, 4)
    bench.store(new)
    bench.release(bench.load(new, on_device=True))
    assert not bench.devices[0].waiting


def test_hits_bring_it_in_for_what_is_worth_less_by_far() -> None:
    bench = bench_with(2, policy="lru")
    old, new = bench.prompt(1, 2), bench.prompt(3, 4)
    store(bench, old)
    bench.store(new)
    for _ in range(2):
        bench.tick(1.0)
        bench.release(bench.load(new, on_device=True))
    bench.copy()
    assert bench.load(new, on_device=True).device_blocks == 2
    (evicted,) = [notice for notice in bench.notices if isinstance(notice, Evicted)]
    assert (evicted.tier, evicted.to, evicted.blocks, evicted.key) == ("gpu", "host", 2, old.key(0))
    assert bench.load(old, on_device=True).device_blocks == 0


def test_what_is_bad_while_it_is_promoted_is_not_found_on_the_device() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.release(bench.load(prompt, on_device=True))
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 1, bench.now))
    bench.copy()
    assert used(bench) == 0
    lease = bench.load(prompt, on_device=True)
    assert (lease.blocks, lease.device_blocks) == (1, 0)


def test_a_block_found_bad_is_on_no_device_and_its_slot_waits_for_its_reader() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    store(bench, prompt)
    lease = bench.load(prompt, on_device=True)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 0, bench.now))
    assert (used(bench), bench.state.device_tiers()[0].reserved_bytes) == (0, 2 * PAGE)
    store(bench, bench.prompt(3, 4))
    bench.check_lease(prompt, lease)
    bench.release(lease)
    assert bench.state.device_tiers()[0].reserved_bytes == 0


# ---- purges


def purge(bench: Bench) -> PurgeState:
    answer, effects = bench.state.start_purge(b"purge", OfTenant(""), bench.now)
    bench.absorb(effects)
    assert isinstance(answer, PurgeState)
    return answer


def phase(bench: Bench) -> PurgePhase:
    state = bench.state.purge_progress(b"purge")
    assert state is not None
    return state.phase


def test_a_purge_is_over_when_the_device_has_zeroed_what_it_held() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    store(bench, prompt)
    purge(bench)
    assert used(bench) == 0
    assert all(isinstance(op, Zero) for op in bench.devices[0].waiting)
    bench.work()  # host memory
    assert phase(bench) is PurgePhase.UNREACHABLE
    bench.copy()
    assert phase(bench) is PurgePhase.GONE
    assert not bench.arena


def test_what_lands_after_a_purge_is_wiped_in_both_memories() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, on_device=True)
    purge(bench)
    bench.work()
    assert phase(bench) is PurgePhase.UNREACHABLE
    (copy,) = [op for op in bench.devices[0].waiting if isinstance(op, Download)]
    bench.devices[0].run(copy)
    bench.copy()
    assert bench.match(prompt) == (0, 0)
    bench.work()
    bench.copy()
    assert phase(bench) is PurgePhase.GONE
    assert not bench.arena


def test_a_purge_wipes_what_was_evicted_from_a_device() -> None:
    bench = bench_with(2)
    store(bench, bench.prompt(1, 2))
    store(bench, bench.prompt(3, 4))
    purge(bench)
    bench.work()
    bench.copy()
    assert phase(bench) is PurgePhase.GONE
    assert not bench.arena


def test_a_purge_is_not_over_while_a_lease_holds_slots_on_a_device() -> None:
    bench = bench_with(4)
    prompt = bench.prompt(1, 2)
    store(bench, prompt)
    lease = bench.load(prompt, on_device=True)
    purge(bench)
    bench.work()
    bench.copy()
    assert phase(bench) is PurgePhase.UNREACHABLE
    assert [bench.arena[offset] for offset in lease.parts[0].offsets] == stamps(prompt.keys, 0)
    bench.release(lease)
    bench.work()
    bench.copy()
    assert phase(bench) is PurgePhase.GONE
    assert not bench.arena


# ---- the device's copy as the only one


def only_on_device(bench: Bench, *tokens: int) -> Prompt:
    """Host memory has given it up for others, since the device has it."""
    prompt = bench.prompt(*tokens)
    store(bench, prompt)
    bench.tick(1.0)
    for at in range(bench.limits.host_bytes // PAGE // 2):
        bench.store(bench.prompt(100 + 2 * at, 101 + 2 * at))
    assert bench.match(prompt) == (len(tokens), 0)
    return prompt


def test_host_memory_gives_up_what_the_device_has_whole() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    (evicted,) = [notice for notice in bench.notices if isinstance(notice, Evicted)]
    assert (evicted.tier, evicted.to, evicted.blocks) == ("host", "gpu", 2)
    lease = bench.load(prompt, on_device=True)
    assert (lease.blocks, lease.device_blocks) == (2, 2)
    trace = bench.state.explain(Question(of=prompt.group, keys=prompt.keys)).trace
    assert trace is not None
    assert [stretch.tiers for stretch in trace.stretches] == [("gpu",)]


def test_who_has_not_mapped_the_device_waits_for_the_copy_to_host_memory() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    answer = bench.acquire(prompt)
    assert answer == Waiting()
    bench.copy()
    lease = bench.ready()
    bench.check_lease(prompt, lease)
    assert (lease.blocks, lease.device_blocks, lease.nvme_blocks) == (2, 0, 0)
    assert bench.state.counts.fetched_blocks == 2
    assert bench.state.counts.hit_tokens["gpu"] == 2


def test_who_waits_for_a_copy_that_fails_gets_what_is_there() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    assert bench.acquire(prompt) == Waiting()
    (worker,) = bench.devices
    worker.run(worker.waiting[0], Reason.IO_ERROR)
    bench.copy()
    assert (bench.ready().blocks, bench.match(prompt)) == (0, (2, 0))


def test_who_waits_for_a_copy_when_the_worker_dies_is_answered_and_what_only_the_pool_had_is_gone() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    assert bench.acquire(prompt) == Waiting()
    bench.lose_device()
    assert bench.ready().blocks == 0
    assert bench.match(prompt) == (0, 0)
    assert bench.state.counts.lost_blocks == {Reason.DEVICE_DOWN: 2}


def test_what_is_lost_with_a_pool_is_told_as_dropped_and_asking_for_it_again_regrets_no_more_than_that() -> None:
    bench = bench_with(6, host_slots=6, policy="lru")
    lost = only_on_device(bench, 1, 2)
    store(bench, bench.prompt(7, 8))  # in host memory too: nothing of it is lost
    bench.notices.clear()
    bench.lose_device()
    told = [notice for notice in bench.notices if isinstance(notice, Evicted)]
    assert {(one.tier, one.to, one.reason) for one in told} == {("gpu", "dropped", Reason.DEVICE_DOWN)}
    assert sum(one.blocks for one in told) == bench.state.counts.lost_blocks[Reason.DEVICE_DOWN] == 2
    assert sum(one.num_bytes for one in told) == 2 * PAGE
    bench.acquire(lost)
    assert bench.state.counts.regretted_tokens[Reason.DEVICE_DOWN] == sum(one.tokens for one in told) > 0


def test_a_death_takes_only_what_no_other_tier_has() -> None:
    bench = bench_with(6, host_slots=6, policy="lru")
    kept = bench.prompt(7, 8)
    lost = only_on_device(bench, 1, 2)
    store(bench, kept)
    bench.lose_device()
    assert (bench.match(lost), bench.match(kept)) == ((0, 0), (2, 2))


def test_what_leaves_the_device_and_is_nowhere_else_goes_to_host_memory_first() -> None:
    bench = bench_with(2, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    for token in (100, 102):
        bench.release(bench.load(bench.prompt(token, token + 1)))
    bench.tick(1.0)
    bench.release(bench.load(prompt, on_device=True))  # worth more than what is in host memory
    bench.tick(1.0)
    ticket = bench.reserve(bench.prompt(9), on_device=True)
    assert isinstance(ticket, Reservation)
    assert on_device(bench, ticket.offsets) == [False]  # not yet
    bench.copy()
    assert bench.match(prompt) == (2, 2)
    assert used(bench) == 0
    again = bench.reserve(bench.prompt(10), on_device=True)
    assert isinstance(again, Reservation)
    assert on_device(bench, again.offsets) == [True]


def test_an_operator_evicts_from_devices_and_loses_nothing() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    bench.absorb(bench.state.evict("host", 0, "", bench.now)[1])
    both = bench.prompt(9)
    store(bench, both)
    preview = bench.state.preview_eviction("gpu", 0, "", bench.now)
    assert preview.used_bytes == 0
    assert sorted((victim.key, victim.to, victim.blocks) for victim in preview.victims) == sorted(
        [(prompt.key(0), "host", 2), (both.key(0), "host", 1)]
    )
    assert used(bench) == 3
    bench.release(bench.load(prompt, on_device=True))
    state, effects = bench.state.evict("gpu", 0, "", bench.now)
    bench.absorb(effects)
    assert (state.finished, state.lost_tokens) == (True, 0)
    bench.copy()
    assert used(bench) == 0
    assert bench.match(prompt) == (2, 2)


def test_an_operator_displaces_nothing_in_host_memory_and_is_told_what_has_no_room_there() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    both = bench.prompt(100, 101)
    for _ in range(2):
        bench.release(bench.load(both, on_device=True))
        bench.copy()
    assert used(bench) == 4
    assert bench.host_used() == 4
    preview = bench.state.preview_eviction("gpu", 0, "", bench.now)
    assert [(victim.key, victim.to, victim.blocks) for victim in preview.victims] == [(both.key(0), "host", 2)]
    assert (preview.used_bytes, preview.reason) == (2 * PAGE, Reason.HOST_FULL)
    state, effects = bench.state.evict("gpu", 0, "", bench.now)
    bench.absorb(effects)
    bench.copy()
    assert (state.finished, state.used_bytes, state.reason) == (True, 2 * PAGE, Reason.HOST_FULL)
    assert (used(bench), bench.host_used()) == (2, 4)
    assert bench.match(prompt) == (2, 0)
    assert bench.match(bench.prompt(102, 103)) == (2, 2)


def test_a_chain_that_only_a_device_has_goes_by_an_operators_word_from_its_end_on() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2, 3, 4)
    bench.absorb(bench.state.evict("host", 0, "", bench.now)[1])
    assert bench.host_used() == 0
    preview = bench.state.preview_eviction("gpu", 0, "", bench.now)
    assert [(victim.key, victim.to) for victim in preview.victims] == [(prompt.key(2), "host"), (prompt.key(0), "host")]
    assert (preview.used_bytes, preview.reason) == (0, None)
    slices: list[EvictState] = []
    while not slices or not slices[-1].finished:
        assert len(slices) < 5
        state, effects = bench.state.evict("gpu", 0, "", bench.now)
        slices.append(state)
        bench.absorb(effects)
        bench.copy()
    assert (slices[-1].reason, sum(state.blocks for state in slices)) == (None, 4)
    assert used(bench) == 0
    assert bench.match(prompt) == (4, 4)


def test_what_is_lost_with_a_pool_keeps_its_hits() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    bench.release(bench.load(prompt, on_device=True))
    bench.tick(3.0)
    bench.absorb(bench.state.device_worker_died(0, bench.now))
    trace = bench.state.explain(Question(of=prompt.group, keys=prompt.keys)).trace
    assert trace is not None
    assert trace.missing is not None
    left = trace.missing.left
    assert left is not None
    assert (left.reason, left.hits, left.at - left.last_used) == (Reason.DEVICE_DOWN, 1, 3.0)


def test_what_expires_leaves_devices_too() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    prompt = only_on_device(bench, 1, 2)
    bench.seal(prompt)
    (extent,) = [one for one in bench.state._ledger.tree if one.key == prompt.key(0)]
    losses = bench.state._cascade.losses
    assert losses.may_expire(extent)
    losses.expire(extent, bench.now)
    bench.state.check()
    assert (bench.match(prompt), used(bench)) == ((0, 0), 0)


# ---- slabs of a pool


def pools_slabs(num_bytes: int, slab_bytes: int) -> tuple[int, int]:
    """Capacity of a pool of that size, and the bytes of a slab of it."""
    limits = replace(bench_with(4).limits, host_bytes=slab_bytes, slab_bytes=slab_bytes, device_bytes=(num_bytes,))
    end = pool_bases(limits.host_bytes, slab_bytes, limits.device_bytes)[-1]
    state = CacheState(limits, [0] * (end // PAGE + 1))
    state.device_worker_started(0, num_bytes, 1.0)
    slots = state._ledger.devices.pools[0].slots
    assert slots is not None
    return state.device_tiers()[0].capacity_bytes, slots.slab_bytes


@pytest.mark.parametrize(
    ("pages", "slab_pages", "capacity", "slab"),
    [
        (1024, 64, 1024, 64),  # many slabs: as in host memory
        (96, 64, 96, 8),  # few: finer ones, of which all can be used
        (64, 64, 64, 8),
        (67, 64, 64, 8),  # what is left over is nobody's, and not counted
        (3, 64, 3, 3),  # less than a slab: one
        (5, 3, 3, 3),  # what can't be halved stays whole
    ],
)
def test_a_small_pool_is_cut_finer_and_its_capacity_is_of_whole_slabs(
    pages: int, slab_pages: int, capacity: int, slab: int
) -> None:
    assert pools_slabs(pages * PAGE, slab_pages * PAGE) == (capacity * PAGE, slab * PAGE)


def test_a_pool_without_a_page_is_empty() -> None:
    assert pools_slabs(PAGE - 1, 4 * PAGE) == (0, 0)


# ---- what every tier promises


@dataclass(frozen=True)
class Tier:
    """A tier as these tests fill it: how a prompt gets there, and what it uses there."""

    name: str
    store: Callable[[Bench, Prompt], object]

    def used_bytes(self, bench: Bench) -> int:
        (tier,) = [tier for tier in bench.state.tiers() if tier.tier == self.name]
        return tier.used_bytes

    def bench(self) -> Bench:
        return bench_with(4, host_slots=8, nvme_bytes=1 << 20 if self.name == "nvme" else 0)


TIERS = [
    Tier("gpu", store),
    Tier("host", Bench.store),
    Tier("nvme", Bench.store_durably),
]
check_tier = pytest.mark.parametrize("tier", TIERS, ids=[tier.name for tier in TIERS])


def work(bench: Bench) -> None:
    bench.copy()
    bench.work()
    bench.copy()


@check_tier
def test_a_tier_never_holds_more_than_its_capacity(tier: Tier) -> None:
    bench = tier.bench()
    for token in range(0, 60, 2):
        bench.tick(1.0)
        tier.store(bench, bench.prompt(token, token + 1))
        for row in bench.state.tiers():
            assert row.used_bytes + row.reserved_bytes + row.overhead_bytes <= row.capacity_bytes
    assert tier.used_bytes(bench) > 0


@check_tier
def test_what_is_leased_stays_in_its_tier(tier: Tier) -> None:
    bench = tier.bench()
    prompt = bench.prompt(1, 2)
    tier.store(bench, prompt)
    lease = bench.load(prompt, on_device=tier.name == "gpu")
    for token in range(10, 40, 2):
        bench.tick(1.0)
        tier.store(bench, bench.prompt(token, token + 1))
    bench.check_lease(prompt, lease)
    assert bench.match(prompt)[0] == 2


@check_tier
def test_what_is_purged_is_found_in_no_tier_and_its_bytes_are_gone(tier: Tier) -> None:
    bench = tier.bench()
    prompt = bench.prompt(1, 2)
    tier.store(bench, prompt)
    purge(bench)
    assert bench.match(prompt) == (0, 0)
    work(bench)
    assert phase(bench) is PurgePhase.GONE
    assert (tier.used_bytes(bench), dict(bench.arena), bench.disk.files) == (0, {}, {})


@check_tier
def test_what_is_found_bad_is_kept_in_no_tier(tier: Tier) -> None:
    bench = tier.bench()
    prompt = bench.prompt(1, 2)
    tier.store(bench, prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 0, bench.now))
    work(bench)
    assert (bench.match(prompt), tier.used_bytes(bench)) == ((0, 0), 0)


@check_tier
def test_an_operator_empties_a_tier(tier: Tier) -> None:
    bench = tier.bench()
    for token in (1, 3):
        tier.store(bench, bench.prompt(token, token + 1))
        bench.seal(bench.prompt(token, token + 1))
    assert tier.used_bytes(bench) > 0
    state, effects = bench.state.evict(tier.name, 0, "", bench.now)
    bench.absorb(effects)
    work(bench)
    assert (state.finished, state.used_bytes, tier.used_bytes(bench)) == (True, 0, 0)


@pytest.mark.parametrize("tier", TIERS[:2], ids=["gpu", "host"])  # NVMe's worker posts, when a file is really there
def test_postings_of_a_tier_come_to_what_it_holds(tier: Tier) -> None:
    bench = tier.bench()
    balances = Balances()
    for token in range(0, 20, 2):
        bench.tick(1.0)
        tier.store(bench, bench.prompt(token, token + 1))
        for posting in bench.state.take_postings(bench.now):
            balances.fold(posting)
        assert sum(balances.of_account(tier.name).values()) == tier.used_bytes(bench)


def test_a_purge_of_a_prefix_that_died_with_its_device_takes_what_hung_on_it() -> None:
    bench = bench_with(4, host_slots=4, policy="lru")
    whole = bench.prompt(1, 2, 3)
    only_on_device(bench, 1, 2)
    bench.store(whole)
    assert bench.match(whole) == (3, 0)
    bench.lose_device()
    assert bench.match(whole) == (0, 0)
    (orphan,) = [extent for extent in bench.state._ledger.tree if extent.is_orphan]
    assert orphan.key == whole.key(2)
    answer, effects = bench.state.start_purge(b"purge", OfPrefix(whole.key(0).hex()), bench.now)
    bench.absorb(effects)
    assert isinstance(answer, PurgeState)
    bench.work()
    bench.store(whole.first(2))
    assert bench.match(whole) == (2, 2)


def test_host_memory_full_of_parents_drops_what_only_the_device_has_behind_them() -> None:
    bench = bench_with(2, host_slots=2, policy="lru", extent_blocks=1)
    first, second = bench.prompt(1, 2), bench.prompt(3, 4)
    bench.store(first.first(1))
    bench.seal(first.first(1))
    store(bench, first)
    bench.tick(1.0)
    bench.store(second.first(1))
    assert (bench.match(first), bench.match(second)) == ((2, 1), (1, 1))
    ticket = bench.reserve(second)
    assert isinstance(ticket, Reservation)
    assert len(ticket.offsets) == 1
    assert bench.match(first) == (0, 0)
