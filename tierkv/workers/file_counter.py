"""Counting the files of a directory that nobody keeps books of, group by group, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from tierkv.core.instructions import CountFiles, FilesCounted, GroupCount, Report
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.index_row import Namespace
from tierkv.storage.system_calls import call
from tierkv.storage.walk import GroupFolder, Strays, find_groups, find_namespaces, find_shelves, list_extents
from tierkv.workers.lifeline import OnDeath, end_process, start_thread

PROGRESS_SECONDS = 0.2


class FileCounter:
    """One count after the other. `close` it."""

    def __init__(
        self,
        directory: DataDirectory,
        report: Callable[[Sequence[Report]], None],
        *,
        on_death: OnDeath = end_process,
    ) -> None:
        self._directory = directory
        self._report = report
        self._on_death = on_death
        self._one_at_a_time = threading.Lock()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._number = 0

    def count(self, order: CountFiles) -> None:
        """Reported as FilesCounted, with nothing in it that was booked."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._number += 1
        work = partial(self._count, order.op)
        self._threads.append(start_thread(f"audit-{self._number}", work, on_death=self._on_death))

    def close(self, timeout_seconds: float) -> bool:
        """A count that is going on ends at its next folder, without a report."""
        self._is_closed = True
        for thread in self._threads:
            thread.join(timeout_seconds)
        return not any(thread.is_alive() for thread in self._threads)

    # ---------------------------------------------------------------- the thread

    def _count(self, op: int) -> None:
        with self._one_at_a_time:
            strays, told = Strays(), time.monotonic()
            folders = list(find_groups(self._directory, strays))
            groups: list[GroupCount] = []
            for folder in folders:
                groups.append(self._count_group(folder, strays))
                if self._is_closed:
                    return
                if time.monotonic() - told >= PROGRESS_SECONDS:
                    told = time.monotonic()
                    self._report([FilesCounted(op, len(groups), len(folders), finished=False)])
            problem = "; ".join(strays.problems)
            self._report([FilesCounted(op, len(groups), len(folders), finished=True, groups=groups, problem=problem)])

    def _count_group(self, folder: GroupFolder, strays: Strays) -> GroupCount:
        files = num_bytes = 0
        for namespace in find_namespaces(self._directory, folder, strays):
            for shelf in find_shelves(self._directory, namespace, strays):
                if self._is_closed:
                    break
                sizes = self._sizes(namespace, shelf, strays)
                files += len(sizes)
                num_bytes += sum(sizes)
        return GroupCount(folder.group, files, num_bytes, 0)

    def _sizes(self, namespace: Namespace, shelf: str, strays: Strays) -> list[int]:
        parts = (*namespace.parts, shelf)
        sizes: list[int] = []
        try:
            with self._directory.folder(parts) as folder_fd:
                for entry in list_extents(folder_fd, shelf, strays):
                    try:
                        sizes.append(call("stat", entry.stat, follow_symlinks=False).st_size)
                    except StorageError as error:
                        strays.note(error, (*parts, entry.name))
        except StorageError as error:
            strays.note(error, parts)
        return sizes
