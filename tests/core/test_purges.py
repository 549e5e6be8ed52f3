"""Purges as stories: what is asked for can't be found from then on, and memory that held it is wiped before reuse."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from tests.core.simulation import PAGE, Bench, Prompt, make_group, stamps
from tierkv.core.grants import GRANTED, Committed, Lease, LeaseReady, Refused, Reservation, Waiting
from tierkv.core.instructions import (
    OpenNamespace,
    OpFailed,
    PurgeRecorded,
    Read,
    RecordPurge,
    Remove,
    SetAside,
    SweepPurge,
    Write,
    Zero,
)
from tierkv.core.purge_scope import NotOne, OfModel, OfPrefix, OfTenant, What
from tierkv.core.purges import PurgePhase, PurgeState
from tierkv.core.reasons import Reason

JOB = b"purge number one"
ACME = make_group(salt="acme")


def bench_of_two(**shape: object) -> Bench:
    """One group without a salt, and one of the tenant acme."""
    bench = Bench(**({"host_slots": 8, "extent_blocks": 2} | shape))  # type: ignore[arg-type]
    bench.disk.specs[ACME.group] = ACME
    bench.absorb(bench.state.open_group(ACME, bench.now))
    bench.state.session_opens(b"engine", ACME.group)
    bench.state.session_opens(b"engine", bench.spec.group)
    return bench


def acme(*tokens: int) -> Prompt:
    return Prompt(ACME, tokens)


def purge(bench: Bench, what: What, job: bytes = JOB) -> PurgeState:
    answer, effects = bench.state.start_purge(job, what, bench.now)
    bench.absorb(effects)
    assert isinstance(answer, PurgeState)
    return answer


def progress(bench: Bench, job: bytes = JOB) -> PurgeState:
    state = bench.state.purge_progress(job)
    assert state is not None
    return state


def waiting(bench: Bench, kind: type) -> list[object]:
    return [op for op in bench.worker.waiting if isinstance(op, kind)]


@pytest.mark.scenario(
    "B237",
    then="after a purge of one tenant its prompts miss in memory and on disk at once, its files are unlinked, another "
    "tenant's are whole, and the receipt has the counts",
)
@pytest.mark.scenario("B229", then="one tenant's purge leaves what the other has, in every tier and over a restart")
def test_a_tenants_data_is_gone_from_every_tier_and_another_tenants_is_whole() -> None:
    bench = bench_of_two()
    mine, other = bench.prompt(1, 2, 3), acme(1, 2, 3)
    for prompt in (mine, other):
        bench.store_durably(prompt)
    bench.store(acme(7))
    receipt = purge(bench, OfTenant("acme"))
    assert bench.match(other) == (0, 0)
    assert receipt.phase is PurgePhase.REMOVING
    assert (receipt.about.blocks, receipt.about.tokens, receipt.about.host_bytes) == (4, 4, 4 * PAGE)
    assert receipt.about.nvme_bytes > 0
    assert [(group.spec.group, group.blocks) for group in receipt.groups] == [(ACME.group, 4)]
    bench.work()
    assert progress(bench).phase is PurgePhase.GONE
    assert bench.match(mine) == (3, 3)
    assert {name[0] for name in bench.disk.files} == {mine.group}
    bench.start()
    bench.absorb(bench.state.open_group(ACME, bench.now))
    assert (bench.match(mine)[0], bench.match(other)[0]) == (3, 0)


def test_what_is_purged_can_be_stored_and_hit_again_at_once() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    purge(bench, OfTenant("acme"))
    bench.store(acme(1, 2))
    assert bench.match(acme(1, 2)) == (2, 2)
    bench.seal(acme(1, 2))
    bench.work()
    assert progress(bench).phase is PurgePhase.GONE
    assert bench.flushed(acme(1, 2)) == 2
    bench.load(acme(1, 2))


def test_it_is_written_down_before_anything_is_removed_and_swept_when_nothing_is_in_use() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    bench.store(acme(1, 2, 3, 4), first=2)
    bench.seal(acme(1, 2, 3, 4))
    (write,) = waiting(bench, Write)
    _, effects = bench.state.start_purge(JOB, OfTenant("acme"), bench.now)
    assert isinstance(effects[0], RecordPurge)
    assert not any(isinstance(effect, SweepPurge) for effect in effects)
    bench.absorb(effects)
    bench.worker.run(write)
    bench.hear()  # the file is there, and not published: it is removed, then the rest is swept
    assert bench.match(acme(1, 2, 3, 4)) == (0, 0)
    assert len(waiting(bench, Remove)) == 1
    assert not waiting(bench, SweepPurge)
    bench.work()
    assert not bench.disk.files
    assert progress(bench).phase is PurgePhase.GONE


@pytest.mark.scenario(
    "B078",
    then="after a purge the old key misses and a new store of it is right, a commit from before is refused by name, "
    "and the receipt counts what was removed and what is still busy",
)
@pytest.mark.scenario("B011", then="what was reserved before a purge is never published by its late commit")
def test_a_ticket_from_before_is_refused_at_its_commit_and_others_store_the_same_meanwhile() -> None:
    bench = bench_of_two()
    bench.store(acme(9))
    late = bench.reserve(acme(1, 2))
    assert isinstance(late, Reservation)
    receipt = purge(bench, OfTenant("acme"))
    assert (receipt.about.extents, receipt.tickets, receipt.held_bytes) == (1, 1, 2 * PAGE)
    fresh = bench.reserve(acme(1, 2))
    assert isinstance(fresh, Reservation)
    assert list(fresh.states) == [GRANTED, GRANTED]
    assert not set(fresh.offsets) & set(late.offsets)
    bench.fill(acme(1, 2), fresh)
    assert bench.commit(fresh) == Committed(2, 0)
    bench.work()
    assert progress(bench).phase is PurgePhase.UNREACHABLE
    bench.fill(acme(1, 2), late)
    assert bench.commit(late) == Refused(Reason.PURGED)
    assert bench.commit(late) == Refused(Reason.PURGED)
    assert bench.match(acme(1, 2)) == (2, 2)
    bench.work()
    assert progress(bench).phase is PurgePhase.GONE
    assert bench.arena.read(late.offsets) == ["never written"] * 2
    bench.load(acme(1, 2))


def test_who_aborts_or_ends_with_a_ticket_from_before_gives_back_memory_that_is_wiped() -> None:
    bench = bench_of_two()
    bench.state.open_session(b"second", bench.now)
    aborted = bench.reserve(acme(1))
    buried = bench.reserve(acme(2), session=b"second")
    assert isinstance(aborted, Reservation)
    assert isinstance(buried, Reservation)
    for ticket, prompt in ((aborted, acme(1)), (buried, acme(2))):
        bench.fill(prompt, ticket)
    purge(bench, OfTenant("acme"))
    bench.work()
    bench.absorb(bench.state.abort(aborted.grant, bench.now))
    bench.absorb(bench.state.end_session(b"second", bench.now))
    assert len(waiting(bench, Zero)) == 2
    bench.work()
    assert bench.arena.read([*aborted.offsets, *buried.offsets]) == ["never written"] * 2
    assert progress(bench).phase is PurgePhase.GONE


def test_a_reader_keeps_its_bytes_until_it_lets_go_and_nobody_else_finds_them() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    lease = bench.load(acme(1, 2))
    purge(bench, OfTenant("acme"))
    bench.work()
    state = progress(bench)
    assert (state.phase, state.leases, state.held_bytes) == (PurgePhase.UNREACHABLE, 1, 2 * PAGE)
    assert state.unreachable > 0
    assert state.gone == 0
    bench.check_lease(acme(1, 2), lease)
    assert bench.match(acme(1, 2)) == (0, 0)
    bench.tick(5.0)
    bench.release(lease)
    assert progress(bench).phase is PurgePhase.UNREACHABLE  # still to be zeroed
    bench.work()
    state = progress(bench)
    assert (state.phase, state.gone) == (PurgePhase.GONE, bench.now)
    assert bench.arena.read(lease.parts[0].offsets) == ["never written"] * 2


def test_a_late_reader_can_tell_before_the_first_byte_is_wiped() -> None:
    bench = bench_of_two()
    bench.store(acme(1))
    lease = bench.acquire(acme(1), revocable=True)
    assert isinstance(lease, Lease)
    (offset,), (generation,) = lease.parts[0].offsets, lease.parts[0].generations
    purge(bench, OfTenant("acme"))
    bench.tick(60.0)  # revoked
    assert bench.generations[offset // PAGE] > generation
    assert bench.arena.read([offset]) == stamps(acme(1).keys, 0)
    bench.work()
    assert bench.arena.read([offset]) == ["never written"]


def test_a_read_in_flight_ends_without_a_lease_and_its_memory_is_wiped() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    bench.fill_host()
    assert bench.match(acme(1, 2)) == (2, 0)
    assert isinstance(bench.acquire(acme(1, 2)), Waiting)
    (read,) = waiting(bench, Read)
    bench.worker.run(read)  # and nobody has heard of it
    purge(bench, OfTenant("acme"))
    (notice,) = [notice for notice in bench.notices if isinstance(notice, LeaseReady)]
    assert (notice.lease.blocks, notice.lease.reason) == (0, Reason.PURGED)
    assert not waiting(bench, SweepPurge)
    bench.work()
    assert bench.arena.read(read.slots) == ["never written"] * 2  # type: ignore[attr-defined]
    assert progress(bench).phase is PurgePhase.GONE
    assert not [name for name in bench.disk.files if name[0] == ACME.group]


def test_memory_that_was_evicted_before_is_wiped_too() -> None:
    bench = bench_of_two(host_slots=2)
    bench.store_durably(acme(1, 2))
    bench.fill_host()
    bench.store(acme(5))
    bench.absorb(bench.state.report_bad(ACME.group, acme(5).keys, 0, bench.now))  # free, and its bytes lie there
    left = [content for content in bench.arena.values() if content == stamps(acme(5).keys, 0)[0]]
    assert left
    purge(bench, OfTenant("acme"))
    bench.work()
    assert not [content for content in bench.arena.values() if content[0] in acme(5).block_keys]  # type: ignore[index]


def test_room_that_is_being_wiped_is_waited_for_rather_than_taken_from_others() -> None:
    bench = bench_of_two(host_slots=4, nvme_bytes=0)
    keeps, goes = bench.prompt(1, 2), acme(1, 2)
    bench.store(keeps)
    bench.seal(keeps)
    bench.store(goes)
    purge(bench, OfTenant("acme"))
    refused = bench.reserve(acme(3, 4))
    assert isinstance(refused, Reservation)
    assert (refused.offsets, refused.reason) == ([], Reason.NO_ROOM)
    assert bench.match(keeps) == (2, 2)
    bench.work()
    bench.store(acme(3, 4))
    assert bench.match(acme(3, 4)) == (2, 2)
    assert bench.match(keeps) == (2, 2)


def test_without_an_nvme_tier_it_is_unreachable_at_once_and_gone_when_memory_is_wiped() -> None:
    bench = bench_of_two(nvme_bytes=0)
    bench.store(acme(1, 2))
    assert purge(bench, OfTenant("acme")).phase is PurgePhase.UNREACHABLE
    assert waiting(bench, Zero)
    bench.work()
    assert progress(bench).phase is PurgePhase.GONE


def test_a_worker_that_dies_is_followed_by_one_that_is_told_all_of_it_again() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    purge(bench, OfTenant("acme"))
    bench.worker.die(1)
    bench.absorb(bench.state.worker_died(bench.now))
    assert bench.host_used() > 0  # memory nobody has zeroed yet is nobody's
    effects = bench.state.worker_started(bench.now)
    kinds = [type(effect) for effect in effects]
    assert kinds.index(RecordPurge) < kinds.index(SweepPurge)
    bench.absorb(effects)
    bench.work()
    assert progress(bench).phase is PurgePhase.GONE
    assert bench.host_used() == 0


def test_a_purge_while_the_worker_is_away_waits_for_the_next_one() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    bench.worker.die(0)
    bench.absorb(bench.state.worker_died(bench.now))
    receipt = purge(bench, OfTenant("acme"))
    assert (receipt.phase, receipt.recorded) == (PurgePhase.REMOVING, False)
    assert bench.match(acme(1, 2)) == (0, 0)
    bench.absorb(bench.state.worker_started(bench.now))
    bench.work()
    assert progress(bench).recorded
    assert progress(bench).phase is PurgePhase.GONE


def test_a_sweep_that_fails_is_tried_again_and_says_why_meanwhile() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    purge(bench, OfTenant("acme"))
    bench.hear()
    (sweep,) = waiting(bench, SweepPurge)
    bench.worker.run(sweep, Reason.READ_ONLY)
    bench.hear()
    assert progress(bench).reason is Reason.READ_ONLY
    assert not waiting(bench, SweepPurge)
    bench.tick(1.0)
    bench.work()
    assert (progress(bench).phase, progress(bench).reason) == (PurgePhase.GONE, None)


def test_files_that_a_start_could_not_remove_take_room_until_they_are_gone() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    on_disk = bench.disk.used_bytes
    purge(bench, OfTenant("acme"))
    bench.start(resume_failure=Reason.IO_ERROR)
    nvme = bench.state.tiers()[1]
    assert (nvme.used_bytes, nvme.overhead_bytes) == (0, on_disk)
    bench.tick(1.0)
    bench.work()
    assert (bench.disk.used_bytes, bench.state.tiers()[1].overhead_bytes) == (0, 0)
    assert progress(bench).phase is PurgePhase.GONE


def test_a_removal_that_fails_keeps_the_sweep_waiting_and_is_named() -> None:
    bench = bench_of_two()
    bench.store(acme(1, 2))
    (write,) = waiting(bench, Write)
    purge(bench, OfTenant("acme"))
    bench.worker.run(write)
    bench.hear()
    (remove,) = waiting(bench, Remove)
    bench.worker.waiting.remove(remove)  # type: ignore[arg-type]
    bench.absorb(bench.state.report(OpFailed(remove.op, Reason.IO_ERROR), bench.now))  # type: ignore[attr-defined]
    assert progress(bench).reason is Reason.IO_ERROR
    assert not waiting(bench, SweepPurge)
    bench.tick(1.0)
    bench.work()
    assert progress(bench).phase is PurgePhase.GONE
    assert not bench.disk.files


def test_a_purge_that_could_not_be_written_down_says_so_and_goes_on() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1))
    purge(bench, OfTenant("acme"))
    bench.worker.unheard = [(None, PurgeRecorded(JOB, Reason.DISK_FULL))]
    bench.hear()
    assert (progress(bench).recorded, progress(bench).reason) == (False, Reason.DISK_FULL)
    bench.work()
    assert progress(bench).phase is PurgePhase.GONE


def test_an_old_arena_that_engines_still_map_is_named_and_waited_for() -> None:
    bench = bench_of_two(nvme_bytes=0)
    bench.absorb(bench.state.host_limit(8 * PAGE, bench.now, earlier_bytes=3 * PAGE))
    purge(bench, OfTenant("acme"))
    bench.work()
    assert (progress(bench).phase, progress(bench).earlier_bytes) == (PurgePhase.UNREACHABLE, 3 * PAGE)
    bench.absorb(bench.state.host_limit(8 * PAGE, bench.now))
    assert (progress(bench).phase, progress(bench).earlier_bytes) == (PurgePhase.GONE, 0)


def test_a_model_is_purged_for_every_tenant() -> None:
    bench = bench_of_two()
    for prompt in (bench.prompt(1), acme(1)):
        bench.store_durably(prompt)
    purge(bench, OfModel(ACME.identity.weights))
    assert bench.match(bench.prompt(1)) == bench.match(acme(1)) == (0, 0)
    bench.work()
    assert not bench.disk.files
    assert progress(bench).phase is PurgePhase.GONE


def test_a_prefix_goes_with_the_extent_that_holds_it_and_all_that_hangs_on_it() -> None:
    bench = bench_of_two(host_slots=16)
    trunk, branch, beside = bench.prompt(1, 2, 3, 4), bench.prompt(1, 2, 3, 4, 5, 6), bench.prompt(1, 2, 9)
    for prompt in (trunk, branch, beside):
        bench.store_durably(prompt)
    whole = bench.prompt(1, 2, 3, 4, 5, 6, 7)
    bench.store(whole)  # staged nowhere: visible, growing
    receipt = purge(bench, OfPrefix(trunk.key(3).hex()))
    assert receipt.about.blocks == 5
    assert bench.match(whole) == (2, 2)  # the extent of blocks 3 and 4 goes whole
    assert bench.match(beside) == (3, 3)
    bench.work()
    assert progress(bench).phase is PurgePhase.GONE
    assert {name[2] for name in bench.disk.files} == {trunk.key(0), beside.key(2)}


def test_a_prefix_is_named_by_enough_digits_and_only_by_one_block() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    digits = acme(1, 2).key(1).hex()
    assert isinstance(bench.state.preview_purge(OfPrefix(digits[:16]), bench.now), PurgeState)
    assert bench.state.preview_purge(OfPrefix("0" * 16), bench.now) == NotOne(0)
    unknown = purge(bench, OfPrefix("0" * 64))
    assert unknown.about.extents == 0
    assert bench.match(acme(1, 2))[0] == 2


def test_an_orphan_below_a_purged_prefix_is_not_found_again_when_its_parent_returns() -> None:
    bench = Bench(host_slots=16, extent_blocks=1)
    prompt = bench.prompt(1, 2, 3)
    bench.store_durably(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.first(2).keys, 1, bench.now))  # block 3 is an orphan now
    bench.work()
    assert bench.match(prompt)[0] == 1
    purge(bench, OfPrefix(prompt.key(0).hex()))
    bench.work()
    bench.store(prompt.first(2))
    assert bench.match(prompt)[0] == 2
    assert progress(bench).phase is PurgePhase.GONE


def test_what_is_on_its_way_out_takes_no_successor_along_that_is_not_in_scope() -> None:
    bench = Bench(host_slots=16, extent_blocks=1)
    prompt, other = bench.prompt(1, 2), bench.prompt(9)
    bench.store_durably(prompt)
    bench.store_durably(other)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 1, bench.now))
    assert waiting(bench, SetAside)
    bench.store(prompt)
    purge(bench, OfPrefix(other.key(0).hex()))
    assert (bench.match(prompt)[0], bench.match(other)[0]) == (2, 0)
    bench.work()
    assert bench.match(prompt)[0] == 2


@pytest.mark.parametrize("first_bad", [0, 1])
def test_memory_of_blocks_that_were_just_cut_off_is_wiped_and_their_file_waited_for(first_bad: int) -> None:
    bench = Bench(host_slots=8, extent_blocks=2)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.seal(prompt)
    assert waiting(bench, Write)
    slots = {slot for slot, content in bench.arena.items() if content == (prompt.key(1), 0)}
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, first_bad, bench.now))
    purge(bench, OfPrefix(prompt.key(1).hex()))
    assert not waiting(bench, SweepPurge), "swept while a file may still come"
    bench.work()
    assert slots.isdisjoint(bench.arena), "still in memory"
    assert progress(bench).phase is PurgePhase.GONE


def test_staged_blocks_go_as_well() -> None:
    bench = Bench(host_slots=8, ranks=2)
    prompt = bench.prompt(1, 2)
    bench.store(prompt, rank=0)
    assert bench.match(prompt) == (0, 0)
    receipt = purge(bench, OfTenant(""))
    assert (receipt.about.blocks, receipt.about.host_bytes) == (2, 2 * PAGE)
    bench.store(prompt, rank=1)
    bench.work()
    assert bench.match(prompt) == (0, 0)
    bench.store(prompt, rank=0)
    assert bench.match(prompt)[0] == 2


def test_staged_blocks_go_though_nothing_is_known_of_the_block_that_they_wait_for() -> None:
    bench = Bench(host_slots=8)
    prompt = bench.prompt(1, 2, 3)
    bench.store(prompt, first=2)
    purge(bench, OfPrefix(prompt.key(1).hex()))
    bench.work()
    bench.store(prompt.first(2))
    assert bench.match(prompt)[0] == 2
    assert progress(bench).phase is PurgePhase.GONE


def test_a_group_of_which_nothing_is_left_is_forgotten_unless_somebody_has_it_open() -> None:
    bench = bench_of_two()
    stranger = make_group(salt="stranger")
    bench.disk.specs[stranger.group] = stranger
    bench.absorb(bench.state.open_group(stranger, bench.now))
    for salt, job in (("stranger", b"a" * 16), ("acme", b"b" * 16)):
        purge(bench, OfTenant(salt), job)
    bench.work()
    assert {row.spec.identity.salt for row in bench.state.usage()} == {"", "acme"}


def test_the_identity_is_written_down_again_with_the_first_file_after_it_and_not_before() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1))
    purge(bench, OfTenant("acme"))
    assert not [e for e in bench.state.open_group(ACME, bench.now) if isinstance(e, OpenNamespace)]
    bench.work()
    bench.worker.die(0)
    bench.absorb(bench.state.worker_died(bench.now))
    effects = bench.state.worker_started(bench.now)
    assert [e.group for e in effects if isinstance(e, OpenNamespace)] == [bench.spec.group]
    bench.absorb(effects)
    ticket = bench.reserve(acme(1))
    assert isinstance(ticket, Reservation)
    bench.fill(acme(1), ticket)
    bench.commit(ticket)
    _, effects = bench.state.seal(
        seal_id=1, group=ACME.group, keys=acme(1).keys, wait_flushed=False, deadline=bench.now, now=bench.now
    )
    assert [type(e) for e in effects if not isinstance(e, LeaseReady)] == [OpenNamespace, Write]
    bench.absorb(effects)
    bench.work()


def test_what_a_tenant_would_have_is_in_scope_though_nothing_says_that_it_has_it() -> None:
    bench = Bench(host_slots=4)
    purge(bench, OfTenant("acme"))
    ((scope, _),) = bench.disk.purges.values()
    assert ACME.group in {one.group for one in scope.groups}
    bench.work()


def test_two_purges_of_the_same_go_through_both() -> None:
    bench = bench_of_two()
    bench.store_durably(acme(1, 2))
    purge(bench, OfTenant("acme"), b"a" * 16)
    purge(bench, OfModel(ACME.identity.weights), b"b" * 16)
    bench.work()
    assert progress(bench, b"a" * 16).phase is progress(bench, b"b" * 16).phase is PurgePhase.GONE
    assert not bench.disk.files


def test_a_group_without_a_fingerprint_has_nothing_on_disk_to_sweep() -> None:
    bench = Bench(host_slots=4)
    spec = make_group(salt="acme", persistent=False)
    identity = msgspec.structs.replace(spec.identity, weights="", epoch="an update in place")
    spec = replace(spec, group=identity.group_key(), identity=identity)
    bench.absorb(bench.state.open_group(spec, bench.now))
    prompt = Prompt(spec, (1, 2))
    for what in (OfPrefix(prompt.key(0).hex()), OfTenant("acme")):
        bench.store(prompt)
        purge(bench, what, str(what)[:16].encode())
        for scope, _ in bench.disk.purges.values():
            assert all(one.fingerprint for one in (*scope.groups, *scope.extents))
        assert bench.match(prompt) == (0, 0)
        bench.work()
        assert progress(bench, str(what)[:16].encode()).phase is PurgePhase.GONE
    assert spec.group not in {row.spec.group for row in bench.state.usage()}
