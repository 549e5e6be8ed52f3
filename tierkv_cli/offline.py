"""Verification without a node: the data directory is locked, and its files are checked here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from tierkv.config import Settings
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.node.lock import lock_data_directory
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import verify_file
from tierkv.storage.index_row import Namespace
from tierkv.storage.names import ExtentName
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.walk import Strays, find_groups, find_namespaces, find_shelves, key_of, list_extents
from tierkv.wire.messages import DamagedEntry, VerifyReply

PROGRESS_SECONDS = 0.2
SECONDS_PER_DAY = 86_400.0


def verify_offline(settings: Settings, *, repair: bool) -> Iterator[VerifyReply]:
    """Progress, as a node would give it. Holds the lock, so that no node starts meanwhile; rows of files that are moved
    away stay in the index, and the next start drops them.

    Raises DataDirectoryInUse when a node has the lock after all, DataDirectoryError when there is nothing to verify.
    """
    if settings.data_dir is None:
        raise DataDirectoryError("there is nothing to verify without a data directory; name one with --data-dir")
    with ExitStack() as owned:
        # Opened before the lock is made: a directory that isn't ours gets no file of ours.
        opened = DataDirectory.open(
            settings.data_dir, create=False, writable=False, direct_io=settings.direct_io == "auto"
        )
        directory = owned.enter_context(opened)
        owned.enter_context(lock_data_directory(settings.data_dir, 0.0))
        quarantine = Quarantine(
            directory,
            max_bytes=settings.quarantine_bytes,
            max_age_seconds=settings.quarantine_days * SECONDS_PER_DAY,
        )
        yield from _Scrub(directory, quarantine if repair else None).run()


class _Scrub:
    def __init__(self, directory: DataDirectory, quarantine: Quarantine | None) -> None:
        self._directory = directory
        self._quarantine = quarantine
        self._checked = self._total = self._checked_bytes = self._damaged = self._set_aside = 0
        self._untold: list[DamagedEntry] = []

    def run(self) -> Iterator[VerifyReply]:
        names = list(_extents(self._directory))
        self._total = len(names)
        told = time.monotonic()
        for name in names:
            self._check(name)
            if time.monotonic() - told >= PROGRESS_SECONDS:
                yield self._progress(finished=False)
                told = time.monotonic()
        yield self._progress(finished=True)

    def _check(self, name: ExtentName) -> None:
        found = verify_file(self._directory, name, pause=self._count_bytes)
        self._checked += 1
        if not found.is_worth_telling:
            return
        self._damaged += 1
        self._untold.append(DamagedEntry(str(name), str(found.reason)))
        if found.damaged and self._quarantine is not None and self._move(name, found.reason or Reason.CHECKSUM):
            self._set_aside += 1

    def _count_bytes(self, num_bytes: int) -> None:
        self._checked_bytes += num_bytes

    def _move(self, name: ExtentName, reason: Reason) -> bool:
        assert self._quarantine is not None
        try:
            return self._quarantine.set_aside(name, reason, time.time())
        except StorageError:  # it stays, listed as damaged, and the exit code says that some are left
            return False

    def _progress(self, *, finished: bool) -> VerifyReply:
        told, self._untold = self._untold, []
        return VerifyReply(
            id=0,
            checked_files=self._checked,
            total_files=self._total,
            checked_bytes=self._checked_bytes,
            damaged_files=self._damaged,
            damaged=tuple(told),
            finished=finished,
            set_aside_files=self._set_aside,
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
