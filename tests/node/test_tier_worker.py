from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.node.kit import HEALTHY, RECOVERED
from tierkv.core.instructions import AnyInstruction, AnyReport
from tierkv.errors import WireError
from tierkv.node import tier_worker
from tierkv.node.control import WorkerDied, WorkerName, WorkerStarted
from tierkv.node.mover import Mover
from tierkv.node.tier_room import TierRoom
from tierkv.node.tier_worker import TierWorker
from tierkv.workers.channel import BlockingChannel, worker_end

STARTED = WorkerStarted(worker=WorkerName.DISK, pid=7, restarts=2, sends_rows=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tier_worker, "time", made)
    return made


@pytest.fixture
def worker(clock: Clock) -> Iterator[TierWorker]:
    made = TierWorker(Mover(WorkerName.DISK), TierRoom(None, 0, tier="disk"), hang_seconds=6.0)
    yield made
    made.mover.detach()


@pytest.fixture
def other_end(worker: TierWorker) -> Iterator[BlockingChannel[AnyReport, AnyInstruction]]:
    ours, theirs = socket.socketpair()
    worker.started(STARTED, ours, 5.0)
    with worker_end(theirs) as channel:
        yield channel


def grow_silent(worker: TierWorker, clock: Clock, seconds: int) -> str:
    for _ in range(seconds):
        clock.now += 1.0
        if problem := worker.why_hung():
            return problem
    return ""


def test_who_gives_no_sign_of_life_is_hung_once_and_who_does_is_not(
    worker: TierWorker, other_end: BlockingChannel[AnyReport, AnyInstruction], clock: Clock
) -> None:
    assert grow_silent(worker, clock, 5) == ""
    other_end.send([RECOVERED, HEALTHY], timeout_seconds=1.0)
    assert worker.receive(6.0) == [RECOVERED, HEALTHY]
    assert grow_silent(worker, clock, 5) == ""
    assert "no sign of life" in grow_silent(worker, clock, 5)
    assert worker.next_look() is None


def test_nobody_is_watched_before_a_start_and_after_a_death(worker: TierWorker, clock: Clock) -> None:
    assert worker.next_look() is None
    ours, theirs = socket.socketpair()
    worker.started(STARTED, ours, 5.0)
    assert worker.next_look() is not None
    with worker_end(theirs) as channel:
        channel.send([HEALTHY], timeout_seconds=1.0)
        last_words = worker.died(WorkerDied(worker=WorkerName.DISK, pid=7, problem="killed by SIGKILL"), 6.0)
    assert last_words == [HEALTHY]
    assert worker.next_look() is None
    assert (worker.mover.is_attached, worker.mover.worker.problem) == (False, "killed by SIGKILL")


def test_nonsense_on_the_channel_detaches_the_worker(worker: TierWorker) -> None:
    ours, theirs = socket.socketpair()
    worker.started(STARTED, ours, 5.0)
    with theirs:
        theirs.sendall(b"\xff" * 64)
        with pytest.raises(WireError):
            worker.receive(6.0)
    assert not worker.mover.is_attached
