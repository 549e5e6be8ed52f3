"""A block that leaves host memory is on disk by then; what was written for an earlier attempt speaks for it alone."""

from __future__ import annotations

import pytest

from tests.core.simulation import Bench
from tierkv.core.grants import Reservation
from tierkv.core.instructions import Write, WriteDone


@pytest.mark.scenario(
    "B047",
    then="the late answer of an attempt that was given up is ignored: nothing counts as flushed until the attempt that"
    " took its place is done, and the bytes on disk are that one's",
)
def test_a_late_answer_to_a_write_that_was_done_again_ends_nothing() -> None:
    bench = Bench(host_slots=4)
    prompt = bench.prompt(1, 2)
    bench.store(prompt)
    bench.seal(prompt)
    (stale,) = bench.worker.waiting
    assert isinstance(stale, Write)
    bench.worker.die(0)
    bench.absorb(bench.state.worker_died(bench.now))
    bench.absorb(bench.state.worker_started(bench.now))
    for report in bench.disk.recovery():
        bench.absorb(bench.state.report(report, bench.now))
    (attempt,) = bench.worker.waiting
    assert isinstance(attempt, Write)
    assert attempt.op != stale.op
    bench.absorb(bench.state.report(WriteDone(op=stale.op, file_bytes=12_288, seconds=0.1), bench.now))
    assert bench.flushed(prompt) == 0
    assert bench.state.counts.flushed_extents == 0
    bench.work()
    assert bench.flushed(prompt) == 2
    assert bench.state.counts.flushed_extents == 1
    bench.start()
    bench.load(prompt)


@pytest.mark.scenario(
    "B052",
    then="with the writer held nothing that is not on disk is evicted: further prompts get no room; once it goes on all"
    " twelve blocks are flushed and found on disk, and none was dropped unwritten",
)
def test_nothing_is_evicted_before_it_was_written() -> None:
    bench = Bench(host_slots=4, extent_blocks=4)
    prompts = [bench.prompt(*range(start, start + 4)) for start in (10, 20, 30)]
    bench.store(prompts[0])
    bench.seal(prompts[0])
    refused = bench.reserve(prompts[1])  # the writer is held
    assert isinstance(refused, Reservation)
    assert not refused.offsets
    assert sum(bench.state.counts.refused_blocks.values()) == 4
    assert bench.match(prompts[0]) == (4, 4)
    for prompt in prompts[1:]:
        bench.work()
        assert len(bench.store(prompt).offsets) == 4
        bench.seal(prompt)
    bench.work()
    counts = bench.state.counts
    assert not counts.dropped_unwritten_bytes
    assert not counts.dropped_writes
    bench.start()
    assert [bench.match(prompt) for prompt in prompts] == [(4, 0)] * 3
    for prompt in prompts:
        bench.release(bench.load(prompt))
