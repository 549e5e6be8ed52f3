"""Directories are flushed in groups: what waits while one flush runs shares the next one.

A file is durable when the flushes of its directories have returned. So no report of a write leaves before that, and
a hundred writes into one folder cost one flush of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from tierkv.core.instructions import Report
from tierkv.errors import StorageError
from tierkv.storage.names import Parts
from tierkv.storage.system_calls import Failure
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.roll import Roll

Then = Callable[[Failure | None], Report]
"""Makes the report of an operation whose directories were flushed, or why they could not be."""


class Flusher:
    """One thread that calls `flush` for each directory once a round, and `report` with what became of the round."""

    def __init__(
        self,
        flush: Callable[[Parts], None],
        report: Callable[[Sequence[Report]], None],
        *,
        on_death: OnDeath = end_process,
        roll: Roll | None = None,
    ) -> None:
        self._post = (roll or Roll()).post("flusher")
        self._flush = flush
        self._report = report
        self._waiting: list[tuple[tuple[Parts, ...], Then]] = []
        self._is_busy = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread = start_thread("flusher", self._run, on_death=on_death)

    def add(self, folders: Iterable[Parts], then: Then) -> None:
        """Flush `folders` and report what `then` makes of it, in the order in which operations were added."""
        with self._lock:
            self._waiting.append((tuple(folders), then))
            self._changed.notify_all()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Whether everything added was reported in time."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """End the thread after its round; whether it ended in time."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                group, self._waiting = self._waiting, []
                self._is_busy = True
            self._report(self._flush_group(group))

    def _flush_group(self, group: list[tuple[tuple[Parts, ...], Then]]) -> list[Report]:
        failures: dict[Parts, Failure | None] = {}
        for folders, _ in group:
            for folder in folders:
                if folder not in failures:
                    failures[folder] = self._flush_or_parent(folder)
        return [then(next(filter(None, (failures[folder] for folder in folders)), None)) for folders, then in group]

    def _flush_or_parent(self, folder: Parts) -> Failure | None:
        """A folder that is gone has nothing left to make durable but that it is gone: that is its parent's."""
        try:
            with self._post.at("flush"):
                self._flush(folder)
        except StorageError as error:
            if error.errno_name == "ENOENT" and folder:
                return self._flush_or_parent(folder[:-1])
            return Failure.of(error)
        return None
