"""Child processes of the supervisor: started so that they end with it, and told dead only by waitpid.

A child is in a process group of its own, so that Ctrl-C in a terminal reaches the supervisor alone, which ends its
children in order. A child ends by itself when the supervisor does: by the parent-death signal (which follows the thread
that starts it, so the supervisor starts all from its main thread), and at the end of file on its socket or pipe.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

FIRST_DELAY_SECONDS = 0.1
LAST_DELAY_SECONDS = 5.0
STEADY_SECONDS = 30.0
KILL_SECONDS = 5.0

log = logging.getLogger(__name__)


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
        self.wait()
        return describe_exit(status)

    def wait(self) -> None:
        """Of a child that was killed: until it is gone, or shows that it can't be killed."""
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            log.error("process %d can't be killed: its disk does not answer", self.pid)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def was_killed(self) -> bool:
        return self.process.returncode == -signal.SIGKILL

    @property
    def succeeded(self) -> bool:
        return self.process.returncode == 0


def describe_exit(status: int) -> str:
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class Backoff:
    """When to start again what has died: at once, then after 0.1 s, twice that each time up to `last_delay_seconds`.
    What ran for half a minute starts afresh."""

    def __init__(self, last_delay_seconds: float = LAST_DELAY_SECONDS) -> None:
        self.restarts = 0
        self._last_delay_seconds = last_delay_seconds
        self._in_a_row = 0
        self._started = 0.0

    @property
    def in_a_row(self) -> int:
        """Deaths since it last ran for a while."""
        return self._in_a_row

    def started(self, now: float) -> None:
        self._started = now

    def died(self, now: float, *, had_begun: bool = True) -> float:
        """The time to start it again. One that never had begun was no start, and so the next one is no restart."""
        if now - self._started >= STEADY_SECONDS:
            self._in_a_row = 0
        self._in_a_row += 1
        self.restarts += had_begun
        if self._in_a_row == 1:
            return now
        return now + min(self._last_delay_seconds, FIRST_DELAY_SECONDS * 2.0 ** min(self._in_a_row - 2, 16))


class IndexSuspicion:
    """A damaged index can take down every process that opens it. So when a storage worker dies before it has recovered,
    the next one sets the index aside; but not for a first SIGKILL, which may as well have been for want of memory."""

    def __init__(self) -> None:
        self._kills = 0
        self.is_strong = False

    def worker_died(self, *, was_killed: bool) -> None:
        """Before it had recovered."""
        self._kills += was_killed
        self.is_strong = self.is_strong or not was_killed or self._kills > 1

    def cleared(self) -> None:
        """A worker has recovered."""
        self._kills = 0
        self.is_strong = False
