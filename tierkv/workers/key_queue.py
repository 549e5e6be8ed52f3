"""Operations on one key run in their order, one at a time; those on different keys run side by side.

`KeyOrder` decides what may run next, without threads or locks. `KeyQueue` runs it on a fixed number of threads.

Among operations that could run, the more urgent class goes first, with two exceptions: every sixteenth choice goes to
the least urgent class that waits, so that none starves; and writes and scrubbing never take the last thread, so that a
read finds one even while all the others sit in a flush.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.roll import Post, Roll

FAIR_TURN = 16


class Urgency(IntEnum):
    """The lower, the sooner."""

    READ = 0
    REMOVE = 1
    WRITE = 2
    SCRUB = 3

    @property
    def yields(self) -> bool:
        """Whether it leaves the last thread to others."""
        return self >= Urgency.WRITE


@dataclass(slots=True, eq=False)
class Operation:
    """`run` is called once, by one thread. It answers for its own failures and does not raise."""

    key: Hashable
    urgency: Urgency
    run: Callable[[], None] = field(repr=False)


class KeyOrder:
    """Which operation may run next. `take` an operation, run it, tell `finish`."""

    def __init__(self, num_threads: int) -> None:
        self._by_key: dict[Hashable, deque[Operation]] = {}  # of each key, the first is ready or runs
        self._ready: dict[Urgency, deque[Operation]] = {urgency: deque() for urgency in Urgency}
        self._max_yielding = max(1, num_threads - 1)
        self._num_yielding = 0
        self._num_running = 0
        self._turn = 0
        self.num_waiting = 0

    @property
    def is_idle(self) -> bool:
        return not self._by_key

    def add(self, operation: Operation) -> None:
        self.num_waiting += 1
        of_key = self._by_key.setdefault(operation.key, deque())
        of_key.append(operation)
        if len(of_key) == 1:
            self._ready[operation.urgency].append(operation)

    def take(self) -> Operation | None:
        """An operation to run now; None while there is none that may."""
        eligible = [urgency for urgency in Urgency if self._ready[urgency] and self._may_run(urgency)]
        if not eligible:
            return None
        self._turn += 1
        urgency = eligible[-1] if self._turn % FAIR_TURN == 0 else eligible[0]
        self._num_running += 1
        self._num_yielding += urgency.yields
        self.num_waiting -= 1
        return self._ready[urgency].popleft()

    def finish(self, operation: Operation) -> None:
        self._num_running -= 1
        self._num_yielding -= operation.urgency.yields
        of_key = self._by_key[operation.key]
        of_key.popleft()
        if of_key:
            self._ready[of_key[0].urgency].append(of_key[0])
        else:
            del self._by_key[operation.key]

    def _may_run(self, urgency: Urgency) -> bool:
        return not urgency.yields or self._num_yielding < self._max_yielding


class KeyQueue:
    """Threads that work off a KeyOrder. Closing it lets the running operations end and drops the waiting ones."""

    def __init__(
        self,
        *,
        num_threads: int,
        max_waiting: int = 4_096,
        on_death: OnDeath = end_process,
        roll: Roll | None = None,
    ) -> None:
        """`roll` is where each thread says what it is at; one of its own where nobody reads it."""
        self._roll = roll or Roll()
        self._order = KeyOrder(num_threads)
        self._max_waiting = max_waiting
        self._is_closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._threads = [
            start_thread(f"io-{number}", partial(self._work_off, self._roll.post(f"io-{number}")), on_death=on_death)
            for number in range(num_threads)
        ]

    def submit(self, operation: Operation, *, timeout_seconds: float) -> bool:
        """Take an operation on, waiting for room; False when there was none in time, and it will not be run."""
        with self._lock:
            if not self._progress.wait_for(self._has_room, timeout_seconds) or self._is_closed:
                return False
            self._order.add(operation)
            self._work.notify()
            return True

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Whether everything taken on was done in time."""
        with self._lock:
            return self._progress.wait_for(lambda: self._order.is_idle, timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """End the threads; whether all of them ended in time (one may sit in a system call of a sick disk)."""
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._is_closed = True
            self._work.notify_all()
            self._progress.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _has_room(self) -> bool:
        return self._order.num_waiting < self._max_waiting or self._is_closed

    def _work_off(self, post: Post) -> None:
        while True:
            with self._lock:
                operation = self._order.take()
                while operation is None and not self._is_closed:
                    self._work.wait()
                    operation = self._order.take()
                if operation is None or self._is_closed:
                    return
                self._progress.notify_all()  # there is room for another one now
            with post.at(operation.urgency.name.lower()):
                operation.run()
            with self._lock:
                self._order.finish(operation)
                self._work.notify_all()  # the next of this key, and what had to yield
                self._progress.notify_all()
