"""What the core does while the tier below is sick: what is still asked of it, what is refused, and by which name."""

from __future__ import annotations

from tests.core.simulation import Bench, Prompt
from tierkv.core.grants import Lease, SealAnswer, Waiting
from tierkv.core.instructions import Read, Remove, TierHealth, Write
from tierkv.core.reasons import Reason


def test_while_a_read_does_not_come_back_a_lease_gets_what_is_in_memory_at_once_and_nothing_more_is_read() -> None:
    bench = Bench(host_slots=4, extent_blocks=1)
    prompt, other = bench.prompt(1, 2), bench.prompt(8)
    bench.store_durably(prompt)
    bench.store_durably(other)
    bench.fill_host()
    assert isinstance(bench.acquire(prompt, seconds=60.0), Waiting)
    assert any(isinstance(op, Read) for op in bench.worker.waiting)
    stuck = TierHealth(False, 0, 0, Reason.IO_STUCK, readable=False)
    bench.absorb(bench.state.report(stuck, bench.now))
    lease = bench.ready()
    assert (lease.blocks, lease.reason) == (0, Reason.IO_STUCK)
    reads = len([op for op in bench.worker.waiting if isinstance(op, Read)])
    answer = bench.acquire(other, seconds=60.0)
    assert isinstance(answer, Lease)
    assert (answer.blocks, answer.reason) == (0, Reason.IO_STUCK)
    assert len([op for op in bench.worker.waiting if isinstance(op, Read)]) == reads
    bench.work()  # it has come back
    bench.absorb(bench.state.report(TierHealth(True, 0, 0), bench.now))
    bench.release(bench.load(prompt))
    bench.release(bench.load(other))


def seal_flushed(bench: Bench, prompt: Prompt) -> SealAnswer:
    answer, effects = bench.state.seal(
        seal_id=9, group=prompt.group, keys=prompt.keys, wait_flushed=True, deadline=bench.now + 9.0, now=bench.now
    )
    bench.absorb(effects)
    assert isinstance(answer, SealAnswer)
    return answer


def test_a_seal_names_the_cause_for_which_a_file_is_not_there() -> None:
    bench = Bench(host_slots=4, extent_blocks=4)
    evicted, lost = bench.prompt(1, 2), bench.prompt(3, 4)
    for prompt in (evicted, lost):
        bench.store_durably(prompt)
    bench.absorb(bench.state.nvme_limit(3 * 4096 + 1, bench.now))  # room for one file
    bench.work()
    assert seal_flushed(bench, evicted).reason is Reason.EVICTED
    bench.absorb(bench.state.report(TierHealth(False, 0, 0, Reason.IO_ERROR), bench.now))
    extent = bench.state._ledger.tree.heads[lost.key(0)]
    bench.state._cascade.losses.lose_file(extent, Reason.CHECKSUM, bench.now)
    bench.absorb(bench.state.report(TierHealth(False, 0, 0, Reason.IO_ERROR), bench.now))
    assert seal_flushed(bench, lost).reason is Reason.IO_ERROR  # what keeps it from being written again


def test_nothing_is_evicted_from_a_disk_that_takes_no_removal_and_all_is_done_once_it_does() -> None:
    bench = Bench(host_slots=2, extent_blocks=1)
    prompts = [bench.prompt(number) for number in (1, 2, 3)]
    for prompt in prompts:
        bench.store_durably(prompt)
    bench.absorb(bench.state.report(TierHealth(False, 0, 0, Reason.READ_ONLY), bench.now))
    bench.absorb(bench.state.nvme_limit(1, bench.now))
    assert not [op for op in bench.worker.waiting if isinstance(op, Remove)]
    assert all(bench.match(prompt)[0] == 1 for prompt in prompts)
    bench.absorb(bench.state.report(TierHealth(True, 0, 0), bench.now))
    bench.work()
    assert bench.nvme_used() == 0


def test_a_removal_that_a_read_only_disk_refuses_is_not_asked_for_every_second_and_done_when_it_can_be() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 0, bench.now))
    tries = 0
    for _ in range(20):
        for op in list(bench.worker.waiting):
            bench.worker.run(op, Reason.READ_ONLY)
            tries += 1
        bench.hear()
        bench.tick(1.0)
    assert tries == 1
    bench.absorb(bench.state.report(TierHealth(False, 0, 0, Reason.READ_ONLY), bench.now))
    bench.absorb(bench.state.report(TierHealth(True, 0, 0), bench.now))
    bench.tick(0.0)
    bench.work()
    assert bench.nvme_used() == 0


def test_files_make_room_for_files_when_inodes_are_short() -> None:
    bench = Bench(host_slots=8, extent_blocks=1)
    first = [bench.prompt(number) for number in range(10)]
    for prompt in first:
        bench.tick(1.0)
        bench.store_durably(prompt)
    bench.absorb(bench.state.report(TierHealth(True, 0, 1 << 40, spare_inodes=1), bench.now))
    new = bench.prompt(99)
    bench.store(new)
    bench.seal(new)
    removed = [op for op in bench.worker.waiting if isinstance(op, Remove)]
    assert removed
    assert [op.key for op in removed] == [prompt.key(0) for prompt in first[: len(removed)]]
    assert not [op for op in bench.worker.waiting if isinstance(op, Write)]  # not before there is room
    bench.work()
    assert bench.flushed(new) == 1
    assert bench.match(first[-1])[0] == 1


def test_a_file_system_whose_inodes_others_take_is_shrunk_into() -> None:
    bench = Bench(host_slots=8, extent_blocks=1)
    for number in range(6):
        bench.store_durably(bench.prompt(number))
    used = bench.nvme_used()
    bench.absorb(bench.state.report(TierHealth(True, 0, 1 << 40, spare_inodes=-2), bench.now))
    bench.work()
    assert bench.nvme_used() == used * 4 // 6


def test_no_inodes_and_nothing_to_evict_is_refused_by_its_name() -> None:
    bench = Bench(host_slots=4)
    bench.absorb(bench.state.report(TierHealth(True, 0, 1 << 40, spare_inodes=0), bench.now))
    prompt = bench.prompt(1)
    bench.store(prompt)
    bench.seal(prompt)
    assert bench.state.counts.dropped_writes[Reason.NO_INODES] == 1
    assert seal_flushed(bench, prompt).reason is Reason.NO_INODES
