"""What recounts found: a table of differences between what is booked and what is there, each open or resolved.

    journal/differences.json       a JSON array, written whole and durably: after a crash it is as it was or as it is

A difference is told once: with it the balance is corrected, so that the next recount finds what is new.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import msgspec

from tierkv.core.instructions import Difference
from tierkv.errors import ForeignFile, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import open_regular
from tierkv.storage.names import JOURNAL
from tierkv.storage.system_calls import call
from tierkv.storage.temp_file import write_small_file

FILE = "differences.json"
MAX_KEPT = 1_000
"""Resolved ones beyond that go, oldest first; then the oldest open ones."""


class Differences:
    """Not for several threads at once. What can't be written is kept in memory, and written with the next change."""

    def __init__(self, directory: DataDirectory | None) -> None:
        """Raises StorageError. A table that can't be understood counts as empty. None: there is no directory, and
        nothing outlives this process."""
        self._directory = directory
        self._rows = [] if directory is None else _read(directory)

    @property
    def rows(self) -> tuple[Difference, ...]:
        return tuple(self._rows)

    @property
    def num_open(self) -> int:
        return sum(row.is_open for row in self._rows)

    def add(self, found: Iterable[Difference]) -> None:
        """Numbered as they come. One that is open already with the same figures is not told again, nor is a foreign
        file that somebody has resolved to leave. Raises StorageError."""
        added = False
        for one in found:
            if any((row.is_open or row.path) and row.is_same(one) for row in self._rows):
                continue
            number = 1 + max((row.number for row in self._rows), default=0)
            self._rows.append(msgspec.structs.replace(one, number=number))
            added = True
        if added:
            self._forget_oldest()
            self._write()

    def resolve(self, number: int, resolution: str, at: float) -> bool:
        """Whether there is an open one of that number: what was said of a resolved one stays. Raises StorageError."""
        for index, row in enumerate(self._rows):
            if row.number == number and row.is_open:
                self._rows[index] = msgspec.structs.replace(row, resolution=resolution, resolved_at=at)
                self._write()
                return True
        return False

    def forget_groups(self, groups: Iterable[bytes], keyless: Iterable[bytes] = ()) -> None:
        """They are purged: what is told of them names nobody. Of `keyless` no file is named. Raises StorageError."""
        gone, nameless = frozenset(map(bytes.hex, groups)), frozenset(map(bytes.hex, keyless))
        rows = []
        for row in self._rows:
            if row.group in gone:
                rows.append(msgspec.structs.replace(row, group="", path=""))
            elif row.group in nameless:
                rows.append(msgspec.structs.replace(row, path=""))
            else:
                rows.append(row)
        if rows != self._rows:
            self._rows = rows
            self._write()

    def _forget_oldest(self) -> None:
        for is_open in (False, True):
            while len(self._rows) > MAX_KEPT:
                oldest = next((row for row in self._rows if row.is_open is is_open), None)
                if oldest is None:
                    break
                self._rows.remove(oldest)

    def _write(self) -> None:
        if self._directory is not None:
            write_small_file(self._directory, (JOURNAL,), FILE, _encode(self._rows))


def _encode(rows: Sequence[Difference]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n"


def _read(directory: DataDirectory) -> list[Difference]:
    try:
        with directory.folder((JOURNAL,)) as folder_fd:
            with open_regular(folder_fd, FILE) as (fd, found):
                raw = call("read", os.read, fd, found.st_size)
            return msgspec.json.decode(raw, type=list[Difference])
    except (msgspec.DecodeError, ForeignFile):
        return []
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
    return []
