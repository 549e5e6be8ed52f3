"""Files in tmp/, and whose they are.

    DATA/tmp/  <pid>-<token>-<number>.tmp              one node's: what nobody holds any more is removed at a start
    DISK/tmp/  <owner>-<pid>-<token>-<number>.tmp      of several nodes: a node removes its own, and those of others
                                                       when they are old

A temp file is locked for as long as it is open, and by that others know that its writer lives. A lock may not reach
from one machine to another, and some file systems have none: then only its age says that nobody writes it.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

from tierkv.errors import StorageError
from tierkv.storage.system_calls import call

ABANDONED_SECONDS = 3600.0
"""No copy of an extent takes so long."""

_TEMP_NAME = re.compile(r"(?:[0-9a-f]{8}-)?[0-9]+-[0-9a-f]{8}-[0-9]+\.tmp")
_NO_LOCKS = ("ENOLCK", "EOPNOTSUPP", "ENOTSUP", "ENOSYS", "EINVAL")  # how file systems say that they have no flock


@dataclass(frozen=True, slots=True)
class Cleared:
    """Temp files that were removed and what they took on disk; those that somebody is writing, and entries of tmp/ that
    are not ours, which were left."""

    files: int
    num_bytes: int
    kept: int
    foreign: int


class _Kept(Enum):
    """Why an entry of tmp/ was not removed."""

    BY_ITS_WRITER = 1
    AS_FOREIGN = 2


class TempFolder:
    """tmp/ of an open directory. Safe to use from several threads. Everything raises StorageError."""

    def __init__(self, folder: Callable[[], AbstractContextManager[int]], *, is_shared: bool, owner: str) -> None:
        self._folder = folder
        self._is_shared = is_shared
        self._prefix = f"{owner}-" if owner else ""
        self._token = secrets.token_hex(4)  # a pid comes back after a reboot; this does not
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # one that is not locked yet must not be taken for an abandoned one

    def new_name(self) -> str:
        """One that nobody has had."""
        return f"{self._prefix}{os.getpid()}-{self._token}-{next(self._numbers)}.tmp"

    def create(self) -> tuple[str, int]:
        """A new file: its name, and a descriptor for writing."""
        name = self.new_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._folder() as folder_fd, self._lock:
            fd = call("open", os.open, name, flags, 0o600, dir_fd=folder_fd)
            try:
                self._hold(fd)
                call("fchmod", os.fchmod, fd, 0o600)
            except BaseException:
                os.close(fd)
                os.unlink(name, dir_fd=folder_fd)
                raise
        return name, fd

    def _hold(self, fd: int) -> None:
        try:
            call("flock", fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except StorageError as error:
            if not self._is_shared or error.errno_name not in _NO_LOCKS:
                raise

    def remove(self, name: str) -> None:
        """One that is gone is fine."""
        try:
            with self._folder() as folder_fd:
                call("unlink", os.unlink, name, dir_fd=folder_fd)
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise

    def clear(self) -> Cleared:
        """Remove what dead writers left. What has not a name that we give is left and counted."""
        files = num_bytes = kept = foreign = 0
        with self._folder() as folder_fd:
            names = call("listdir", os.listdir, folder_fd)
            now = self._time_of_server() if names and self._is_shared else 0.0
            for name in names:
                found = self._clear_one(folder_fd, name, now)
                if isinstance(found, int):
                    files += 1
                    num_bytes += found
                kept += found is _Kept.BY_ITS_WRITER
                foreign += found is _Kept.AS_FOREIGN
        return Cleared(files, num_bytes, kept, foreign)

    def _time_of_server(self) -> float:
        """By the clock that the times of files here are from; 0, so that nothing is old, where that can't be had."""
        try:
            name, fd = self.create()
        except StorageError:
            return 0.0
        try:
            return call("fstat", os.fstat, fd).st_ctime
        finally:
            os.close(fd)
            self.remove(name)

    def _clear_one(self, folder_fd: int, name: str, now: float) -> int | _Kept:
        """The bytes that it took, or why it is still there. One that its writer renames meanwhile is not."""
        try:
            found = call("stat", os.stat, name, dir_fd=folder_fd, follow_symlinks=False)
            if not _TEMP_NAME.fullmatch(name) or not stat.S_ISREG(found.st_mode):
                return _Kept.AS_FOREIGN
            is_old = now - max(found.st_mtime, found.st_ctime) > ABANDONED_SECONDS
            if self._is_shared and not is_old and not (self._prefix and name.startswith(self._prefix)):
                return _Kept.BY_ITS_WRITER
            with self._lock:
                removed = _remove_if_abandoned(folder_fd, name, even_unlocked=is_old)
        except StorageError as error:
            if error.errno_name != "ENOENT" or name in call("listdir", os.listdir, folder_fd):
                raise
            return _Kept.BY_ITS_WRITER
        return found.st_blocks * 512 if removed else _Kept.BY_ITS_WRITER


def _remove_if_abandoned(folder_fd: int, name: str, *, even_unlocked: bool) -> bool:
    """Unlink a temp file unless its writer has it open. In the moment after it was made it may not be locked yet: then
    its writer can't rename it, and says so. Where there are no locks it goes if `even_unlocked`."""
    fd = call("open", os.open, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        if not _is_free(fd, even_unlocked=even_unlocked):
            return False
        call("unlink", os.unlink, name, dir_fd=folder_fd)
    finally:
        os.close(fd)
    return True


def _is_free(fd: int, *, even_unlocked: bool) -> bool:
    try:
        call("flock", fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except StorageError as error:
        if error.errno_name in _NO_LOCKS:
            return even_unlocked
        if error.errno_name != "EAGAIN":
            raise
        return False
    return True
