"""Copies of the CPU device that complete when somebody says so, in any order: what a GPU may do at any time.

Nothing of a copy has happened before it is completed, and it reads its source at that moment. So who looks before it is
done sees what was there before, and who gives the source away too early has the wrong bytes copied.
"""

from __future__ import annotations

import threading
import time

from tierkv.device.cpu import Job
from tierkv.errors import DeviceError


class LateCopy:
    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._over = threading.Event()
        self._failure: DeviceError | None = None
        self.seconds = 0.0

    @property
    def is_done(self) -> bool:
        if self._failure is not None:
            raise self._failure
        return self._over.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        self._over.wait(timeout_seconds)
        return self.is_done

    def complete(self) -> None:
        begin = time.perf_counter()
        job, self._job = self._job, None  # it holds the memory
        assert job is not None
        job()
        del job
        self.seconds = time.perf_counter() - begin
        self._over.set()

    def fail(self, failure: DeviceError) -> None:
        self._job = None
        self._failure = failure
        self._over.set()


class LateCopies:
    """A Carry. `held` are the copies that were asked for and not completed, the oldest first."""

    def __init__(self) -> None:
        self.held: list[LateCopy] = []
        self._change = threading.Condition()

    def __call__(self, job: Job) -> LateCopy:
        copy = LateCopy(job)
        with self._change:
            self.held.append(copy)
            self._change.notify_all()
        return copy

    def wait_held(self, count: int, timeout_seconds: float) -> bool:
        """Whether so many came to be held in time."""
        with self._change:
            return self._change.wait_for(lambda: len(self.held) >= count, timeout_seconds)

    def complete(self, index: int = 0) -> None:
        self._take(index).complete()

    def complete_all(self) -> None:
        """The last one first."""
        while self.held:
            self.complete(-1)

    def fail(self, failure: DeviceError, index: int = 0) -> None:
        """That one never happens."""
        self._take(index).fail(failure)

    def _take(self, index: int) -> LateCopy:
        with self._change:
            return self.held.pop(index)
