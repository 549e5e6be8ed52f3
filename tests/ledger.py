"""The ledger of a test run: what a process holds, so that a test can be shown to leave nothing behind.

Threads, child processes (zombies included), open descriptors, and sockets in the runtime directory. What is still
winding down when a test returns gets a few seconds to end; what is only held by a reference cycle is collected first.

Cores that a test has made have books of their own (`Cores`): when all engines have ended, nothing is held any more.
"""

from __future__ import annotations

import gc
import multiprocessing.resource_tracker
import os
import threading
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tierkv.core.state import CacheState

SETTLE_SECONDS = 10.0

MOST_EXTENTS = 2_000
"""Of a core whose books are closed after the test: looking at everything takes long where there is much."""

THREADS_OF_OTHERS = ("TMonitor",)
"""Classes of threads that libraries start once and keep: tqdm's watcher of progress bars."""


@dataclass(frozen=True)
class Holdings:
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    descriptors: Counter[str]
    sockets: frozenset[Path]

    @classmethod
    def now(cls, runtime_dir: Path) -> Holdings:
        return cls(_threads(), _children(), _descriptors(), frozenset(_sockets(runtime_dir)))

    def more_than(self, before: Holdings) -> list[str]:
        """What is held beyond `before`, in words."""
        return [
            *(f"thread {thread.name}" for thread in self.threads - before.threads),
            *(f"child process {_describe(pid)}" for pid in self.children - before.children),
            *(f"open descriptor of {target}" for target in (self.descriptors - before.descriptors)),
            *(f"socket {path}" for path in self.sockets - before.sockets),
        ]


def left_over(before: Holdings, runtime_dir: Path) -> list[str]:
    """What a test has left, once what was ending has ended."""
    deadline = time.monotonic() + SETTLE_SECONDS
    more = Holdings.now(runtime_dir).more_than(before)
    while more and time.monotonic() < deadline:
        gc.collect()
        more = Holdings.now(runtime_dir).more_than(before)
        if more:
            time.sleep(0.02)  # between two looks at a condition that has a deadline
    return more


def _threads() -> frozenset[threading.Thread]:
    return frozenset(
        thread
        for thread in threading.enumerate()
        if thread.is_alive() and type(thread).__name__ not in THREADS_OF_OTHERS
    )


def _children() -> frozenset[int]:
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)  # lives as long as we do
    return frozenset(_all_children() - {tracker})


def _all_children() -> set[int]:
    """Children of every thread, from /proc; a kernel without that file makes it the slow way."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            found |= {int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            if os.path.exists(f"/proc/self/task/{task}"):
                return {child.pid for child in psutil.Process().children()}
            continue  # the thread ended between the listing and the reading
    return found


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"{pid} (ended, but nobody waited for it)"
        return f"{pid} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error:  # it has just ended
        return str(pid)


def _descriptors() -> Counter[str]:
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None)
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        if int(name) == tracker:
            continue
        try:
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return found


def _sockets(runtime_dir: Path) -> list[Path]:
    return [path for path in runtime_dir.rglob("*") if path.is_socket()]


class Cores:
    """The last few cores that were made, as long as somebody has them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._made: deque[weakref.ref[CacheState]] = deque(maxlen=8)
        real = CacheState.__init__

        def init(state: CacheState, *args: Any, **kwargs: Any) -> None:
            real(state, *args, **kwargs)
            self._made.append(weakref.ref(state))

        patch.setattr(CacheState, "__init__", init)

    def unbalanced(self) -> list[str]:
        """In words, what a core holds for nobody. Ends every session first: what their processes held must go."""
        states = [state for made in self._made if (state := made()) is not None and state.num_extents <= MOST_EXTENTS]
        self._made.clear()
        return [words for state in states for words in _close_books(state)]


def _close_books(state: CacheState) -> list[str]:
    state.check()
    ledger = state._ledger
    for session in list(ledger.sessions):
        state.end_session(session, now=0.0)
    state.check()
    found = {"leases": state.num_leases, "tickets": state.num_tickets, "keys being written": len(ledger.writing)}
    for extent in ledger.tree:
        found[f"holds of {extent!r}"] = sum(isinstance(who, bytes) for who in extent.holds)
    return [f"{count} {what}" for what, count in found.items() if count]
