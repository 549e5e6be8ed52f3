"""The directory of the disk tier, as one node opens it, and what the node keeps about it in its own data directory.

    DATA/disk-index/
      LOCK          held by the worker of the disk tier: one that a dead disk holds must have ended before the next
      USED          which directory this node has used last, by path and store
      data.mdb ...  the index of it
    DATA/disk-purges/    purges that the disk directory is still to be swept for; see purge_record.py

An empty directory at a path that this node has used before is no new disk directory: what was there is not mounted.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from blake3 import blake3

from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.checked_file import Unusable, read_checked, write_checked
from tierkv.storage.codec_names import FileCodec
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.names import DISK_INDEX
from tierkv.storage.stamp import FORMAT, LOCK
from tierkv.storage.system_calls import Failure, call

__all__ = ["require_apart", "open_disk_directory", "last_disk_directory", "hold_disk_index"]

log = logging.getLogger(__name__)

USED = "USED"

_MAX_USED_BYTES = 16 * 2**10


class _Used(msgspec.Struct, frozen=True):
    path: str
    store: str


def require_apart(data_dir: str | Path, disk_dir: str | Path) -> None:
    """Raises DataDirectoryError when the two are one directory, or one lies in the other, by whatever path."""
    data, disk = Path(data_dir).absolute(), Path(disk_dir).absolute()
    if _is_within(disk, data):
        raise DataDirectoryError(f"disk_dir {disk} is, or lies in, data_dir {data}; name a directory outside of it")
    if _is_within(data, disk):
        raise DataDirectoryError(f"data_dir {data} lies in disk_dir {disk}; name a directory outside of it")


def _is_within(path: Path, other: Path) -> bool:
    """Directories are told by their inodes where they exist, so that a mount or a link of one is found too."""
    real, other_real = Path(os.path.realpath(path)), Path(os.path.realpath(other))
    if real == other_real or other_real in real.parents:
        return True
    try:
        found = os.stat(other_real)
    except OSError:
        return False  # nothing can lie in it
    for above in (real, *real.parents):
        try:
            status = os.stat(above)
        except OSError:
            continue  # not made yet
        if (status.st_dev, status.st_ino) == (found.st_dev, found.st_ino):
            return True
    return False


def open_disk_directory(
    path: str | Path,
    data: DataDirectory,
    *,
    direct_io: bool,
    read_only: bool,
    codec: FileCodec = FileCodec.RAW,
    failed: Callable[[Failure], None] = lambda failure: None,
) -> DataDirectory:
    """Open it for the node of the data directory `data`, making an absent or empty one that this node has not used
    before; what it is to lie in must be there. On a file system that has become read-only, which `failed` is told, it
    is opened to be read. Raises DataDirectoryError."""
    path = Path(path).absolute()
    require_apart(data.path, path)
    used = _read_used(data)
    if used is not None and used.path == str(path) and not os.path.lexists(path / FORMAT):
        raise DataDirectoryError(
            f"{path} has nothing of what this node had there: is the disk mounted? If it is to begin anew, remove"
            f" {data.path / DISK_INDEX}"
        )
    if not read_only:
        _require_parent(path)
    owner = blake3(data.store_id.encode()).hexdigest(length=4)
    try:
        disk = DataDirectory.open(
            path, kind=Kind.DISK, owner=owner, direct_io=direct_io, read_only=read_only, codec=codec
        )
    except DataDirectoryError as error:
        cause = error.__cause__
        if not isinstance(cause, StorageError) or cause.reason != Reason.READ_ONLY:
            raise
        failed(Failure.of(cause))
        disk = DataDirectory.open(
            path, kind=Kind.DISK, owner=owner, direct_io=direct_io, create=False, writable=False, codec=codec
        )
    if not read_only:
        _write_used(data, _Used(str(path), disk.store_id), used)
    return disk


def last_disk_directory(data: DataDirectory) -> Path | None:
    """Which one the node of `data` has used last; None where it has had no disk tier. Raises DataDirectoryError where
    it has had one, and does not know any more which."""
    try:
        with data.folder((DISK_INDEX,)):
            used = _read_used(data)
    except StorageError as error:
        if error.errno_name == "ENOENT":
            return None
        raise DataDirectoryError(f"{data.path / DISK_INDEX} can't be used: {error}") from error
    if used is None:
        raise DataDirectoryError(
            f"{data.path / DISK_INDEX} shows that there was one, and not in which directory: name it as disk_dir"
        )
    return Path(used.path)


def _require_parent(path: Path) -> None:
    """A directory that is absent is made in one that is there: made with all above it, it would lie on the root disk
    where a disk is not mounted."""
    if not os.path.lexists(path) and not os.path.isdir(path.parent):
        raise DataDirectoryError(
            f"{path} is not there, and neither is {path.parent}: is the disk mounted? If it is, make {path.parent};"
            f" {path.name} is made in it"
        )


@contextmanager
def hold_disk_index(data: DataDirectory) -> Iterator[int]:
    """A descriptor of DATA/disk-index, which nobody else uses for the length of the block; -1 where there is none and
    `data` may not be changed. Raises DataDirectoryError while another process has it."""
    try:
        folder_fd = data.open_folder((DISK_INDEX,), create=True)
    except StorageError as error:
        if not data.read_only:
            raise DataDirectoryError(f"{data.path / DISK_INDEX} can't be used: {error}") from error
        yield -1
        return
    try:
        lock_fd = -1 if data.read_only else _lock(data, folder_fd)
        try:
            yield folder_fd
        finally:
            if lock_fd >= 0:
                os.close(lock_fd)
    finally:
        os.close(folder_fd)


def _lock(data: DataDirectory, folder_fd: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = call("open", os.open, LOCK, flags, 0o600, dir_fd=folder_fd)
    except StorageError as error:
        raise DataDirectoryError(f"{data.path / DISK_INDEX / LOCK} can't be made: {error}") from error
    try:
        call("flock", fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except StorageError as error:
        os.close(fd)
        if error.errno_name != "EAGAIN":
            raise DataDirectoryError(f"{data.path / DISK_INDEX / LOCK} can't be locked: {error}") from error
        raise DataDirectoryError(
            f"an earlier worker of the disk tier has not ended yet, and holds {data.path / DISK_INDEX}: a call on a"
            " disk that does not answer can't be ended"
        ) from error
    return fd


def _read_used(data: DataDirectory) -> _Used | None:
    """None where nothing is known, or can be."""
    try:
        with data.folder((DISK_INDEX,)) as folder_fd:
            body = read_checked(folder_fd, USED, _MAX_USED_BYTES)
        return None if isinstance(body, Unusable) else msgspec.msgpack.decode(body, type=_Used)
    except (StorageError, msgspec.DecodeError):
        return None


def _write_used(data: DataDirectory, used: _Used, before: _Used | None) -> None:
    if used == before:
        return
    try:
        write_checked(data, (DISK_INDEX,), USED, msgspec.msgpack.encode(used))
    except StorageError as error:  # then an empty mount point can't be told from a new directory, and all else can
        log.warning("%s is not written: %s", data.path / DISK_INDEX / USED, error)
