"""The file operations of a worker in one object, so that a test can stand between worker and files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

from tierkv.core.identity import Identity
from tierkv.core.instructions import Demote, Read, Write
from tierkv.errors import ConfigError
from tierkv.storage.copier import copy_extent
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import (
    ReadOutcome,
    Verified,
    WrittenFile,
    read_blocks,
    remove_extent,
    verify_file,
    write_extent,
)
from tierkv.storage.names import ExtentName, Parts
from tierkv.storage.system_calls import Failure, call
from tierkv.storage.unused_file import Used, remove_unused


class Files:
    """The real ones. Called from several threads, for one extent one after the other."""

    def write(
        self, directory: DataDirectory, arena: memoryview, write: Write, identity: Identity
    ) -> WrittenFile | Failure:
        return write_extent(
            directory, arena, write, identity=identity, reached=lambda stage: self.reached(stage, write)
        )

    def copy(
        self, source: DataDirectory, directory: DataDirectory, demote: Demote, identity: Identity
    ) -> WrittenFile | Failure:
        return copy_extent(
            source, directory, demote, identity=identity, reached=lambda stage: self.copy_reached(stage, demote)
        )

    def copy_reached(self, stage: str, demote: Demote) -> None:
        """A copy has come to one of the same stages as a write."""

    def reached(self, stage: str, write: Write) -> None:
        """A write has come to "temp_written", "before_rename", or "renamed" (its index row is not yet written)."""

    def purge_reached(self, stage: str, purge: bytes) -> None:
        """A purge has come to "recorded", to a stage of `tierkv.storage.sweep`, or to "crossed out"."""

    def read(self, directory: DataDirectory, arena: memoryview, read: Read, identity: Identity | None) -> ReadOutcome:
        return read_blocks(directory, arena, read, identity=identity)

    def verify(self, directory: DataDirectory, name: ExtentName, pause: Callable[[int], None]) -> Verified:
        return verify_file(directory, name, pause=pause)

    def remove(self, directory: DataDirectory, name: ExtentName) -> bool:
        return remove_extent(directory, name)

    def remove_unused(self, directory: DataDirectory, name: ExtentName, since: float, now: float) -> bool | Used:
        return remove_unused(directory, name, since, now)

    def status(self, directory: DataDirectory, name: ExtentName) -> os.stat_result:
        """Raises StorageError."""
        with directory.folder(name.folder) as folder_fd:
            return call("stat", os.stat, name.file, dir_fd=folder_fd, follow_symlinks=False)

    def set_mtime(self, directory: DataDirectory, name: ExtentName, seconds: float) -> None:
        """Raises StorageError."""
        with directory.folder(name.folder) as folder_fd:
            call("utime", os.utime, name.file, (seconds, seconds), dir_fd=folder_fd, follow_symlinks=False)

    def flush(self, directory: DataDirectory, folder: Parts) -> None:
        directory.flush(folder)


def load_files(name: str) -> Files:
    """Made by the callable that `name` names as "module:attribute"; the real ones where it is empty."""
    if not name:
        return Files()
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("files", str(error)) from error
    made = make() if callable(make) else make
    if not isinstance(made, Files):
        raise ConfigError("files", f"{name} makes a {type(made).__name__}")
    return made
