"""A file that is whole under its name or not there at all: written in tmp/, flushed, renamed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import TEMP, Parts
from tierkv.storage.stamp import NO_LINKS
from tierkv.storage.system_calls import call

log = logging.getLogger(__name__)


class TempFile:
    """A temp file, open for writing while the block lasts, that is renamed into place or removed, whatever happens."""

    def __init__(self, directory: DataDirectory, *, direct: bool) -> None:
        self._directory = directory
        self._direct = direct
        self._name: str | None = None
        self.fd = -1

    def __enter__(self) -> TempFile:
        self._name, self.fd = self._directory.create_temp(direct=self._direct)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
        if self._name is None:
            return
        try:
            self._directory.remove_temp(self._name)
        except StorageError as error:
            # What is told is why the file was not finished, not that it could not be cleared away: the next start does.
            log.warning("%s is left in tmp/: %s", self._name, error)

    def flush(self) -> None:
        call("fdatasync", os.fdatasync, self.fd)

    def publish(self, folder: Parts, file: str, *, refuse: Callable[[int], None] = lambda folder_fd: None) -> None:
        """Rename to `file` in `folder`, which is made where it is missing. `refuse` looks at the folder first and
        raises when the file must not be replaced. Raises StorageError."""
        if self._name is None:
            raise BrokenInvariant("a temp file is published once")
        for attempts_left in (1, 0):
            try:
                with self._directory.folder(folder, create=True) as folder_fd:
                    refuse(folder_fd)
                    with self._directory.folder((TEMP,)) as temp_fd:
                        call("rename", os.rename, self._name, file, src_dir_fd=temp_fd, dst_dir_fd=folder_fd)
            except StorageError as error:
                # Another thread may have removed the folder, empty, between our opening it and the rename.
                if error.errno_name != "ENOENT" or not attempts_left:
                    raise
            else:
                self._name = None
                return

    def publish_new(self, folder: Parts, file: str) -> bool:
        """Like `publish`, and False when something has that name by now. Where a file can't have two names for a
        moment, what was put there in the last one is replaced. Raises StorageError."""
        if self._name is None:
            raise BrokenInvariant("a temp file is published once")
        try:
            with (
                self._directory.folder(folder, create=True) as folder_fd,
                self._directory.folder((TEMP,)) as temp_fd,
            ):
                call("link", os.link, self._name, file, src_dir_fd=temp_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        except StorageError as error:
            if error.errno_name == "EEXIST":
                return False
            if error.errno_name not in NO_LINKS and error.errno_name != "ENOENT":
                raise
            self.publish(folder, file)
        return True  # its first name goes at the end of the block


def write_small_file(directory: DataDirectory, folder: Parts, file: str, content: bytes) -> None:
    """Write a file in one go and make it durable. Raises StorageError."""
    with TempFile(directory, direct=False) as temp:
        rest = memoryview(content)
        while rest:
            count = call("write", os.write, temp.fd, rest)
            if not count:
                raise StorageError("write", "ZERO", Reason.IO_ERROR, f"nothing was written to {file}")
            rest = rest[count:]
        temp.flush()
        temp.publish(folder, file)
    for needed in directory.unflushed(folder):
        directory.flush(needed)
