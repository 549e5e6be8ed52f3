"""The only writer of the index: takes changes from any thread and commits them in groups.

The index may lag behind the files, and may lose changes; rows carry the stamp of their file, so that costs headers to
be read at the next start and nothing else. So nobody waits for it, and when it can't keep up, changes are left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tierkv.storage.catalog import Catalog, Change, IndexFailed
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.roll import Roll

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.05
CHANGES_OF_A_COMMIT = 2_000
MAX_WAITING = 100_000


class IndexWriter:
    def __init__(
        self,
        catalog: Catalog,
        *,
        failed: Callable[[str], None] = lambda problem: None,
        worked: Callable[[], None] = lambda: None,
        committed: Callable[[], None] = lambda: None,
        gather_seconds: float = GATHER_SECONDS,
        on_death: OnDeath = end_process,
        roll: Roll | None = None,
    ) -> None:
        """`failed` is told about each commit that did not happen, `worked` about the first that did after one, and
        `committed` about each that did: the index may have grown."""
        self._post = (roll or Roll()).post("index-writer")
        self._catalog = catalog
        self._failed = failed
        self._worked = worked
        self._committed = committed
        self._gather_seconds = gather_seconds
        self._waiting: list[Change] = []
        self._is_busy = False
        self._is_hurried = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread = start_thread("index-writer", self._run, on_death=on_death)
        self._was_failing = False

    def add(self, *changes: Change) -> None:
        """Changes are made in the order in which they were added."""
        with self._lock:
            if len(self._waiting) < MAX_WAITING:
                self._waiting += changes
                self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Whether everything added was committed, or failed, in time. Does not gather any longer."""
        with self._lock:
            self._is_hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._waiting and not self._is_busy, timeout_seconds)
            self._is_hurried = False
            return done

    def close(self, timeout_seconds: float) -> bool:
        """Commit what waits, and end; whether that was done in time. The catalog stays open."""
        deadline = time.monotonic() + timeout_seconds
        done = self.drain(timeout_seconds)
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return done and not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                self._changed.wait_for(self._has_gathered, self._gather_seconds)
                changes, self._waiting = self._waiting, []
                self._is_busy = True
            with self._post.at("index commit"):
                self._commit(changes)

    def _has_gathered(self) -> bool:
        return len(self._waiting) >= CHANGES_OF_A_COMMIT or self._is_hurried or self._is_closed

    def _commit(self, changes: list[Change]) -> None:
        answer = self._catalog.apply(changes)
        failing = isinstance(answer, IndexFailed)
        if isinstance(answer, IndexFailed):
            self._failed(answer.problem)
            if not self._was_failing:
                log.warning("%d rows were not written to the index: %s", len(changes), answer.problem)
        else:
            self._committed()
        if self._was_failing and not failing:
            self._worked()
            log.info("the index is written again")
        self._was_failing = failing
