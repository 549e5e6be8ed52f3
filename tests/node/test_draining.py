from __future__ import annotations

import pytest

from tests.node.kit import BLOCK_BYTES, GROUP, Kit
from tests.node.test_reading_and_writing import flush, store
from tierkv.core.instructions import Stop, Stopped, Touch, Write, WriteDone
from tierkv.node.control import Drained
from tierkv.node.draining import STOP_SECONDS, Draining
from tierkv.wire.messages import Acquire, Seal


def begin(kit: Kit, budget_seconds: float = 10.0) -> Draining:
    return Draining(kit.core, kit.service, budget_seconds, kit.now)


def test_a_node_in_memory_only_has_nothing_to_drain() -> None:
    kit = Kit()
    kit.open()
    store(kit, 2)
    assert begin(kit).step(kit.now) == Drained(flushed_extents=0, flushed_bytes=0, dropped_extents=0, dropped_bytes=0)


def test_what_is_dirty_is_written_then_the_worker_stops_then_it_is_over(durable: Kit) -> None:
    store(durable, 2)
    draining = begin(durable)
    assert draining.step(durable.now) is None
    flush(durable)
    assert draining.step(durable.now) is None
    assert [type(i) for i in durable.instructions()] == [Stop]
    durable.report(Stopped())
    drained = draining.step(durable.now)
    assert drained == Drained(flushed_extents=1, flushed_bytes=8192, dropped_extents=0, dropped_bytes=0)


def test_when_the_budget_is_spent_the_rest_is_dropped_and_counted(durable: Kit) -> None:
    for start in range(3):  # two may be in flight, one is queued
        store(durable, 1, grant=bytes([start]) * 16, start=1_000 * start)
    draining = begin(durable, budget_seconds=1.0)
    assert draining.next_wakeup() == durable.now + 1.0
    durable.now += 1.0
    assert draining.step(durable.now) is None
    writes = [i for i in durable.instructions() if isinstance(i, Write)]
    assert len(writes) == 2
    durable.report(WriteDone(op=writes[0].op, file_bytes=8192, seconds=0.1), Stopped())
    drained = draining.step(durable.now)
    assert drained is not None
    assert (drained.flushed_extents, drained.dropped_extents) == (1, 2)
    assert drained.dropped_bytes == 2 * BLOCK_BYTES


def test_a_worker_that_does_not_stop_is_not_waited_for_long(durable: Kit) -> None:
    draining = begin(durable)
    assert draining.step(durable.now) is None
    assert draining.next_wakeup() == durable.now + STOP_SECONDS
    durable.now += STOP_SECONDS
    assert draining.step(durable.now) is not None


@pytest.mark.scenario("B268", then="a worker that still recovers is not waited for at all")
def test_a_worker_that_still_recovers_is_not_waited_for() -> None:
    kit = Kit(nvme_bytes=2**20)
    kit.start_worker(recovers=False)
    assert begin(kit).step(kit.now) == Drained(flushed_extents=0, flushed_bytes=0, dropped_extents=0, dropped_bytes=0)
    kit.close()


def test_what_was_used_last_is_written_before_the_worker_stops(durable: Kit) -> None:
    keys = store(durable, 2)
    durable.ask(Seal, group=GROUP, keys=keys)
    flush(durable)
    durable.tick(durable.state.limits.touch_seconds)
    durable.instructions()
    durable.ask(Acquire, grant=b"l" * 16, group=GROUP, keys=keys)
    begin(durable).step(durable.now)
    touch, stop = durable.instructions()
    assert isinstance(touch, Touch)
    assert [(row.key, row.last_used) for row in touch.rows] == [(keys[:32], durable.now)]
    assert isinstance(stop, Stop)


def test_a_second_word_shortens_the_budget_and_never_lengthens_it(durable: Kit) -> None:
    store(durable, 2)
    draining = begin(durable)
    draining.shorten(60.0, durable.now)
    assert draining.next_wakeup() == durable.now + 10.0
    draining.shorten(0.0, durable.now)
    assert draining.step(durable.now) is None
    assert any(isinstance(i, Stop) for i in durable.instructions())


def test_without_a_worker_what_is_dirty_waits_for_the_next_one_within_the_budget(durable: Kit) -> None:
    store(durable, 2)
    durable.kill_worker()
    draining = begin(durable)
    assert draining.step(durable.now) is None
    durable.start_worker()
    flush(durable)
    assert draining.step(durable.now) is None
    durable.report(Stopped())
    drained = draining.step(durable.now)
    assert drained is not None
    assert (drained.flushed_extents, drained.dropped_extents) == (1, 0)


def test_without_any_worker_it_ends_at_the_budget(durable: Kit) -> None:
    store(durable, 2)
    durable.kill_worker()
    draining = begin(durable)
    durable.now += 10.0
    drained = draining.step(durable.now)
    assert drained is not None
    assert (drained.flushed_extents, drained.dropped_extents, drained.dropped_bytes) == (0, 1, 2 * BLOCK_BYTES)
