"""Metrics of the front for the endpoint's thread: asked for at each scrape, made in the loop, where counts are."""

from __future__ import annotations

import os
import threading
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

    def fileno(self) -> int:
        return self._fd

    def read(self) -> Snapshot:
        """In the endpoint's thread. A loop that is busy for long gives the snapshot of last time."""
        with self._one_at_a_time:
            self._is_fresh.clear()
            os.eventfd_write(self._fd, 1)
            self._is_fresh.wait(WAIT_SECONDS)
            return self._snapshot

    def serve(self, make: Callable[[], Snapshot]) -> None:
        os.eventfd_read(self._fd)
        self._snapshot = make()
        self._is_fresh.set()

    def close(self) -> None:
        os.close(self._fd)
