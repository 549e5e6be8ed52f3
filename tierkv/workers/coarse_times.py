"""Which files are due to have their mtime set: at most every ten minutes a file, of a bounded number of files.

mtime is what remains of the last use when the index is lost, so it may be coarse. A file that fell out of this memory
is only set once more than it had to be.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from tierkv.storage.names import ExtentName

INTERVAL_SECONDS = 600.0
MAX_FILES = 100_000


class CoarseTimes:
    def __init__(self, *, interval_seconds: float = INTERVAL_SECONDS, max_files: int = MAX_FILES) -> None:
        self._interval_seconds = interval_seconds
        self._max_files = max_files
        self._set: OrderedDict[ExtentName, float] = OrderedDict()
        self._lock = threading.Lock()

    def is_due(self, name: ExtentName, now: float) -> bool:
        """`now` on a clock that does not jump."""
        with self._lock:
            last = self._set.get(name)
            return last is None or now - last >= self._interval_seconds

    def was_set(self, name: ExtentName, now: float) -> None:
        """Also for a file that was just written, or is gone."""
        with self._lock:
            self._set[name] = now
            self._set.move_to_end(name)
            if len(self._set) > self._max_files:
                self._set.popitem(last=False)
