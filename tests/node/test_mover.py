from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.node.kit import HEALTHY, RECOVERED
from tierkv.core.instructions import AnyInstruction, AnyReport, Remove, Stop, Stopped, Touch, TouchRow
from tierkv.errors import WireError
from tierkv.node import mover as mover_module
from tierkv.node.mover import SILENT_SECONDS, Mover
from tierkv.workers.channel import BlockingChannel, worker_end


@pytest.fixture
def mover() -> Iterator[Mover]:
    mover = Mover()
    yield mover
    mover.detach()


@pytest.fixture
def worker(mover: Mover) -> Iterator[BlockingChannel[AnyReport, AnyInstruction]]:
    ours, theirs = socket.socketpair()
    mover.attach(ours, pid=5, restarts=2, now=0.0)
    with worker_end(theirs) as worker:
        yield worker


def remove(op: int) -> Remove:
    return Remove(op=op, fingerprint="ab" * 32, group=b"g" * 32, rank=0, key=b"k" * 32)


def test_without_a_worker_instructions_go_nowhere_and_nothing_comes(mover: Mover) -> None:
    mover.send(remove(1))
    mover.flush()
    assert mover.receive(0.0) == []
    assert mover.worker.describe(0.0) == "restarting"


def test_the_state_of_a_worker_follows_what_it_says(
    mover: Mover, worker: BlockingChannel[AnyReport, AnyInstruction]
) -> None:
    assert mover.worker.describe(1.0) == "recovering"
    worker.send([RECOVERED, HEALTHY], timeout_seconds=1.0)
    assert mover.receive(2.0) == [RECOVERED, HEALTHY]
    assert mover.worker.describe(3.0) == "running"
    assert mover.worker.health == HEALTHY
    worker.send([Stopped()], timeout_seconds=1.0)
    mover.receive(3.0)
    assert mover.worker.is_stopped


def test_a_worker_that_says_nothing_is_called_silent_and_left_alone(
    mover: Mover, worker: BlockingChannel[AnyReport, AnyInstruction]
) -> None:
    assert mover.worker.describe(SILENT_SECONDS + 0.1) == "silent"
    assert mover.is_attached
    worker.send([HEALTHY], timeout_seconds=1.0)
    mover.receive(SILENT_SECONDS + 0.2)
    assert mover.worker.describe(SILENT_SECONDS + 0.3) == "recovering"


def test_all_that_a_dead_worker_has_said_is_received(
    mover: Mover, worker: BlockingChannel[AnyReport, AnyInstruction]
) -> None:
    worker.send([HEALTHY] * 20_000, timeout_seconds=5.0)  # more than one receive takes
    worker.close()
    assert len(mover.receive_rest(1.0)) == 20_000
    assert not mover.is_attached


def test_the_last_words_of_a_worker_whose_socket_another_process_still_holds(
    mover: Mover, worker: BlockingChannel[AnyReport, AnyInstruction]
) -> None:
    worker.send([HEALTHY], timeout_seconds=1.0)
    assert mover.receive_rest(1.0) == [HEALTHY]


def test_last_use_is_not_queued_for_a_worker_that_reads_nothing(
    mover: Mover, worker: BlockingChannel[AnyReport, AnyInstruction], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover_module, "MAX_BUFFERED_FOR_TOUCH", 10)
    mover.send(Touch([]))
    mover.send(remove(1))
    mover.send(Touch([]))
    assert mover.worker.skipped_touches == 1
    mover.flush()
    assert [type(i) for i in worker.receive(1.0)] == [Touch, Remove]


def test_a_queue_that_grows_without_end_is_an_error(
    mover: Mover, worker: BlockingChannel[AnyReport, AnyInstruction], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mover._channel is not None
    monkeypatch.setattr(mover._channel, "_max_buffered_bytes", 10)
    with pytest.raises(WireError):
        mover.send(Touch([TouchRow("ab" * 32, b"g" * 32, 0, b"k" * 32, 0.0, 0)] * 200_000))


def test_what_was_sent_before_a_flush_goes_out_in_order(
    mover: Mover, worker: BlockingChannel[AnyReport, AnyInstruction]
) -> None:
    mover.send(remove(1))
    mover.send(Stop(budget_seconds=1.0))
    assert mover.wants_write
    mover.flush()
    assert [type(i) for i in worker.receive(1.0)] == [Remove, Stop]


@pytest.mark.parametrize("last", [b"\xff\xff\xff\xff", b"\x01\x00\x00\x00\xc1", b"\x00\x10\x00\x00" + b"\x91" * 4_096])
def test_last_words_of_a_dead_worker_that_nobody_understands_are_its_last(mover: Mover, last: bytes) -> None:
    ours, theirs = socket.socketpair()
    mover.attach(ours, pid=5, restarts=2, now=0.0)
    with worker_end(theirs) as worker:
        worker.send([HEALTHY], timeout_seconds=1.0)
        assert mover.receive(1.0) == [HEALTHY]
        theirs.send(last)
    assert mover.receive_rest(1.0) == []
