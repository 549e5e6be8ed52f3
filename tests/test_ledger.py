"""The ledger finds what a test leaves, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import ledger
from tests.core.simulation import Bench
from tests.ledger import Cores, Holdings, left_over
from tierkv.errors import BrokenInvariant


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(ledger, "SETTLE_SECONDS", 0.0)


def test_nothing_is_left_by_a_test_that_leaves_nothing(runtime_dir: Path):
    before = Holdings.now(runtime_dir)
    with open(os.devnull):
        pass
    assert left_over(before, runtime_dir) == []


def test_an_open_file_is_found(runtime_dir: Path, quickly, tmp_path: Path):
    before = Holdings.now(runtime_dir)
    with open(tmp_path / "open", "w"):
        assert left_over(before, runtime_dir) == [f"open descriptor of {tmp_path}/open"]


def test_a_second_descriptor_of_one_file_is_found(runtime_dir: Path, quickly, tmp_path: Path):
    with open(tmp_path / "open", "w") as first:
        before = Holdings.now(runtime_dir)
        second = os.dup(first.fileno())
        assert left_over(before, runtime_dir) == [f"open descriptor of {tmp_path}/open"]
        os.close(second)


def test_a_thread_is_found(runtime_dir: Path, quickly):
    end = threading.Event()
    before = Holdings.now(runtime_dir)
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    thread.start()
    assert left_over(before, runtime_dir) == ["thread forgotten"]
    end.set()
    thread.join()


def test_a_child_that_nobody_waited_for_is_found(runtime_dir: Path, quickly):
    before = Holdings.now(runtime_dir)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert left_over(before, runtime_dir) == [f"child process {child.pid} (ended, but nobody waited for it)"]
    child.wait()


def test_a_socket_in_the_runtime_directory_is_found(runtime_dir: Path, quickly):
    before = Holdings.now(runtime_dir)
    path = runtime_dir / "stale.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert left_over(before, runtime_dir) == [f"socket {path}"]
    path.unlink()


def test_what_is_ending_gets_time_to_end(runtime_dir: Path):
    before = Holdings.now(runtime_dir)
    thread = threading.Timer(0.05, lambda: None)
    thread.start()
    assert left_over(before, runtime_dir) == []


def test_a_core_whose_books_do_not_balance_is_found(cores: Cores) -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    bench.reserve(bench.prompt(1))
    bench.state._ledger.sessions.clear()  # a session was forgotten, and its ticket was not
    with pytest.raises(BrokenInvariant, match="no living holder"):
        cores.unbalanced()


def test_what_open_sessions_hold_is_no_fault_of_the_core(cores: Cores) -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    bench.store(bench.prompt(1))
    bench.reserve(bench.prompt(2))
    bench.load(bench.prompt(1))
    assert cores.unbalanced() == []
    assert (bench.state.num_tickets, bench.state.num_leases) == (0, 0)
