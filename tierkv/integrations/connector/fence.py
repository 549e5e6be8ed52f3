"""The fence: a fault of the cache is a miss. Whatever is raised inside, the engine goes on without."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_SECONDS = 60.0


class Fence:
    """Counts what it caught, by what was being done. Each kind is logged with its story the first time, and then at
    most once in QUIET_SECONDS: an engine's log is not ours to flood."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.faults: dict[str, int] = {}
        self._clock = clock
        self._quiet_until: dict[str, float] = {}
        self._lock = threading.Lock()

    def run(
        self, what: str, action: Callable[[], T], otherwise: T, *, tell: Callable[[Exception], object] | None = None
    ) -> T:
        """What `action` returns, or `otherwise` if it raised; `tell` is then told of it."""
        try:
            return action()
        except Exception as fault:  # noqa: BLE001 - whatever was raised here, the engine can answer without the cache
            self.caught(what, fault)
            if tell is not None:
                tell(fault)
            return otherwise

    def caught(self, what: str, fault: BaseException) -> None:
        """Count and log a fault that was caught elsewhere."""
        now = self._clock()
        with self._lock:
            self.faults[what] = count = self.faults.get(what, 0) + 1
            if now < self._quiet_until.get(what, float("-inf")):
                return
            self._quiet_until[what] = now + QUIET_SECONDS
        log.warning(
            "%s failed (%d times so far), the engine goes on without the cache: %s: %s\n%s",
            what,
            count,
            type(fault).__name__,
            str(fault),
            # As text: a handler that keeps the fault itself keeps the frames of a copy, and with them a whole arena.
            "".join(traceback.format_exception(fault)),
        )
