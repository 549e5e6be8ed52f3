"""Walking the folders below models/: what has a name of ours, and how much has not.

Foreign entries are counted and never touched; a folder that can't be listed is skipped and counted, and what vanishes
meanwhile is no error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.index_row import Namespace
from tierkv.storage.names import EXTENT_SUFFIX, MAX_RANK, MODELS, Parts, group_parts, model_parts
from tierkv.storage.namespace import IDENTITY_FILE, MODEL_FILE
from tierkv.storage.stamp import is_new_stamp
from tierkv.storage.system_calls import call

_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANK = re.compile(r"0|[1-9][0-9]{0,4}")
_SHELF = re.compile(r"[0-9a-f]{2}")
_EXTENT = re.compile(rf"[0-9a-f]{{64}}{re.escape(EXTENT_SUFFIX)}")
_LOST_AND_FOUND = "lost+found"


_PROBLEMS_KEPT = 20
_NAMES_KEPT = 8


@dataclass(slots=True)
class Strays:
    """What a walk met that it did not look into."""

    foreign: int = 0
    unreadable: int = 0
    problems: list[str] = field(default_factory=list)  # the first few, for the log
    foreign_names: list[str] = field(default_factory=list)  # of the first few among extents

    def note(self, error: StorageError, parts: Parts) -> None:
        if error.reason != Reason.NOT_FOUND:
            self.skip(f"{'/'.join(parts)}: {error}")

    def skip(self, problem: str) -> None:
        self.unreadable += 1
        if len(self.problems) < _PROBLEMS_KEPT:
            self.problems.append(problem)


@dataclass(frozen=True, slots=True)
class GroupFolder:
    fingerprint: str
    group: bytes


def count_foreign_in_root(directory: DataDirectory, strays: Strays) -> None:
    try:
        with directory.folder(()) as root_fd:
            others = set(call("listdir", os.listdir, root_fd)) - directory.own_names - {_LOST_AND_FOUND}
            strays.foreign += sum(not is_new_stamp(name) for name in others)
    except StorageError as error:
        strays.note(error, ())


def find_groups(directory: DataDirectory, strays: Strays) -> Iterator[GroupFolder]:
    for model in _folders(directory, (MODELS,), _DIGEST, strays):
        yield from find_groups_of(directory, model, strays)


def find_groups_of(directory: DataDirectory, fingerprint: str, strays: Strays) -> Iterator[GroupFolder]:
    for group in _folders(directory, model_parts(fingerprint), _DIGEST, strays, besides=MODEL_FILE):
        yield GroupFolder(fingerprint, bytes.fromhex(group))


def find_namespaces(directory: DataDirectory, folder: GroupFolder, strays: Strays) -> list[Namespace]:
    parts = group_parts(folder.fingerprint, folder.group)
    ranks = [int(name) for name in _folders(directory, parts, _RANK, strays, besides=IDENTITY_FILE)]
    strays.foreign += sum(rank > MAX_RANK for rank in ranks)
    return [Namespace(folder.fingerprint, folder.group, rank) for rank in sorted(ranks) if rank <= MAX_RANK]


def find_shelves(directory: DataDirectory, namespace: Namespace, strays: Strays) -> list[str]:
    """The folders of a namespace that hold its files: the first byte of their keys, in hexadecimal."""
    return _folders(directory, namespace.parts, _SHELF, strays)


def list_extents(folder_fd: int, shelf: str, strays: Strays) -> list[os.DirEntry[str]]:
    """Entries of an open shelf that are files with a name of ours. Raises StorageError."""
    extents, foreign = call("listdir", _scan_extents, folder_fd, shelf)
    strays.foreign += len(foreign)
    strays.foreign_names += foreign[: _NAMES_KEPT - len(strays.foreign_names)]
    return extents


def _scan_extents(folder_fd: int, shelf: str) -> tuple[list[os.DirEntry[str]], list[str]]:
    with os.scandir(folder_fd) as entries:
        found = list(entries)
    extents: list[os.DirEntry[str]] = []
    others: list[str] = []
    for entry in found:
        is_named = _EXTENT.fullmatch(entry.name) and entry.name.startswith(shelf)
        if is_named and entry.is_file(follow_symlinks=False):
            extents.append(entry)
        else:
            others.append(entry.name)
    return extents, others


def key_of(entry: os.DirEntry[str]) -> bytes:
    return bytes.fromhex(entry.name[: -len(EXTENT_SUFFIX)])


def _folders(
    directory: DataDirectory, parts: Parts, pattern: re.Pattern[str], strays: Strays, *, besides: str = ""
) -> list[str]:
    """Names of the folders with a name of ours, sorted. `besides` is a file that belongs there as well."""
    try:
        with directory.folder(parts) as folder_fd:
            names, others = call("listdir", _scan_folders, folder_fd, pattern)
    except StorageError as error:
        strays.note(error, parts)
        return []
    strays.foreign += len(set(others) - {besides})
    return sorted(names)


def _scan_folders(folder_fd: int, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    names: list[str] = []
    others: list[str] = []
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            is_ours = pattern.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            (names if is_ours else others).append(entry.name)
    return names, others
