from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from tierkv.core.instructions import Alive, Report
from tierkv.core.reasons import Reason
from tierkv.workers.pulse import RECEIVER, Pulse
from tierkv.workers.roll import Roll
from tierkv.workers.tier_gate import TierGate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A Pulse whose own thread does not look (its period is long): the test does."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.roll = Roll(self.clock)
        self.gate = TierGate(0)
        self.said: list[Report] = []
        self.told = 0
        self.spoke = False
        self.dead: list[str] = []
        self.pulse = Pulse(
            self.roll,
            self.gate,
            self._say,
            has_spoken=lambda: self.spoke,
            tell=self._tell,
            period_seconds=3_600.0,
            stuck_seconds=20.0,
            hung_seconds=90.0,
            on_death=self.dead.append,
        )

    def _say(self, reports: Sequence[Report]) -> None:
        self.said += reports

    def _tell(self) -> None:
        self.told += 1


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    assert made.pulse.close(10.0)


def test_a_sign_of_life_is_given_only_when_nothing_else_was_said(watched: Watched) -> None:
    watched.pulse.look()
    assert watched.said == [Alive()]
    watched.spoke = True
    watched.pulse.look()
    assert watched.said == [Alive()]


def test_a_call_that_does_not_come_back_closes_the_gate_until_it_does(watched: Watched) -> None:
    post = watched.roll.post("io-0")
    with post.at("write"):
        watched.clock.now = 21.0
        watched.pulse.look()
        closed = watched.gate.closed
        assert closed is not None
        assert closed.reason == Reason.IO_STUCK
        assert "write of thread io-0" in closed.problem
        assert not watched.gate.is_read_stuck  # others may still be read
        assert watched.told == 1
        watched.pulse.look()
        assert watched.told == 2, "as long as it lasts: whoever else tells of the tier may be stuck himself"
    watched.pulse.look()
    assert watched.gate.closed is None
    assert watched.told == 3
    watched.pulse.look()
    assert watched.told == 3
    assert watched.dead == []  # to kill a process ends no call of a disk


def test_a_read_that_does_not_come_back_says_that_nothing_is_to_be_read(watched: Watched) -> None:
    with watched.roll.post("io-1").at("read"):
        watched.clock.now = 21.0
        watched.pulse.look()
        assert watched.gate.is_read_stuck
    watched.pulse.look()
    assert not watched.gate.is_read_stuck


def test_a_receiver_that_hangs_while_no_disk_keeps_it_ends_the_process(watched: Watched) -> None:
    with watched.roll.post(RECEIVER).at("Write"):
        watched.clock.now = 89.0
        watched.pulse.look()
        assert watched.dead == []
        watched.clock.now = 91.0
        watched.pulse.look()
    assert watched.dead == [RECEIVER]


def test_a_receiver_that_waits_for_a_sick_disk_is_let_wait(watched: Watched) -> None:
    with watched.roll.post(RECEIVER).at("Write"), watched.roll.post("io-0").at("write"):
        watched.clock.now = 3_600.0
        watched.pulse.look()
    assert watched.dead == []
    assert threading.current_thread().name == RECEIVER  # the name that the receiver's loop has


@pytest.mark.scenario("B136", then="however long the files take, the worker gives a sign of life each period")
def test_signs_of_life_do_not_wait_for_files(watched: Watched) -> None:
    with watched.roll.post("io-0").at("write"), watched.roll.post("io-1").at("write"):
        for period in range(60):
            watched.clock.now = float(period)
            watched.pulse.look()
    assert watched.said == [Alive()] * 60
