"""Metrics of the front for the endpoint's thread: asked for at each scrape, made in the loop, where counts are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from tierkv.metrics import Snapshot

WAIT_SECONDS = 2.0


class Scrape:
    """`fileno` becomes readable when a snapshot is wanted; the loop then calls `serve`."""

    def __init__(self, first: Snapshot) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._snapshot = first
        self._is_fresh = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._asked: float | None = None  # when, as long as there is no answer

    def fileno(self) -> int:
        return self._fd

    def read(self) -> Snapshot:
        """In the endpoint's thread. A loop that is busy for long gives the snapshot of last time."""
        with self._one_at_a_time:
            self._is_fresh.clear()
            self._asked = self._asked or time.monotonic()
            os.eventfd_write(self._fd, 1)
            self._is_fresh.wait(WAIT_SECONDS)
            return self._snapshot

    def silence(self) -> float:
        """Seconds for which the loop has not answered; 0 when it did the last time."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked

    def serve(self, make: Callable[[], Snapshot]) -> None:
        os.eventfd_read(self._fd)
        self._snapshot = make()
        self._asked = None
        self._is_fresh.set()

    def close(self) -> None:
        os.close(self._fd)
