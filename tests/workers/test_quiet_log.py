from __future__ import annotations

import logging

import pytest

from tierkv.workers.quiet_log import QuietLog

log = logging.getLogger("tierkv.test.quiet")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quiet(clock: Clock) -> QuietLog:
    return QuietLog(log, period_seconds=10.0, clock=clock)


def test_the_first_of_a_kind_is_logged_and_a_thousand_more_are_one_line(
    quiet: QuietLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1_001):
        quiet.warning("not written", f"extent {number} was not written")
    assert caplog.messages == ["extent 0 was not written"]
    quiet.tell_counted()
    assert len(caplog.messages) == 1  # its period is not over
    clock.now = 10.0
    quiet.tell_counted()
    quiet.tell_counted()
    assert caplog.messages[1:] == ["not written: 1000 more in the last 10 s; the last one: extent 1000 was not written"]


def test_the_next_line_of_a_kind_says_how_many_it_stands_for(
    quiet: QuietLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("one", "two", "three"):
        quiet.warning("kind", text)
    clock.now = 11.0
    quiet.warning("kind", "four")
    assert caplog.messages == ["one", "four (and 2 more like it)"]


def test_kinds_do_not_hide_each_other(quiet: QuietLog, caplog: pytest.LogCaptureFixture) -> None:
    quiet.warning("not written", "no room")
    quiet.warning("not removed", "no permission")
    assert caplog.messages == ["no room", "no permission"]


def test_the_memory_of_kinds_is_bounded(quiet: QuietLog) -> None:
    for number in range(5_000):
        quiet.warning(f"kind {number}", "text")
    assert len(quiet._told) <= 1_000
