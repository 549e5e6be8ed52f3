"""What is tried again after a failure, when, and how often."""

from __future__ import annotations

from tests.core.simulation import Bench
from tierkv.core.instructions import Remove, TierHealth, Write
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
