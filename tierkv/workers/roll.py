"""What each thread of a worker is at, and for how long: how a sick disk is told from a sick process.

A thread that does something on files says so at its post, and says when that is over. A call that a sick disk does not
answer shows as a post that has been at one thing for long, while the process and its other threads go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Busy:
    """`thread` has been at `doing` for `seconds`."""

    thread: str
    doing: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.doing} of thread {self.thread} has been running for {self.seconds:.0f} s"


class Post:
    """One thread's. Written by it alone, read by others."""

    __slots__ = ("_clock", "_doing", "thread")

    def __init__(self, thread: str, clock: Callable[[], float]) -> None:
        self.thread = thread
        self._clock = clock
        self._doing: tuple[str, float] | None = None  # replaced as a whole, so that a reader sees both or none

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        self._doing = (doing, self._clock())
        try:
            yield
        finally:
            self._doing = None

    def goes_on(self) -> None:
        """What it is at is getting on, however long it takes."""
        if self._doing is not None:
            self._doing = (self._doing[0], self._clock())

    def busy(self) -> Busy | None:
        found = self._doing
        return None if found is None else Busy(self.thread, found[0], max(0.0, self._clock() - found[1]))


class Roll:
    """The posts of a process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._posts: dict[str, Post] = {}
        self._lock = threading.Lock()

    def post(self, thread: str) -> Post:
        """The post of a thread: made, or a former one of that name taken over."""
        with self._lock:
            made = self._posts[thread] = Post(thread, self._clock)
            return made

    def busy_for(self, seconds: float) -> list[Busy]:
        """What has been at one thing for longer than that, the longest first."""
        with self._lock:
            posts = list(self._posts.values())
        found = (busy for post in posts if (busy := post.busy()) is not None and busy.seconds > seconds)
        return sorted(found, key=lambda busy: -busy.seconds)
