from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tierkv.node.children import Backoff, Child
from tierkv.node.control import Control, WorkerName, WorkerStarted, control_pair
from tierkv.node.worker_command import WorkerResources
from tierkv.node.worker_watch import Died, WorkerWatch

STAYS = "import signal; signal.pause()"
FAILS = "raise SystemExit(1)"
CAN_NOT_USE_ITS_DIRECTORY = "raise SystemExit(2)"
SUCCEEDS = "pass"


@dataclass
class Incarnation:
    control: Control
    arena_fd: int
    arena_bytes: int = 4096


@dataclass
class Desk:
    """A watch over processes that do as `program` says, and the front's end of the control socket."""

    front: Control
    incarnation: Incarnation
    write: Callable[[str], None]
    launched: list[tuple[bool, bool]] = field(default_factory=list)  # sends_rows, discard_index
    now: float = 100.0

    def __post_init__(self) -> None:
        self.watch = WorkerWatch(WorkerName.DISK, self._launch, Backoff(2.0))
        self.write(STAYS)

    def _launch(self, resources: WorkerResources, *, sends_rows: bool, discard_index: bool) -> Child:
        self.launched.append((sends_rows, discard_index))
        return Child("watched", [], resources.descriptors)

    def start(self) -> WorkerStarted:
        """One is begun, and told of."""
        self.watch.start_if_due(self.incarnation, self.now)
        found = self.front.wait(20.0)
        assert found is not None
        message, descriptors = found
        assert isinstance(message, WorkerStarted)
        for fd in descriptors:
            socket.socket(fileno=fd).close()
        return message

    def until_dead(self, *, is_stopping: bool = False) -> Died | None:
        poll = select.poll()
        for fd in self.watch.pidfds():
            poll.register(fd, select.POLLIN)
        assert poll.poll(30_000), "it did not end"
        return self.watch.reap(self.now, is_stopping=is_stopping)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    supervisor, theirs = control_pair()
    front = Control(theirs)
    arena_fd = os.memfd_create("arena")
    desk = Desk(front, Incarnation(supervisor, arena_fd), (tmp_path / "watched.py").write_text)
    yield desk
    desk.watch.kill()
    desk.watch.wait()
    supervisor.close()
    front.close()
    os.close(arena_fd)


def test_the_front_is_told_of_a_worker_by_name_and_gets_the_end_of_its_channel(desk: Desk) -> None:
    desk.watch.begin(desk.now)
    started = desk.start()
    assert (started.worker, started.restarts, started.sends_rows) == (WorkerName.DISK, 0, True)
    assert desk.watch.next_due() is None
    assert desk.watch.reap(desk.now, is_stopping=False) is None
    desk.watch.start_if_due(desk.incarnation, desk.now + 60)
    assert len(desk.launched) == 1


def test_one_that_follows_a_recovered_one_sends_no_rows_until_there_is_a_new_incarnation(desk: Desk) -> None:
    desk.watch.begin(desk.now)
    first = desk.start()
    desk.watch.recovered(1)
    desk.watch.kill()
    assert desk.until_dead() == Died(first.pid, "killed by SIGKILL")
    assert desk.watch.next_due() == desk.now
    assert desk.start().sends_rows is False
    desk.watch.incarnation_ended()
    assert desk.watch.has_leftover
    assert desk.until_dead() is None
    desk.watch.begin(desk.now)
    assert desk.start().sends_rows is True


def test_the_next_incarnations_worker_waits_for_the_death_of_the_last_ones(desk: Desk) -> None:
    desk.watch.begin(desk.now)
    desk.start()
    desk.watch.incarnation_ended()
    desk.watch.begin(desk.now)
    assert desk.watch.next_due() is None
    desk.watch.start_if_due(desk.incarnation, desk.now)
    assert len(desk.launched) == 1
    desk.until_dead()
    assert not desk.watch.has_leftover
    assert desk.watch.next_due() == desk.now
    desk.start()
    assert len(desk.launched) == 2


def test_the_index_is_set_aside_after_a_death_before_recovery(desk: Desk) -> None:
    desk.write(FAILS)
    desk.watch.begin(desk.now)
    desk.start()
    assert desk.until_dead() is not None
    desk.start()
    assert desk.launched == [(True, False), (True, True)]


def test_a_directory_that_can_not_be_used_is_not_the_fault_of_the_index(desk: Desk) -> None:
    desk.write(CAN_NOT_USE_ITS_DIRECTORY)
    desk.watch.begin(desk.now)
    desk.start()
    assert desk.until_dead() is not None
    desk.start()
    assert desk.launched == [(True, False), (True, False)]


def test_what_can_not_begin_is_tried_again_ever_more_rarely_and_told_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.write(CAN_NOT_USE_ITS_DIRECTORY)
    desk.watch.begin(desk.now)
    pauses = []
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            desk.start()
            desk.until_dead()
            due = desk.watch.next_due()
            assert due is not None
            pauses.append(round(due - desk.now, 3))
            desk.now = due
    assert pauses == [0.0, 0.1, 0.2, 0.4]
    assert [record.levelname for record in caplog.records if "exited with 2" in record.message] == ["ERROR"]


def test_only_the_one_that_was_meant_is_replaced(desk: Desk) -> None:
    desk.watch.begin(desk.now)
    pid = desk.start().pid
    desk.watch.replace(pid + 1, "of another")
    assert desk.watch.reap(desk.now, is_stopping=False) is None
    desk.watch.replace(pid, "it hangs")
    assert desk.until_dead() == Died(pid, "killed by SIGKILL")


def test_one_that_ends_in_order_while_the_node_stops_is_not_started_again(desk: Desk) -> None:
    desk.write(SUCCEEDS)
    desk.watch.begin(desk.now)
    desk.start()
    assert desk.until_dead(is_stopping=True) is not None
    assert desk.watch.next_due() is None
