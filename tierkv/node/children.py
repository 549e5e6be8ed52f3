"""Child processes of the supervisor: started so that they end with it, and told dead only by waitpid.

A child is in a process group of its own, so that Ctrl-C in a terminal reaches the supervisor alone, which ends its
children in order. A child ends by itself when the supervisor does: by the parent-death signal (`die_with_parent`), and
at the end of file on the pipe that only the supervisor holds the other end of.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1

FIRST_DELAY_SECONDS = 0.1
LAST_DELAY_SECONDS = 5.0
STEADY_SECONDS = 30.0


class Child:
    """A running `python -m module`. `pidfd` becomes readable at its end; then `reap` says how it ended."""

    def __init__(self, module: str, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=tuple(descriptors),
            start_new_session=True,
        )
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """SIGKILL. Its end is still to be waited for."""
        self.process.kill()

    def reap(self) -> str | None:
        """How it ended, in words, and its descriptor closed; None while it runs."""
        status = self.process.poll()
        if status is None:
            return None
        os.close(self.pidfd)
        return describe_exit(status)

    @property
    def was_killed(self) -> bool:
        return self.process.returncode == -signal.SIGKILL


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class Backoff:
    """When to start again what has died: at once, then after 0.1 s, twice that each time up to 5 s. What ran for half a
    minute starts afresh."""

    def __init__(self) -> None:
        self.restarts = 0
        self._in_a_row = 0
        self._started = 0.0

    @property
    def in_a_row(self) -> int:
        """Deaths since it last ran for a while."""
        return self._in_a_row

    def started(self, now: float) -> None:
        self._started = now

    def died(self, now: float) -> float:
        """The time to start it again."""
        if now - self._started >= STEADY_SECONDS:
            self._in_a_row = 0
        self._in_a_row += 1
        self.restarts += 1
        if self._in_a_row == 1:
            return now
        return now + min(LAST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(self._in_a_row - 2, 16))


def die_with_parent(parent_pid: int) -> None:
    """Called first thing in a child: be killed when the thread that started us ends, which is the supervisor's only
    one. Signals that a terminal or service manager sends to all are ignored: the supervisor says when to stop."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we could ask
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
