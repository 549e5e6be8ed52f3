"""Ctrl-C, SIGTERM and SIGHUP, which end a torture where nothing is half made.

An exception that a signal raises anywhere may leave a client of the node in the middle of being made, with a socket
that is never closed, and the end of the process then waits for that socket for ever. So a signal is noted, and raised
by whoever waits or goes on to the next step. The second one is raised at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLICE_SECONDS = 0.2
"""So long may a wait take that does not look."""

T = TypeVar("T")


class _Asked:
    now = False


@contextmanager
def noted_signals() -> Iterator[None]:
    """Inside, the first of SIGNALS is raised as KeyboardInterrupt by raise_if_interrupted only. In the main thread.
    What is ignored already (nohup) remains so."""
    had_one = False

    def note(*_: object) -> None:
        nonlocal had_one
        if had_one:
            raise KeyboardInterrupt
        had_one = True
        _Asked.now = True

    _Asked.now = False
    before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in taken:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number] or signal.SIG_DFL)
        _Asked.now = False


def raise_if_interrupted() -> None:
    """A safe point. It is raised once: what cleans up after it may wait."""
    if _Asked.now:
        _Asked.now = False
        raise KeyboardInterrupt


def in_slices(wait: Callable[[float], T], seconds: float, gave_up: type[Exception]) -> T:
    """What `wait` returns, which takes a timeout and raises `gave_up` then; with safe points in between."""
    while True:
        raise_if_interrupted()
        now = min(seconds, SLICE_SECONDS)
        seconds -= now
        try:
            return wait(now)
        except gave_up:
            if seconds <= 0:
                raise
