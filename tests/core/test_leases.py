"""Who may end a lease, when it is taken back, and what a message that comes again or from a stranger is told."""

from __future__ import annotations

import pytest

from tests.core.simulation import PAGE, Bench, Prompt
from tierkv.core.grants import Lease, Refused, SealReady, Waiting
from tierkv.core.reasons import Reason


def acquire(
    bench: Bench,
    prompt: Prompt,
    grant: bytes,
    *,
    session: bytes = b"engine",
    holders: tuple[tuple[int, bytes], ...] = (),
) -> Lease | Waiting | Refused:
    answer, effects = bench.state.acquire(
        grant=grant,
        session=session,
        group=prompt.group,
        keys=prompt.keys,
        holders=holders,
        max_blocks=100,
        deadline=bench.now + 10.0,
        now=bench.now,
    )
    bench.absorb(effects)
    return answer


def test_a_grant_id_that_comes_again_with_another_prompt_or_session_gets_no_slots_of_the_first() -> None:
    bench = Bench(host_slots=4, nvme_bytes=0)
    mine, other = bench.prompt(1, 2), bench.prompt(3, 4)
    bench.store(mine)
    bench.store(other)
    bench.state.open_session(b"another", bench.now)
    lease = acquire(bench, mine, b"the grant")
    assert isinstance(lease, Lease)
    assert acquire(bench, mine, b"the grant") == lease
    assert acquire(bench, other, b"the grant") == Refused(Reason.GRANT_ENDED)
    assert acquire(bench, mine, b"the grant", session=b"another") == Refused(Reason.GRANT_ENDED)
    bench.check_lease(mine, lease)
    bench.release(lease)


def test_a_holder_ends_its_own_part_only_whatever_it_says() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, ranks=2)
    prompt = bench.prompt(1, 2)
    for rank in (0, 1):
        bench.store(prompt, rank=rank)
        bench.state.open_session(b"worker %d" % rank, bench.now)
    lease = acquire(bench, prompt, b"the grant", holders=((0, b"worker 0"), (1, b"worker 1")))
    assert isinstance(lease, Lease)
    for rank in (None, 0):  # rank 0 is another's
        bench.absorb(bench.state.release(lease.grant, rank, bench.now, b"worker 1"))
        assert bench.state.is_leased(lease.grant)
    bench.fill_host()
    bench.check_lease(prompt, lease)  # worker 0 still reads
    assert not bench.state.is_strange_to(lease.grant, b"worker 1")  # its release may come twice
    assert bench.state.is_strange_to(lease.grant, b"somebody")
    bench.absorb(bench.state.release(lease.grant, 0, bench.now, b"worker 0"))
    assert not bench.state.is_leased(lease.grant)


def test_the_one_who_asked_may_end_all_parts() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, ranks=2)
    prompt = bench.prompt(1, 2)
    for rank in (0, 1):
        bench.store(prompt, rank=rank)
        bench.state.open_session(b"worker %d" % rank, bench.now)
    lease = acquire(bench, prompt, b"the grant", holders=((0, b"worker 0"), (1, b"worker 1")))
    assert isinstance(lease, Lease)
    bench.absorb(bench.state.release(lease.grant, None, bench.now, b"engine"))
    assert bench.state.num_leases == 0


def test_a_rank_that_let_go_while_the_lease_was_waited_for_gets_no_slots() -> None:
    bench = Bench(host_slots=4, ranks=2)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.start()
    for rank in (0, 1):
        bench.state.open_session(b"worker %d" % rank, bench.now)
    waiting = acquire(bench, prompt, b"the grant", holders=((0, b"worker 0"), (1, b"worker 1")))
    assert isinstance(waiting, Waiting)
    bench.absorb(bench.state.end_session(b"worker 1", bench.now))
    bench.work()
    lease = bench.ready()
    assert (lease.blocks, [part.rank for part in lease.parts]) == (2, [0])
    bench.check_lease(prompt, lease)
    bench.release(lease)


def test_the_time_after_which_a_lease_is_revoked_begins_when_it_is_granted() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.start()
    answer = bench.acquire(prompt, revocable=True, seconds=100.0)
    assert isinstance(answer, Waiting)
    bench.tick(bench.limits.revoke_after_seconds + 1.0)  # the disk takes its time
    bench.work()
    lease = bench.ready()
    bench.tick(bench.limits.revoke_after_seconds - 1.0)
    assert bench.state.num_leases == 1
    bench.tick(1.0)
    assert (bench.state.num_leases, bench.state.counts.revoked_leases) == (0, 1)
    bench.fill_host()
    assert all(bench.generations[slot // PAGE] != was for slot, was in zip(*_slots(lease), strict=True))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("harm", "blocks"), [("lost", 0), ("damaged", 1)])
def test_a_lease_is_what_all_its_ranks_could_read_and_says_why_it_is_not_more(
    rank: int, harm: str, blocks: int
) -> None:
    bench = Bench(host_slots=4, ranks=2)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.start()
    name = (prompt.group, rank, prompt.key(0))
    if harm == "lost":
        bench.disk.lose(name)
    else:
        bench.disk.damage(name, 1)
    lease = bench.load(prompt, ranks=(0, 1))
    assert (lease.blocks, lease.reason) == (blocks, Reason.NOT_FOUND if harm == "lost" else Reason.CHECKSUM)
    assert [len(part.offsets) for part in lease.parts] == [1] * 2 * blocks
    bench.release(lease)
    assert bench.match(prompt) == (blocks, blocks)


def test_an_error_that_one_rank_met_is_told_though_another_one_reads_on() -> None:
    bench = Bench(host_slots=4, ranks=2)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.start()
    assert isinstance(bench.acquire(prompt, ranks=(0, 1)), Waiting)
    first, second = bench.worker.waiting
    bench.worker.run(first, Reason.IO_ERROR, valid=1)
    bench.hear()
    assert bench.notices == []
    bench.worker.run(second)
    bench.hear()
    lease = bench.ready()
    assert (lease.blocks, lease.reason) == (1, Reason.IO_ERROR)
    bench.check_lease(prompt, lease)
    bench.release(lease)
    assert bench.load(prompt, ranks=(0, 1)).blocks == 2


def test_a_file_that_one_rank_has_found_missing_is_not_called_flushed_while_another_one_reads_on() -> None:
    bench = Bench(host_slots=4, ranks=2)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.start()
    bench.disk.lose((prompt.group, 0, prompt.key(0)))
    assert isinstance(bench.acquire(prompt, ranks=(0, 1)), Waiting)
    first, second = bench.worker.waiting
    bench.worker.run(first)
    bench.hear()
    assert bench.flushed(prompt) == 0
    answer, effects = bench.state.seal(
        seal_id=7, group=prompt.group, keys=prompt.keys, wait_flushed=True, deadline=bench.now + 9.0, now=bench.now
    )
    bench.absorb(effects)
    assert isinstance(answer, Waiting)
    bench.worker.run(second)
    bench.hear()
    (sealed,) = [notice for notice in bench.notices if isinstance(notice, SealReady)]
    assert (sealed.answer.blocks, sealed.answer.flushed_blocks, sealed.answer.reason) == (0, 0, Reason.NOT_FOUND)
    bench.work()


def _slots(lease: Lease) -> tuple[list[int], list[int]]:
    (part,) = lease.parts
    return part.offsets, part.generations
