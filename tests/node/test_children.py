from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tierkv.node.children import Backoff, Child, IndexSuspicion, describe_exit


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def wait(child: Child) -> str:
    poll = select.poll()
    poll.register(child.pidfd, select.POLLIN)
    assert poll.poll(30_000), "it did not end"
    ended = child.reap()
    assert ended is not None
    return ended


def test_a_child_gets_its_arguments_and_descriptors_and_its_end_is_told_in_words(modules: Path) -> None:
    (modules / "told.py").write_text("import os, sys\nos.write(int(sys.argv[1]), b'x')\nsys.exit(3)")
    reading, writing = os.pipe()
    child = Child("told", [str(writing)], [writing])
    os.close(writing)
    assert wait(child) == "exited with 3"
    assert not child.was_killed
    assert os.read(reading, 2) == b"x"
    assert os.read(reading, 2) == b""
    os.close(reading)


def test_a_running_child_is_not_reaped_and_a_killed_one_is_known_as_such(modules: Path) -> None:
    (modules / "stays.py").write_text("import signal\nsignal.pause()")
    child = Child("stays", [], [])
    assert child.reap() is None
    child.kill()
    assert wait(child) == "killed by SIGKILL"
    assert child.was_killed


def test_a_child_is_not_in_the_group_that_a_terminal_signals(modules: Path) -> None:
    (modules / "stays.py").write_text("import signal\nsignal.pause()")
    child = Child("stays", [], [])
    assert os.getpgid(child.pid) == child.pid
    child.kill()
    wait(child)


def test_a_child_ends_when_its_parent_is_killed(modules: Path) -> None:
    (modules / "child.py").write_text(
        "import os, sys, signal\n"
        "from tierkv.workers.lifeline import end_with_parent\n"
        "end_with_parent(int(sys.argv[1]))\n"
        "os.write(int(sys.argv[2]), b'%d ' % os.getpid())\n"
        "signal.pause()"
    )
    (modules / "parent.py").write_text(
        "import os, sys, signal\n"
        "from tierkv.node.children import Child\n"
        "c = Child('child', [str(os.getpid()), sys.argv[1]], [int(sys.argv[1])])\n"
        "signal.pause()"
    )
    reading, writing = os.pipe()
    parent = subprocess.Popen([sys.executable, "-m", "parent", str(writing)], pass_fds=[writing])
    os.close(writing)
    pid = int(os.read(reading, 32))
    child = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    assert poll.poll(100) == []
    parent.kill()
    parent.wait()
    assert poll.poll(30_000), "the child outlived its parent"
    os.close(child)
    os.close(reading)


def test_the_first_restart_is_at_once_and_later_ones_wait_longer_and_longer() -> None:
    backoff = Backoff()
    now, delays = 0.0, []
    for _ in range(9):
        backoff.started(now)
        now += 1.0
        delays.append(round(backoff.died(now) - now, 3))
    assert delays == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert (backoff.restarts, backoff.in_a_row) == (9, 9)


def test_what_ran_for_a_while_is_restarted_at_once_again() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.started(0.0)
        backoff.died(1.0)
    backoff.started(10.0)
    assert backoff.died(50.0) == 50.0


def test_a_try_that_never_began_makes_no_restart_and_the_pauses_grow_all_the_same() -> None:
    backoff = Backoff()
    delays = []
    for _ in range(3):
        backoff.started(1.0)
        delays.append(round(backoff.died(1.0, had_begun=False) - 1.0, 3))
    assert (backoff.restarts, delays) == (0, [0.0, 0.1, 0.2])


def test_ends_are_told_in_words() -> None:
    assert describe_exit(0) == "exited with 0"
    assert describe_exit(-7) == "killed by SIGBUS"
    assert describe_exit(-40) == "killed by signal 40"


def test_an_index_is_suspected_after_a_crash_or_two_kills_and_cleared_by_a_recovery() -> None:
    suspicion = IndexSuspicion()
    suspicion.worker_died(was_killed=True)
    assert not suspicion.is_strong
    suspicion.worker_died(was_killed=True)
    assert suspicion.is_strong
    suspicion.cleared()
    assert not suspicion.is_strong
    suspicion.worker_died(was_killed=False)
    assert suspicion.is_strong
