"""Node time, and what is due after a long sleep."""

from __future__ import annotations

import pytest

from tests.faults.clock import DAY, FakeClock
from tests.node.kit import GROUP, Kit, prompt
from tierkv.core.instructions import Touch, Write, WriteDone
from tierkv.node.clock import NodeClock
from tierkv.wire.messages import Acquire, Commit, Release, Reserve


@pytest.mark.scenario("B248", then="node time goes on with the monotonic clock, whatever becomes of the wall clock")
@pytest.mark.parametrize("seconds", [-DAY, DAY, -4_000 * DAY])
def test_node_time_is_not_stepped(seconds: float) -> None:
    fake = FakeClock(wall=5_000.0, monotonic=70.0)
    clock = NodeClock(fake.wall(), fake.monotonic(), monotonic=fake.monotonic)
    assert clock.now() == 5_000.0
    fake.pass_(3.0)
    fake.step(seconds)
    fake.pass_(2.0)
    assert clock.now() == 5_005.0


@pytest.mark.scenario("B248", then="what was due many times over a long sleep is done once")
def test_a_minute_of_sleep_costs_one_round_of_what_is_due(durable: Kit) -> None:
    """Last use is flushed every few seconds, and what grows is sealed when it has been idle."""
    keys, tokens = prompt(2)
    durable.ask(Reserve, grant=b"t" * 16, group=GROUP, keys=keys, first=0, tokens=tokens)
    durable.ask(Commit, grant=b"t" * 16)
    durable.tick(60.0)
    writes = [instruction for instruction in durable.instructions() if isinstance(instruction, Write)]
    assert len(writes) == 1
    durable.report(WriteDone(op=writes[0].op, file_bytes=8_192, seconds=0.01))
    durable.ask(Acquire, grant=b"l" * 16, group=GROUP, keys=keys)
    durable.ask(Release, grant=b"l" * 16)
    durable.tick(60.0)
    touches = [instruction for instruction in durable.instructions() if isinstance(instruction, Touch)]
    assert [len(touch.rows) for touch in touches] == [1]
    for _ in range(3):
        durable.tick(0.0)
    assert durable.instructions() == []
    due = durable.service.next_wakeup()
    assert due is None or due > durable.now, "and the loop goes to sleep"
