"""Removing a purge's scope from a data directory: every file, folder and row of it, and the flushes that make it so.

    files of the extents -> quarantine -> abandoned temp files -> index -> identity.json, model.json, empty folders
    -> every folder that something was removed from, flushed

Files go before quarantine, because verifying may move one there as long as it has its name. Groups say whose they are
until all else of them is gone. It may be begun again at any point, by any process that holds the lock; nothing of the
scope may be written or read meanwhile. What is not ours, and files of a newer format, are left and counted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

from tierkv.core.instructions import LEFT_PATHS, PurgeScope, Swept
from tierkv.core.keys import split_keys
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, ForeignFile, StorageError, UnknownFormat
from tierkv.storage.catalog import Catalog, IndexFailed
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import remove_if_empty, unlink_extent
from tierkv.storage.extent_header import load_header, open_regular
from tierkv.storage.format import Header
from tierkv.storage.index_row import Namespace
from tierkv.storage.names import INDEX, MODELS, QUARANTINE, TEMP, Parts, group_parts, model_parts
from tierkv.storage.namespace import IDENTITY_FILE, MODEL_FILE, read_identity
from tierkv.storage.quarantine import Quarantine, Usage, group_of
from tierkv.storage.system_calls import call
from tierkv.storage.walk import (
    GroupFolder,
    Strays,
    find_groups,
    find_groups_of,
    find_namespaces,
    find_shelves,
    key_of,
    list_extents,
)

__all__ = ["sweep", "covers", "hidden_heads"]

Reached = Callable[[str], None]
Alone = Callable[[], AbstractContextManager[object]]
Tell = Callable[[bytes, int], None]
Answer = TypeVar("Answer")


def covers(scope: PurgeScope, fingerprint: str, group: bytes) -> bool:
    """Whether all of a group is in scope."""
    return fingerprint in scope.models or any(one.group == group for one in scope.groups)


def hidden_heads(scope: PurgeScope, group: bytes) -> set[bytes]:
    """The extents of a group that are in scope one by one, by the key that heads them."""
    return {head for one in scope.extents if one.group == group for head in split_keys(one.heads)}


def sweep(
    directory: DataDirectory,
    catalog: Catalog,
    quarantine: Quarantine,
    scope: PurgeScope,
    *,
    alone: Alone = nullcontext,
    reached: Reached = lambda stage: None,
    removed: Tell = lambda group, num_bytes: None,
) -> Swept:
    """Remove all of `scope`. When it returns, none of it comes back, whatever happens to the machine. Inside of `alone`
    nobody makes the folders of a group. `reached` is told what has been done, for tests that kill a process there;
    `removed` of each file, its group and length, and of each group that is in scope. Raises StorageError; then it is to
    be begun again."""
    return _Sweep(directory, catalog, quarantine, scope, alone, reached, removed).run()


@dataclass(slots=True)
class _Removed:
    files: int = 0
    file_bytes: int = 0
    left: int = 0
    left_paths: list[str] = field(default_factory=list)  # the first few

    def leave(self, folder: Path, names: Iterable[str], count: int = 1) -> None:
        self.left += count
        room = LEFT_PATHS - len(self.left_paths)
        self.left_paths += [_readable(str(folder / name)) for name in islice(names, room)]


def _readable(path: str) -> str:
    """On a terminal and in a message, whatever bytes are in it."""
    return path if path.isprintable() else ascii(path)[1:-1]


@dataclass(slots=True)
class _Sweep:
    directory: DataDirectory
    catalog: Catalog
    quarantine: Quarantine
    scope: PurgeScope
    alone: Alone
    reached: Reached
    tell: Tell
    removed: _Removed = field(default_factory=_Removed)
    strays: Strays = field(default_factory=Strays)

    def run(self) -> Swept:
        if self.directory.read_only:
            raise StorageError("unlink", "EROFS", Reason.READ_ONLY, f"{self.directory.path} is used read only")
        whole = list(self._groups())
        for folder in whole:
            self.tell(folder.group, 0)
            for namespace in find_namespaces(self.directory, folder, self.strays):
                self._empty_namespace(namespace, None)
        for one in self.scope.extents:
            heads = set(split_keys(one.heads))
            for namespace in find_namespaces(self.directory, GroupFolder(one.fingerprint, one.group), self.strays):
                self._empty_namespace(namespace, heads)
        self._insist()
        self.reached("files")
        quarantined = self._empty_quarantine({folder.group for folder in whole})
        self.reached("quarantine")
        cleared = self.directory.clear_temp()
        self.directory.flush((TEMP,))
        self.reached("temp")
        rows = self._drop_rows()
        self.reached("index")
        with self.alone():
            for folder in whole:
                self._remove_group(folder)
            self._remove_models({folder.fingerprint for folder in whole} | set(self.scope.models))
        self._insist()
        self.reached("flushed")
        return Swept(
            files=self.removed.files,
            file_bytes=self.removed.file_bytes,
            quarantined_files=quarantined.files,
            quarantined_bytes=quarantined.num_bytes,
            temp_files=cleared.files,
            temp_bytes=cleared.num_bytes,
            index_rows=rows,
            left_files=self.removed.left,
            unknown_groups=self._count_unknown() if self.scope.names_tenant else 0,
            left_paths=tuple(self.removed.left_paths),
        )

    def _groups(self) -> Iterator[GroupFolder]:
        """Whole groups in scope: those named, and those that have a folder."""
        named = {(one.fingerprint, one.group): None for one in self.scope.groups}
        for model in self.scope.models:
            named.update({(model, one.group): None for one in find_groups_of(self.directory, model, self.strays)})
        yield from (GroupFolder(*names) for names in named)

    def _insist(self) -> None:
        """A folder that could not be looked into may hold some of it."""
        if self.strays.unreadable:
            raise StorageError("listdir", "", Reason.IO_ERROR, "; ".join(self.strays.problems))

    # ---- files

    def _empty_namespace(self, namespace: Namespace, heads: set[bytes] | None) -> None:
        """Remove its files, or those of `heads`, and the folders that are empty then."""
        wanted = None if heads is None else {f"{head[0]:02x}" for head in heads}
        for shelf in find_shelves(self.directory, namespace, self.strays):
            if wanted is None or shelf in wanted:
                self._empty_shelf(namespace, shelf, heads)
        self._flush(namespace.parts)

    def _empty_shelf(self, namespace: Namespace, shelf: str, heads: set[bytes] | None) -> None:
        parts = (*namespace.parts, shelf)
        with self.directory.folder(namespace.parts) as namespace_fd:
            with self.directory.folder(parts) as folder_fd:
                strays = Strays()
                for entry in list_extents(folder_fd, shelf, strays):
                    if heads is None or key_of(entry) in heads:
                        self._unlink(folder_fd, parts, entry, namespace.group)
                if heads is None:
                    self.removed.leave(self._path(parts), strays.foreign_names, strays.foreign)
            self._flush(parts)
            remove_if_empty(namespace_fd, shelf)

    def _path(self, parts: Parts) -> Path:
        return self.directory.path.joinpath(*parts)

    def _unlink(self, folder_fd: int, parts: Parts, entry: os.DirEntry[str], group: bytes) -> None:
        try:
            found = call("stat", entry.stat, follow_symlinks=False)
            if not unlink_extent(folder_fd, entry.name):
                self.removed.leave(self._path(parts), [entry.name])
                return
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
            return
        self.removed.files += 1
        self.removed.file_bytes += found.st_blocks * 512
        self.tell(group, found.st_size)

    # ---- what lies elsewhere

    def _empty_quarantine(self, folders: set[bytes]) -> Usage:
        """All of a group in scope, of a prefix as well: which blocks a damaged file holds can't be trusted. Whose a
        file is, its name says, and its header where that can be read: it may have lain under another's name."""
        groups = folders | {one.group for one in self.scope.groups} | {one.group for one in self.scope.extents}

        def is_meant(file: str, group: bytes) -> bool:
            if group in groups:
                return True
            header = self._header_of(file)
            return header is not None and (header.group in groups or header.fingerprint in self.scope.models)

        used = self.quarantine.remove(is_meant)
        self._flush((QUARANTINE,))
        return used

    def _header_of(self, file: str) -> Header | None:
        """Of a file in quarantine; None where it can't be read."""
        try:
            with self.directory.folder((QUARANTINE,)) as fd, open_regular(fd, file) as (opened, found):
                return load_header(opened, found.st_size)[0]
        except (DamagedFile, UnknownFormat, ForeignFile, StorageError):
            return None  # that file is damaged, which is why it is here

    def _drop_rows(self) -> int:
        prefixes = [bytes.fromhex(model) for model in self.scope.models]
        prefixes += [bytes.fromhex(one.fingerprint) + one.group for one in self.scope.groups]
        if self.scope.extents:
            indexed = _require(self.catalog.namespaces())
            for one in self.scope.extents:
                mine = [space for space in indexed if space.group == one.group]
                prefixes += [space.row_name(head) for space in mine for head in split_keys(one.heads)]
        rows = sum(_require(self.catalog.drop_all(prefix)) for prefix in prefixes)
        call("unlink", self.catalog.forget_set_aside)
        self._flush((INDEX,))
        return rows

    # ---- folders

    def _remove_group(self, folder: GroupFolder) -> None:
        """Its ranks, if they are empty, then identity.json, then itself."""
        parts = group_parts(folder.fingerprint, folder.group)
        for namespace in find_namespaces(self.directory, folder, self.strays):
            self._remove_folder(parts, str(namespace.rank))
        self._remove_described(parts, IDENTITY_FILE)

    def _remove_models(self, fingerprints: set[str]) -> None:
        for fingerprint in sorted(fingerprints):
            self._remove_described(model_parts(fingerprint), MODEL_FILE)
        self._flush((MODELS,))

    def _remove_described(self, parts: Parts, described_by: str) -> None:
        """A folder that holds nothing but the file that says what it is, and that file."""
        try:
            with self.directory.folder(parts) as fd:
                others = set(call("listdir", os.listdir, fd)) - {described_by}
                if not others:
                    self._unlink_described(fd, parts, described_by)
            self._flush(parts)
            if not others:
                self._remove_folder(parts[:-1], parts[-1])
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
        self._flush(parts[:-1])

    def _unlink_described(self, fd: int, parts: Parts, file: str) -> None:
        try:
            found = call("stat", os.stat, file, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                self.removed.leave(self._path(parts), [file])
                return
            call("unlink", os.unlink, file, dir_fd=fd)
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise

    def _remove_folder(self, parent: Parts, name: str) -> None:
        with self.directory.folder(parent) as fd:
            remove_if_empty(fd, name)
        self._flush(parent)

    def _flush(self, parts: Parts) -> None:
        """One that is gone has nothing left to flush but that it is gone, which is its parent's."""
        try:
            self.directory.flush(parts)
        except StorageError as error:
            if error.errno_name != "ENOENT" or not parts:
                raise
            self._flush(parts[:-1])

    # ---- what can't be told

    def _count_unknown(self) -> int:
        """Groups on disk, and in quarantine, that don't say whose they are."""
        strays = Strays()
        known: set[bytes] = set()
        unknown: set[bytes] = set()
        for folder in find_groups(self.directory, strays):
            if covers(self.scope, folder.fingerprint, folder.group):
                continue
            is_known = read_identity(self.directory, folder.fingerprint, folder.group) is not None
            (known if is_known else unknown).add(folder.group)
        unknown.update(group_of(file) for file in self.quarantine.files())
        return len(unknown - known)


def _require(answer: Answer | IndexFailed) -> Answer:
    if isinstance(answer, IndexFailed):
        raise StorageError("index", "", Reason.IO_ERROR, answer.problem)
    return answer
