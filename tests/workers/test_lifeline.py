from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.workers.lifeline import EXIT_SUPERVISOR_GONE, EXIT_THREAD_DIED, end_with_pipe, start_thread

SECONDS = 20.0


@contextmanager
def run_python(script: str) -> Iterator[subprocess.Popen[str]]:
    """Killed at the end of the block, should it still run."""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_thread_that_returns_is_no_death() -> None:
    dead: list[str] = []
    start_thread("scrub", lambda: None, on_death=dead.append).join(SECONDS)
    assert dead == []


def test_the_end_of_the_pipe_ends_the_process() -> None:
    ends: queue.Queue[int] = queue.Queue()
    read_end, write_end = os.pipe()
    thread = end_with_pipe(read_end, end=ends.put)
    os.write(write_end, b"nothing is said on it")
    os.close(write_end)
    assert ends.get(timeout=SECONDS) == EXIT_SUPERVISOR_GONE
    thread.join(SECONDS)
    os.close(read_end)


def test_a_thread_that_dies_takes_its_process_with_it() -> None:
    script = """
import threading
from tierkv.workers.lifeline import start_thread
start_thread("flusher", lambda: 1 / 0)
threading.Event().wait(60)
"""
    with run_python(script) as process:
        assert process.wait(SECONDS) == EXIT_THREAD_DIED


def test_a_child_dies_with_its_parent() -> None:
    script = """
import os, sys, threading
from tierkv.workers.lifeline import end_with_parent
parent = os.getpid()
if os.fork() == 0:
    end_with_parent(parent)
    print(os.getpid(), flush=True)
    threading.Event().wait(60)
threading.Event().wait(60)
"""
    with run_python(script) as process:
        assert process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        process.wait(SECONDS)
        assert_ends(child)


def test_a_child_whose_parent_died_before_it_asked_ends_at_once() -> None:
    script = f"""
import os, sys
from tierkv.workers.lifeline import end_with_parent
end_with_parent({os.getpid()} + 1)
"""
    with run_python(script) as process:
        assert process.wait(SECONDS) == EXIT_SUPERVISOR_GONE


def assert_ends(pidfd: int) -> None:
    """A pidfd is readable once its process has ended."""
    try:
        assert select.select([pidfd], [], [], SECONDS)[0]
    finally:
        os.close(pidfd)
