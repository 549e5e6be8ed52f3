"""Warnings that a sick disk would repeat a thousand times a second: the first is logged at once, the rest counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

PERIOD_SECONDS = 10.0
MAX_KINDS = 1_000
"""Kinds are few (an operation and an errno); a bound, so that a mistake here can't eat memory."""


class QuietLog:
    """Safe to use from several threads. `tell_counted` is to be called now and then, so that what was counted is told
    when nothing follows."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._period_seconds = period_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[str, float] = {}  # kind -> when a line of it was last written
        self._counted: dict[str, tuple[int, str]] = {}  # kind -> how many since, and the last one's text

    def warning(self, kind: str, text: str) -> None:
        """One line now; or, when there was one of that kind within the period, one more to be counted."""
        now = self._clock()
        with self._lock:
            told = self._told.get(kind)
            if told is not None and now - told < self._period_seconds:
                self._counted[kind] = (self._counted.get(kind, (0, ""))[0] + 1, text)
                return
            if told is None and len(self._told) >= MAX_KINDS:
                self._told.clear()
            self._told[kind] = now
            missed, _ = self._counted.pop(kind, (0, ""))
        self._log.warning("%s%s", text, f" (and {missed} more like it)" if missed else "")

    def tell_counted(self) -> None:
        """One line for each kind whose period is over with something counted in it."""
        now = self._clock()
        with self._lock:
            due = [kind for kind in self._counted if now - self._told.get(kind, 0.0) >= self._period_seconds]
            lines = [(kind, *self._counted.pop(kind)) for kind in due]
            self._told.update((kind, now) for kind in due)
        for kind, count, last in lines:
            self._log.warning(
                "%s: %d more in the last %.0f s; the last one: %s", kind, count, self._period_seconds, last
            )
