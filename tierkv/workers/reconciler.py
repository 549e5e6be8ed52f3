"""Files that somebody else removed, noticed before anybody asks for them: what is counted as used must be there.

Once in a while the rows of the index are held against the folders, one folder at a time, behind everything else that
the queue has to do. A row whose file is not there is looked at once more, in its extent's turn, and then told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from tierkv.errors import StorageError
from tierkv.storage.catalog import Catalog, IndexFailed
from tierkv.storage.directory import DataDirectory
from tierkv.storage.index_row import NAMESPACE_BYTES, Namespace
from tierkv.storage.names import ExtentName
from tierkv.storage.walk import Strays, key_of, list_extents
from tierkv.workers.key_queue import KeyQueue, Operation, Urgency
from tierkv.workers.operations import Operations

log = logging.getLogger(__name__)

_KEY = "reconciler"
_SHELVES = 256

Folder = tuple[Namespace, int]


class Reconciler:
    """`poke` it now and then, from one thread; a round begins when one is due, and goes on in the queue's threads."""

    def __init__(
        self,
        directory: DataDirectory,
        catalog: Catalog,
        operations: Operations,
        queue: KeyQueue,
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._operations = operations
        self._queue = queue
        self._seconds = seconds
        self._clock = clock
        self._due = clock() + seconds
        self._is_running = False

    def poke(self) -> None:
        if self._is_running or self._directory.read_only or self._clock() < self._due:
            return
        self._due = self._clock() + self._seconds
        self._is_running = True
        self._go_on(self._folders())

    def _folders(self) -> Iterator[Folder]:
        found = self._catalog.namespaces()
        for namespace in [] if isinstance(found, IndexFailed) else found:
            for number in range(_SHELVES):
                yield namespace, number

    def _go_on(self, folders: Iterator[Folder]) -> None:
        """The next folder, when the queue comes to it. Without room there the round ends: the next one begins anew."""
        operation = Operation(_KEY, Urgency.SCRUB, partial(self._step, folders))
        if not self._queue.submit(operation, timeout_seconds=0.0):
            self._is_running = False

    def _step(self, folders: Iterator[Folder]) -> None:
        try:
            folder = next(folders, None)
            if folder is not None:
                for name in self._missing(*folder):
                    look = partial(self._operations.look_for, name)
                    self._queue.submit(Operation(name, Urgency.SCRUB, look), timeout_seconds=0.0)
        except Exception:  # a bug met by one folder must not end the queue's thread, and all others' operations with it
            log.exception("the index could not be held against the folders")
            folder = None
        if folder is None:
            self._is_running = False
        else:
            self._go_on(folders)

    def _missing(self, namespace: Namespace, number: int) -> list[ExtentName]:
        """What the index has of a folder and the folder has not. Nothing where that can't be said."""
        rows = self._catalog.read(namespace.pack() + bytes([number]))
        if isinstance(rows, IndexFailed) or not rows:
            return []
        shelf = f"{number:02x}"
        try:
            with self._directory.folder((*namespace.parts, shelf)) as folder_fd:
                there = {key_of(entry) for entry in list_extents(folder_fd, shelf, Strays())}
        except StorageError as error:
            if error.errno_name != "ENOENT":
                return []
            there = set()
        keys = (name[NAMESPACE_BYTES:] for name in rows)
        return [namespace.extent(key) for key in keys if key not in there]
