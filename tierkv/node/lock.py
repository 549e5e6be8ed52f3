"""Who may use a directory or a recording: a lock of the kernel, whatever is written in any file.

    DATA/LOCK          one node per data directory; the storage workers inherit the open file, so that a second node
                       can't start while one of them still writes
    socket dir/LOCK    one node per endpoint
    RECORDING.lock     one node per recording; beside it, as the recording itself is renamed and written anew. The
                       recorder inherits the open file

The lock belongs to the open file and ends with its last descriptor, in whichever process that is. Nobody unlocks it by
a call: that would also take it from a worker that is still writing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from tierkv.errors import ConfigError, DataDirectoryError, DataDirectoryInUse
from tierkv.storage.new_folders import make_folders
from tierkv.storage.stamp import COUNTS_AS_EMPTY

LOCK_NAME = "LOCK"
FORMAT_NAME = "FORMAT"
RECORDING_SUFFIX = ".lock"
RETRY_SECONDS = 0.05


class FileLock:
    """A held lock. `close` gives up this process's share of it; who inherited the open file still holds it."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_data_directory(
    root: Path,
    wait_seconds: float,
    *,
    read_only: bool = False,
    ours: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> FileLock:
    """Hold the data directory, waiting up to `wait_seconds` for another node to be gone.

    Makes the directory (mode 0700) when it is absent, and LOCK in it; changes nothing else, so that the loser of a race
    has touched nothing of the winner's. `read_only`: makes nothing, and shares the directory with others that only
    read. `ours`: what is in it may be there without LOCK and FORMAT, for this node has held it all the time. Raises
    DataDirectoryInUse, or DataDirectoryError for a directory that is not ours to use.
    """
    try:
        if not read_only and not os.path.lexists(root):
            make_folders(root)
        root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DataDirectoryError(_say(root, error)) from error
    try:
        if not ours:
            _refuse_foreign(root, root_fd)
        return _lock(root, root_fd, wait_seconds, pause, read_only=read_only)
    except OSError as error:
        hint = "; start with read_only to serve what is there" if error.errno == errno.EROFS and not read_only else ""
        raise DataDirectoryError(_say(root / LOCK_NAME, error) + hint) from error
    finally:
        os.close(root_fd)


def lock_socket_directory(root: Path) -> FileLock:
    """Hold an existing socket directory at once, or raise DataDirectoryInUse: its node answers there."""
    try:
        root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError("socket_dir", _say(root, error)) from error
    try:
        return _lock(root, root_fd, 0.0, time.sleep)
    except OSError as error:
        raise ConfigError("socket_dir", _say(root / LOCK_NAME, error)) from error
    finally:
        os.close(root_fd)


def lock_recording(recording: Path, wait_seconds: float, *, pause: Callable[[float], None] = time.sleep) -> FileLock:
    """Hold the recording, waiting up to `wait_seconds` for another node to be gone. Raises ConfigError."""
    name = recording.name + RECORDING_SUFFIX
    try:
        folder_fd = os.open(recording.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError("record", f"{recording} can't be written: {error.strerror}") from error
    try:
        return _lock(recording.parent, folder_fd, wait_seconds, pause, name=name)
    except DataDirectoryInUse as error:
        raise ConfigError("record", f"{error}; name another file") from error
    except OSError as error:
        raise ConfigError("record", _say(recording.with_name(name), error)) from error
    finally:
        os.close(folder_fd)


def _refuse_foreign(root: Path, root_fd: int) -> None:
    """A directory with something in it is used only if a node has been there. LOCK is looked for after the listing:
    whoever sets a directory up makes LOCK first, so that a listing with anything of it means that LOCK is there, unless
    the power went: then there may be the rest of a set-up without it."""
    if set(os.listdir(root_fd)) <= COUNTS_AS_EMPTY or _exists(LOCK_NAME, root_fd) or _exists(FORMAT_NAME, root_fd):
        return
    raise DataDirectoryError(f"{root} is not empty and is not a data directory of tierkv; name an empty or absent one")


def _exists(name: str, root_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=root_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _lock(
    root: Path,
    root_fd: int,
    wait_seconds: float,
    pause: Callable[[float], None],
    *,
    read_only: bool = False,
    name: str = LOCK_NAME,
) -> FileLock:
    flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
    deadline = time.monotonic() + wait_seconds
    while True:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
        try:
            held = _try_lock(fd, shared=read_only) and _is_still_there(fd, root_fd, name)
            if held:
                if not read_only:
                    _write_owner(fd)
                return FileLock(fd, root / name)
            owner = _read_owner(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() >= deadline:
            what = root if name == LOCK_NAME else root / name.removesuffix(RECORDING_SUFFIX)
            raise DataDirectoryInUse(f"{what} is in use by another node{owner}")
        pause(min(RETRY_SECONDS, max(0.0, deadline - time.monotonic())))


def _try_lock(fd: int, *, shared: bool) -> bool:
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still_there(fd: int, root_fd: int, name: str) -> bool:
    """Somebody may have deleted it between our open and our lock: then the lock is on a file nobody else will see."""
    mine = os.fstat(fd)
    try:
        named = os.stat(name, dir_fd=root_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (named.st_dev, named.st_ino)


def _write_owner(fd: int) -> None:
    """For people only; nothing ever decides by what is written here. A full disk may refuse it, and that's fine."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _read_owner(fd: int) -> str:
    text = os.pread(fd, 32, 0).strip()
    return f" (process {text.decode()})" if text.isdigit() else ""


def _say(path: Path, error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
        return f"{path} is a symbolic link; name the directory itself"
    return f"{path}: {error.strerror}"
