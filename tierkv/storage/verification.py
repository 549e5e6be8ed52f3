"""Every file of a directory read and compared with its header and checksums, by whoever has the directory to itself, or
shares it: a data directory whose lock is held, or a disk directory, beside the nodes that use it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import verify_file
from tierkv.storage.index_row import Namespace
from tierkv.storage.names import ExtentName
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.walk import Strays, find_groups, find_namespaces, find_shelves, key_of, list_extents

PROGRESS_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Damage:
    """`path` below the directory."""

    path: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Progress:
    """Sums since the beginning, and the damage that was found since the last progress."""

    checked_files: int
    total_files: int
    checked_bytes: int
    damaged_files: int
    set_aside_files: int
    damaged: tuple[Damage, ...]
    finished: bool


def verify_directory(
    directory: DataDirectory,
    quarantine: Quarantine | None = None,
    *,
    now: Callable[[], float] = time.time,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Progress every fifth of a second, and at the end. With `quarantine` damaged files are moved there; one that can't
    be moved stays, listed as damaged. A file that goes away meanwhile is fine, and one of another node's that comes is
    not looked at. Rows of files that are moved stay in the index, and the next start drops them."""
    return _Verification(directory, quarantine, now, clock).run()


class _Verification:
    def __init__(
        self,
        directory: DataDirectory,
        quarantine: Quarantine | None,
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._quarantine = quarantine
        self._now = now
        self._clock = clock
        self._checked = self._total = self._checked_bytes = self._damaged = self._set_aside = 0
        self._untold: list[Damage] = []

    def run(self) -> Iterator[Progress]:
        names = list(_extents(self._directory))
        self._total = len(names)
        told = self._clock()
        for name in names:
            self._check(name)
            if self._clock() - told >= PROGRESS_SECONDS:
                yield self._progress(finished=False)
                told = self._clock()
        yield self._progress(finished=True)

    def _check(self, name: ExtentName) -> None:
        found = verify_file(self._directory, name, pause=self._count_bytes)
        self._checked += 1
        if not found.is_worth_telling:
            return
        self._damaged += 1
        self._untold.append(Damage(str(name), found.reason or Reason.CHECKSUM))
        if found.damaged and self._move(name, found.reason or Reason.CHECKSUM):
            self._set_aside += 1

    def _count_bytes(self, num_bytes: int) -> None:
        self._checked_bytes += num_bytes

    def _move(self, name: ExtentName, reason: Reason) -> bool:
        if self._quarantine is None:
            return False
        try:
            return self._quarantine.set_aside(name, reason, self._now())
        except StorageError:
            return False

    def _progress(self, *, finished: bool) -> Progress:
        told, self._untold = self._untold, []
        return Progress(
            checked_files=self._checked,
            total_files=self._total,
            checked_bytes=self._checked_bytes,
            damaged_files=self._damaged,
            set_aside_files=self._set_aside,
            damaged=tuple(told),
            finished=finished,
        )


def _extents(directory: DataDirectory) -> Iterator[ExtentName]:
    strays = Strays()
    for folder in find_groups(directory, strays):
        for namespace in find_namespaces(directory, folder, strays):
            for shelf in find_shelves(directory, namespace, strays):
                yield from _shelf(directory, namespace, shelf, strays)


def _shelf(directory: DataDirectory, namespace: Namespace, shelf: str, strays: Strays) -> list[ExtentName]:
    parts = (*namespace.parts, shelf)
    try:
        with directory.folder(parts) as folder_fd:
            return [namespace.extent(key_of(entry)) for entry in list_extents(folder_fd, shelf, strays)]
    except StorageError as error:
        strays.note(error, parts)
        return []
