from __future__ import annotations

import logging

import pytest

from tests.integrations.connector.kit import Clock
from tierkv.integrations.connector.fence import QUIET_SECONDS, Fence


def fail() -> int:
    raise OSError("a fault to order")


def test_what_did_not_fail_is_handed_on() -> None:
    fence = Fence()
    assert fence.run("doing", lambda: 7, 0) == 7
    assert fence.faults == {}


def test_a_fault_is_what_was_said_for_it_and_counts_by_what_was_done() -> None:
    fence = Fence()
    assert fence.run("loading", fail, 0) == 0
    assert fence.run("loading", fail, 3) == 3
    assert fence.run("storing", fail, None) is None
    assert fence.faults == {"loading": 2, "storing": 1}


def test_the_end_of_the_process_is_no_fault() -> None:
    def end() -> int:
        raise KeyboardInterrupt

    fence = Fence()
    with pytest.raises(KeyboardInterrupt):
        fence.run("loading", end, 0)
    assert fence.faults == {}


def test_each_kind_of_fault_is_logged_with_its_story_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    fence = Fence(clock)
    caplog.set_level(logging.WARNING)
    for _ in range(5):
        fence.run("loading", fail, 0)
    fence.run("storing", fail, 0)
    assert [record.args[:2] for record in caplog.records if isinstance(record.args, tuple)] == [
        ("loading", 1),
        ("storing", 1),
    ]
    assert "a fault to order" in caplog.text
    assert "in fail" in caplog.text
    clock.skip(QUIET_SECONDS + 1)
    fence.run("loading", fail, 0)
    assert "loading failed (6 times so far)" in caplog.text


def test_a_log_handler_that_keeps_what_it_is_given_keeps_no_frame(caplog: pytest.LogCaptureFixture) -> None:
    """Frames of a copy hold the arena's memory."""
    Fence().run("loading", fail, 0)
    (record,) = caplog.records
    assert record.exc_info is None
    assert isinstance(record.args, tuple)
    assert {type(one) for one in record.args} == {str, int}
