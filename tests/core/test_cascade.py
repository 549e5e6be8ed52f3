"""What is tried again after a failure, when, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.simulation import PAGE, Bench
from tierkv.core.grants import GRANTED, NeverHit, Waiting
from tierkv.core.instructions import (
    OpFailed,
    Read,
    ReadDone,
    Remove,
    RemoveDone,
    SetAside,
    TierHealth,
    Write,
    WriteDone,
)
from tierkv.core.reasons import Reason


def test_a_write_that_fails_for_good_is_not_tried_again_and_again() -> None:
    """The worker finds something of others under the name, say. The tier is well; trying at once would never end."""
    bench = Bench(host_slots=4)
    bench.store(bench.prompt(1, 2))
    bench.seal(bench.prompt(1, 2))
    writes = 0
    for _ in range(20):
        for op in list(bench.worker.waiting):
            writes += isinstance(op, Write)
            bench.worker.run(op, Reason.UNKNOWN_FORMAT if isinstance(op, Write) else None)
        bench.hear()
        bench.tick(1.0)
    assert writes == 1
    assert bench.nvme_used() == 0
    assert bench.match(bench.prompt(1, 2)) == (2, 2)


def test_what_failed_is_written_when_the_tier_is_well_again_though_its_file_was_still_being_removed_then() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.seal(prompt)
    (write,) = bench.worker.waiting
    assert isinstance(write, Write)
    bench.worker.run(write, Reason.IO_ERROR)
    bench.hear()
    (remove,) = bench.worker.waiting
    assert isinstance(remove, Remove)
    bench.absorb(bench.state.report(TierHealth(False, 0, 0, Reason.IO_ERROR), bench.now))
    bench.absorb(bench.state.report(TierHealth(True, 0, 0), bench.now))
    assert bench.worker.waiting == [remove]
    bench.work()
    assert bench.flushed(prompt) == 2


def test_what_was_lost_on_disk_and_is_in_memory_is_written_again_at_once() -> None:
    bench = Bench(host_slots=4, extent_blocks=4)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 1, bench.now))
    bench.work()
    assert bench.match(prompt) == (1, 1)
    assert bench.flushed(prompt) == 1


def test_a_report_that_is_no_answer_to_its_operation_ends_nothing() -> None:
    """Else the slots of a read would stay taken for good, or a file be forgotten that is still being written."""
    bench = Bench(host_slots=4)
    first, second = bench.prompt(1, 2), bench.prompt(3, 4)
    bench.store_durably(first)
    bench.start()
    assert isinstance(bench.acquire(first), Waiting)
    bench.store(second)
    bench.seal(second)
    bench.absorb(bench.state.report_bad(first.group, first.keys, 1, bench.now))
    kinds = {type(op): op.op for op in bench.worker.waiting}
    assert kinds.keys() == {Read, Write, SetAside}
    strange = {
        Read: [WriteDone(kinds[Read], 4096, 0.1), RemoveDone(kinds[Read])],
        Write: [ReadDone(kinds[Write], 1, 0.1), RemoveDone(kinds[Write])],
        SetAside: [ReadDone(kinds[SetAside], 1, 0.1), WriteDone(kinds[SetAside], 4096, 0.1)],
    }
    for reports in strange.values():
        for report in reports:
            bench.absorb(bench.state.report(report, bench.now))
    bench.work()
    assert bench.flushed(second) == 2
    bench.absorb(bench.state.release(bench.ready().grant, None, bench.now))
    bench.fill_host()
    assert bench.match(second)[0] == 2


def test_blocks_reported_bad_go_to_quarantine_and_are_removed_where_that_fails() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.absorb(bench.state.report_bad(prompt.group, prompt.keys, 0, bench.now))
    (aside,) = bench.worker.waiting
    assert isinstance(aside, SetAside)
    assert aside.reason is Reason.REPORTED_BAD
    bench.absorb(bench.state.worker_died(bench.now))  # before it read that
    bench.worker.die(0)
    bench.absorb(bench.state.worker_started(bench.now))
    (again,) = bench.worker.waiting
    assert again == aside
    bench.worker.waiting.clear()
    bench.absorb(bench.state.report(OpFailed(again.op, Reason.IO_ERROR), bench.now))
    bench.tick(bench.limits.retry_seconds)
    assert [type(op) for op in bench.worker.waiting] == [Remove]
    bench.work()
    assert (bench.nvme_used(), bench.match(prompt)) == (0, (0, 0))


@pytest.mark.scenario("B102", then="a group written over ten times the tier's room and never hit is named, once")
@pytest.mark.parametrize("is_read", [False, True])
def test_a_group_that_fills_the_tier_over_and_over_and_is_never_hit_is_named_once(is_read: bool) -> None:
    bench = Bench(host_slots=4, nvme_bytes=8 * PAGE, extent_blocks=1)
    for number in range(40):
        bench.store_durably(bench.prompt(number))
        if is_read and number == 5:
            bench.release(bench.load(bench.prompt(number)))
    written = bench.state.counts.nvme_written_bytes
    assert written > 10 * 8 * PAGE
    told = [notice for notice in bench.notices if isinstance(notice, NeverHit)]
    assert [notice.group for notice in told] == ([] if is_read else [bench.spec.group])
    assert all(10 * 8 * PAGE < notice.written_bytes <= written for notice in told)


def test_no_more_reads_and_writes_than_allowed_are_under_way() -> None:
    bench = Bench(host_slots=12, extent_blocks=1)
    prompts = [bench.prompt(number) for number in range(9)]
    for prompt in prompts:
        bench.store(prompt)
        bench.seal(prompt)
    assert len(bench.worker.waiting) == bench.limits.inflight_writes == 4
    bench.work()
    bench.start()
    for prompt in prompts:
        assert isinstance(bench.acquire(prompt), Waiting)
    assert len(bench.worker.waiting) == bench.limits.inflight_reads == 4
    bench.work()
    assert [bench.match(prompt) for prompt in prompts] == [(1, 1)] * 9


def test_last_use_goes_to_disk_every_so_many_seconds() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.tick(bench.limits.touch_seconds)
    bench.release(bench.load(prompt))
    before = bench.worker.touched
    due = bench.state.next_wakeup()
    assert due is not None
    assert 0 < due - bench.now <= bench.limits.touch_seconds
    bench.tick(due - bench.now - 0.1)
    assert bench.worker.touched == before
    bench.tick(0.1)
    assert bench.worker.touched == before + 1


def test_what_waits_to_be_written_is_not_evicted_when_its_group_is_not_to_be_persistent_any_more() -> None:
    """Else an extent without blocks would be written in its name."""
    bench = Bench(host_slots=8, extent_blocks=2)
    flushed, queued, growing = bench.prompt(1, 2), bench.prompt(3, 4), bench.prompt(5)
    bench.store_durably(flushed)
    bench.state._ledger.limits = replace(bench.limits, inflight_writes=0)
    bench.store(queued)
    bench.store(growing)
    assert bench.state.num_writes_waiting == 1
    bench.absorb(bench.state.open_group(replace(bench.spec, persistent=False), bench.now))
    bench.tick(1.0)
    assert bench.store(bench.prompt(*range(1_000, 1_007))).states.count(GRANTED) == 6  # what grew went as well
    assert [bench.match(prompt) for prompt in (flushed, queued, growing)] == [(2, 0), (2, 2), (0, 0)]
    bench.state._ledger.limits = bench.limits
    bench.tick(1.0)
    bench.work()
    assert all(file.keys for file in bench.disk.files.values())
    bench.start()
    assert [bench.match(prompt)[0] for prompt in (flushed, queued, growing)] == [2, 2, 0]
