"""Recounting the files of a data directory against its books, group by group, while others go on working in it.

Files that come or go while their group is counted are left out on both sides: what is compared is the rest, to the
byte."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tierkv.core.instructions import Difference, GroupCount
from tierkv.errors import StorageError
from tierkv.storage.books import Books
from tierkv.storage.directory import DataDirectory
from tierkv.storage.index_row import Namespace
from tierkv.storage.journal import BEGINS_HERE
from tierkv.storage.names import Parts
from tierkv.storage.system_calls import call
from tierkv.storage.walk import GroupFolder, Strays, find_groups, find_namespaces, find_shelves, key_of, list_extents

log = logging.getLogger(__name__)

WAS_PURGED = "a purge that was interrupted has gone on"

ATTEMPTS = 3
"""How often a group is counted anew because a purge was removing files meanwhile."""

MAX_FOREIGN = 100


@dataclass(slots=True)
class Count:
    """`problems`: what could not be looked at, in words; then its group is not compared."""

    groups: list[GroupCount] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def recount(
    directory: DataDirectory,
    books: Books,
    now: float,
    *,
    found_by: str = "audit",
    purging: frozenset[bytes] = frozenset(),
    progress: Callable[[int, int], bool] = lambda done, total: True,
) -> Count:
    """Count every group, correct its balance, and put differences into the table. Those that have an excuse are
    resolved there; `purging` are groups of which a purge that was interrupted may have taken files. `progress(done,
    total)` in groups; where it says False, the count ends there."""
    return _Recount(directory, books, now, found_by, purging).run(progress)


class _Recount:
    def __init__(
        self, directory: DataDirectory, books: Books, now: float, found_by: str, purging: frozenset[bytes]
    ) -> None:
        self._directory = directory
        self._books = books
        self._now = now
        self._found_by = found_by
        self._purging = purging
        self._excuse = books.excuse
        self._foreign: list[tuple[str, int]] = []
        self._count = Count()

    def run(self, progress: Callable[[int, int], bool]) -> Count:
        strays = Strays()
        folders = {folder.group: folder for folder in find_groups(self._directory, strays)}
        for group in self._books.booked_groups():
            folders.setdefault(group, GroupFolder("", group))  # no folder of it is left
        self._count.problems += strays.problems
        is_whole = not strays.unreadable
        for done, folder in enumerate(folders.values()):
            if not progress(done, len(folders)):
                is_whole = False
                break
            is_whole = self._count_group(folder) and is_whole
        self._note_foreign()
        self._books.tell(self._count.differences)
        if is_whole:
            self._books.counted()
        return self._count

    def _count_group(self, folder: GroupFolder) -> bool:
        """Whether it could be compared."""
        for _ in range(ATTEMPTS):
            strays, foreign = Strays(), list[tuple[str, int]]()
            watched = self._books.watch(folder.group)
            try:
                sizes = dict(files_of(self._directory, folder, strays, foreign)) if folder.fingerprint else {}
            finally:
                is_all = self._books.unwatch(watched)
            if is_all:
                break
        else:
            self._count.problems.append(f"group {folder.group.hex()} is being purged")
            return False
        self._foreign += foreign
        if strays.unreadable:
            self._count.problems += strays.problems
            return False
        touched = {(file.rank, file.key) for file in watched.touched}
        steady = sum(size for name, size in sizes.items() if name not in touched)
        surplus = steady - (watched.booked_bytes - sum(watched.touched.values()))
        if surplus:
            self._books.correct(folder.group, surplus)
            self._note_surplus(folder.group, watched.booked_bytes, surplus)
        found = watched.booked_bytes + surplus
        self._count.groups.append(GroupCount(folder.group, len(sizes), found, watched.booked_bytes))
        return True

    def _note_surplus(self, group: bytes, booked: int, surplus: int) -> None:
        if self._excuse == BEGINS_HERE:
            return
        resolution = WAS_PURGED if group in self._purging else self._excuse
        log.warning(
            "group %s: files of %d bytes are booked, %d are there%s",
            group.hex(), booked, booked + surplus, f" ({resolution})" if resolution else "; see `tierkv audit`",
        )  # fmt: skip
        self._count.differences.append(
            Difference(
                tier="nvme",
                what="files",
                booked_bytes=booked,
                counted_bytes=booked + surplus,
                found_at=self._now,
                found_by=self._found_by,
                group=group.hex(),
                resolution=resolution,
                resolved_at=self._now if resolution else 0.0,
            )
        )

    def _note_foreign(self) -> None:
        self._count.differences += [
            Difference(
                tier="nvme",
                what="foreign",
                booked_bytes=0,
                counted_bytes=size,
                found_at=self._now,
                found_by=self._found_by,
                path=path,
            )
            for path, size in self._foreign[:MAX_FOREIGN]
        ]


def files_of(
    directory: DataDirectory, folder: GroupFolder, strays: Strays, foreign: list[tuple[str, int]]
) -> Iterator[tuple[tuple[int, bytes], int]]:
    """((rank, key), length) of each file of the group."""
    for namespace in find_namespaces(directory, folder, strays):
        for shelf in find_shelves(directory, namespace, strays):
            yield from _shelf(directory, namespace, shelf, strays, foreign)


def _shelf(
    directory: DataDirectory, namespace: Namespace, shelf: str, strays: Strays, foreign: list[tuple[str, int]]
) -> list[tuple[tuple[int, bytes], int]]:
    parts = (*namespace.parts, shelf)
    found = []
    met = Strays()
    try:
        with directory.folder(parts) as folder_fd:
            for entry in list_extents(folder_fd, shelf, met):
                try:
                    size = call("stat", entry.stat, follow_symlinks=False).st_size
                except StorageError as error:
                    if error.errno_name != "ENOENT":  # removed since it was listed
                        raise
                    continue
                found.append(((namespace.rank, key_of(entry)), size))
            if met.foreign:
                foreign += _foreign(folder_fd, parts, shelf)
    except StorageError as error:
        strays.note(error, parts)
    return found


def _foreign(folder_fd: int, parts: Parts, shelf: str) -> list[tuple[str, int]]:
    """What lies among the files of a shelf and is none of them: paths below the data directory, and lengths."""
    ours = {entry.name for entry in list_extents(folder_fd, shelf, Strays())}
    found = []
    for name in sorted(set(call("listdir", os.listdir, folder_fd)) - ours):
        try:
            status = call("stat", os.stat, name, dir_fd=folder_fd, follow_symlinks=False)
        except StorageError:
            continue  # gone meanwhile
        if stat.S_ISREG(status.st_mode):
            found.append(("/".join((*parts, name)), status.st_size))
    return found
