"""Scrubbing: every file verified, one at a time, behind everything else that the queue has to do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tierkv.core.instructions import Report, Scrub, ScrubProgress
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.index_row import Namespace
from tierkv.storage.names import ExtentName
from tierkv.storage.walk import Strays, find_groups, find_namespaces, find_shelves, key_of, list_extents
from tierkv.workers.key_queue import KeyQueue, Operation, Urgency
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.operations import Checked, Operations

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.5
WAIT_SECONDS = 1.0


class _Ended(Exception):
    """The scrub was ended in the middle of a file."""


@dataclass(slots=True)
class _Progress:
    """Where one scrub is; `damaged` and `set_aside` are what was not yet told."""

    op: int
    total: int = 0
    checked: int = 0
    checked_bytes: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    set_aside: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    told: float = 0.0


@dataclass(frozen=True, slots=True)
class _Run:
    op: int
    ended: threading.Event
    thread: threading.Thread


class Scrubber:
    """Runs the scrub that it was told about last. One thread tells it."""

    def __init__(
        self,
        directory: DataDirectory,
        operations: Operations,
        queue: KeyQueue,
        report: Callable[[Sequence[Report]], None],
        *,
        on_death: OnDeath = end_process,
    ) -> None:
        self._directory = directory
        self._operations = operations
        self._queue = queue
        self._report = report
        self._on_death = on_death
        self._run: _Run | None = None

    def start(self, scrub: Scrub) -> None:
        """Begin a scrub, ending another one. The one that is running already goes on."""
        if self._run is not None and self._run.op == scrub.op and self._run.thread.is_alive():
            return
        self.end()
        ended = threading.Event()
        thread = start_thread("scrub", partial(self._scrub, scrub, ended), on_death=self._on_death)
        self._run = _Run(scrub.op, ended, thread)

    def cancel(self, op: int) -> None:
        if self._run is not None and self._run.op == op:
            self.end()

    def end(self, timeout_seconds: float = WAIT_SECONDS) -> None:
        """End what runs; its last report is on its way when this returns, or follows what it is waiting for."""
        if self._run is not None:
            self._run.ended.set()
            self._run.thread.join(timeout_seconds)
            self._run = None

    # ---------------------------------------------------------------- the thread

    def _scrub(self, scrub: Scrub, ended: threading.Event) -> None:
        progress = _Progress(scrub.op, total=sum(1 for _ in self._find_extents(ended)))
        self._tell(progress, finished=False)
        for name in self._find_extents(ended):
            self._check(name, scrub, ended, progress)
            if time.monotonic() - progress.told >= PROGRESS_SECONDS:
                self._tell(progress, finished=False)
        if not self._directory.is_present():  # nothing found there says nothing about what was stored
            progress.damaged.append((".", str(Reason.DATA_DIR_GONE)))
        self._tell(progress, finished=True)

    def _find_extents(self, ended: threading.Event) -> Iterator[ExtentName]:
        strays = Strays()
        for folder in find_groups(self._directory, strays):
            for namespace in find_namespaces(self._directory, folder, strays):
                for shelf in find_shelves(self._directory, namespace, strays):
                    for name in self._list(namespace, shelf, strays):
                        if ended.is_set():
                            return
                        yield name

    def _list(self, namespace: Namespace, shelf: str, strays: Strays) -> list[ExtentName]:
        parts = (*namespace.parts, shelf)
        try:
            with self._directory.folder(parts) as folder_fd:
                return [namespace.extent(key_of(entry)) for entry in list_extents(folder_fd, shelf, strays)]
        except StorageError as error:
            strays.note(error, parts)
            return []

    def _check(self, name: ExtentName, scrub: Scrub, ended: threading.Event, progress: _Progress) -> None:
        """Have one file verified by the queue, and count it. Not counted where the scrub ended meanwhile."""
        done = threading.Event()

        def pause(num_bytes: int) -> None:
            progress.checked_bytes += num_bytes
            if ended.is_set():
                raise _Ended

        def run() -> None:
            try:
                pause(0)  # it may have ended while this waited
                _count(progress, name, self._operations.check(name, repair=scrub.repair, pause=pause))
            except _Ended:
                pass
            except Exception:  # a bug met by one file must not keep the others from being verified
                log.exception("verifying %s failed", name)
            finally:
                done.set()

        operation = Operation(name, Urgency.SCRUB, run)
        while not ended.is_set() and not self._queue.submit(operation, timeout_seconds=WAIT_SECONDS):
            pass
        while not done.wait(WAIT_SECONDS) and not ended.is_set():
            pass

    def _tell(self, progress: _Progress, *, finished: bool) -> None:
        report = ScrubProgress(
            op=progress.op,
            checked=progress.checked,
            total=max(progress.total, progress.checked),
            checked_bytes=progress.checked_bytes,
            damaged=list(progress.damaged),
            set_aside=list(progress.set_aside),
            finished=finished,
        )
        progress.damaged.clear()
        progress.set_aside.clear()
        progress.told = time.monotonic()
        self._report([report])


def _count(progress: _Progress, name: ExtentName, checked: Checked) -> None:
    progress.checked += 1
    if checked.verified.is_worth_telling:
        progress.damaged.append((str(name), str(checked.verified.reason)))
    if checked.was_set_aside:
        progress.set_aside.append((name.group, name.rank, name.key))
