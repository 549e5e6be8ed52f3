"""In which order threads take locks: two that are taken in both orders can stop each other for ever.

    with traced() as order:          # locks that tierkv makes from here on are watched
        ...
    assert order.cycles() == []

A lock is known by where it was made. Only acquisitions that may wait count: a try can't be stuck.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_real_lock = threading.Lock


class LockOrder:
    """`edges`: where a lock was made -> where those were made that were waited for while it was held. `taken`: where
    all were made that were ever held."""

    def __init__(self) -> None:
        self.edges: defaultdict[str, set[str]] = defaultdict(set)
        self.taken: set[str] = set()
        self._guard = _real_lock()
        self._held = threading.local()

    def waits_for(self, lock: TracedLock) -> None:
        for held in self._mine():
            if held is lock:
                raise AssertionError(f"the lock of {lock.origin} is waited for by the thread that holds it")
            if held.origin != lock.origin:  # two sessions, say: told apart by what else is held
                with self._guard:
                    self.edges[held.origin].add(lock.origin)

    def has(self, lock: TracedLock) -> None:
        self.taken.add(lock.origin)
        self._mine().append(lock)

    def left(self, lock: TracedLock) -> None:
        if lock in (mine := self._mine()):  # a lock may be given back by another thread than took it
            mine.remove(lock)

    def cycles(self) -> list[list[str]]:
        """Each as the way from a lock back to itself."""
        found: list[list[str]] = []
        for start in self.edges:
            ways = [[start]]
            seen = set()
            while ways:
                way = ways.pop()
                for after in self.edges.get(way[-1], ()):
                    if after == start:
                        found.append([*way, start])
                    elif after not in seen:
                        seen.add(after)
                        ways.append([*way, after])
        return found

    def _mine(self) -> list[TracedLock]:
        held: list[TracedLock] | None = getattr(self._held, "locks", None)
        if held is None:
            held = self._held.locks = []
        return held


class TracedLock:
    def __init__(self, order: LockOrder, origin: str) -> None:
        self.origin = origin
        self._order = order
        self._lock = _real_lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            self._order.waits_for(self)
        if not self._lock.acquire(blocking, timeout):
            return False
        self._order.has(self)
        return True

    def release(self) -> None:
        self._order.left(self)
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def traced(package: str = "tierkv") -> Iterator[LockOrder]:
    """Locks that modules of `package` make, of `threading.Lock` and of `threading.Condition` without a lock."""
    order = LockOrder()
    real_condition = threading.Condition

    def origin() -> str | None:
        frame = sys._getframe(2)
        module = frame.f_globals.get("__name__", "")
        return f"{module}:{frame.f_lineno}" if module.partition(".")[0] == package else None

    def make_lock() -> Any:
        at = origin()
        return _real_lock() if at is None else TracedLock(order, at)

    def make_condition(lock: Any = None) -> Any:
        at = origin()
        return real_condition(TracedLock(order, at) if lock is None and at is not None else lock)

    threading.Lock, threading.Condition = make_lock, make_condition  # type: ignore[assignment,misc]
    try:
        yield order
    finally:
        threading.Lock, threading.Condition = _real_lock, real_condition  # type: ignore[misc]
