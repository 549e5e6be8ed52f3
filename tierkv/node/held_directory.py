"""The data directory of a node: held by its lock from the start on, and taken anew after somebody took it away.

    emptied in place      made anew in it
    removed or moved      waited for: it may come back, and to make another one in its place would stand in its way.
                          One that was put there, empty or of ours, is taken
    another device there  waited for: the disk is not mounted, and what is there would fill another one

Whoever takes it anew holds the lock of what is there now before anything else; what another node holds stays its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from tierkv.errors import DataDirectoryError, TierkvError
from tierkv.node.lock import FileLock, lock_data_directory
from tierkv.storage.directory import DataDirectory


class HeldDirectory:
    """Owns the lock; close it. `lock_fd` is what storage workers inherit."""

    def __init__(self, path: Path, lock: FileLock, *, read_only: bool) -> None:
        self.path = path
        self._lock = lock
        self._read_only = read_only
        found = os.stat(path, follow_symlinks=False)
        self._device, self._inode = found.st_dev, found.st_ino

    @classmethod
    def take(cls, path: Path, wait_seconds: float, *, read_only: bool = False) -> HeldDirectory:
        """Hold the directory, made where it is absent, and prove that it can be used. Raises DataDirectoryError,
        DataDirectoryInUse."""
        lock = lock_data_directory(path, wait_seconds, read_only=read_only)
        try:
            DataDirectory.open(path, read_only=read_only).close()
            return cls(path, lock, read_only=read_only)
        except BaseException:
            lock.close()
            raise

    @property
    def lock_fd(self) -> int:
        return self._lock.fd

    def retake(self) -> str:
        """Take anew what lies under the path now; empty when that was done, else why not, in words. The lock of
        before is let go then: workers that inherited it must have ended before another writes."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError as error:
            return f"{self.path} is not there ({error.strerror}); make it, or move it back"
        if found.st_dev != self._device:
            return f"{self.path} is on another file system than before; is its disk mounted?"
        is_same = found.st_ino == self._inode
        try:
            lock = lock_data_directory(self.path, 0.0, read_only=self._read_only, ours=is_same)
        except TierkvError as error:
            return str(error)
        try:
            DataDirectory.open(self.path, read_only=self._read_only, ours=is_same).close()
        except DataDirectoryError as error:
            lock.close()
            return str(error)
        self._lock.close()
        self._lock, self._inode = lock, found.st_ino
        return ""

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> HeldDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
