"""The root of a data directory: whose it is, what it holds, and which format it has.

FORMAT is made first and renamed into place last, so that a set-up that was killed leaves a directory that still counts
as empty. What is not ours is refused before anything is made in it.

A file is only as durable as the names of all directories above it, the data directory's own and those that were made
for it included: they are flushed at each start, for whoever made them may have been killed before.
"""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path

import msgspec

from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, DataDirectoryNewer, StorageError
from tierkv.storage.new_folders import make_folders
from tierkv.storage.system_calls import call

DIRECTORY_FORMAT = 1
FORMAT, LOCK = "FORMAT", "LOCK"
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_NEW_FORMAT = "FORMAT.new"
# A directory above ours that we may not open, or a file system that has nothing to flush: not ours to make durable.
_NOT_OURS_TO_FLUSH = ("EACCES", "EPERM", "EROFS", "EINVAL")
# Besides a lock, what a set-up that was killed half-way and a fresh file system leave behind.
COUNTS_AS_EMPTY = {LOCK, _NEW_FORMAT, "lost+found"}
_MAX_STAMP_BYTES = 4096


class Stamp(msgspec.Struct, frozen=True):
    """Content of FORMAT. Later versions may add fields, so unknown ones are ignored until the version is known."""

    format: int
    store: str
    about: str = "data directory of tierkv: cached KV blocks of language models, may be deleted while no node runs"


def open_root(path: Path, *, create: bool) -> int:
    """A descriptor of the directory, which is made where it is absent and `create` says so; then its own name is
    durable as well. Raises DataDirectoryError for what is no directory of ours, StorageError."""
    fd = _open_root(path, create=create)
    try:
        if create:
            _flush_way(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_root(path: Path, *, create: bool) -> int:
    try:
        fd = call("open", os.open, path, OPEN_FOLDER)
    except StorageError as error:
        if error.errno_name == "ENOENT":
            if not create:
                raise DataDirectoryError(f"{path} does not exist") from error
            return _make_root(path)
        if path.is_symlink():
            raise DataDirectoryError(f"{path} is a symbolic link; name the directory itself") from error
        if error.errno_name == "ENOTDIR":
            raise DataDirectoryError(f"{path} is not a directory") from error
        raise
    try:
        owner = call("fstat", os.fstat, fd).st_uid
        if owner != os.geteuid():
            raise DataDirectoryError(
                f"{path} belongs to uid {owner} and this process runs as uid {os.geteuid()};"
                " run as its owner, so that neither leaves files the other can't use"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_root(path: Path) -> int:
    call("mkdir", make_folders, path)
    fd = call("open", os.open, path, OPEN_FOLDER)
    try:
        call("fchmod", os.fchmod, fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_or_make_stamp(path: Path, root_fd: int, *, create: bool, ours: frozenset[str] = frozenset()) -> Stamp:
    """What FORMAT says; an empty directory gets one where `create` says so. `ours` are names that don't make it one of
    others. Raises DataDirectoryError for a directory of others, a newer format, a damaged FORMAT; StorageError."""
    raw = _read_stamp(path, root_fd)
    if raw is not None:
        return _check_stamp(path, raw)
    foreign = sorted(set(call("listdir", os.listdir, root_fd)) - COUNTS_AS_EMPTY - ours)
    if FORMAT in foreign:
        raise StorageError("open", "ENOENT", Reason.NOT_FOUND, f"{FORMAT} is listed and was not found a moment ago")
    if foreign:
        raise DataDirectoryError(
            f"{path} is not empty (it has {foreign[0]!r}) and is not a data directory of tierkv (it has no {FORMAT});"
            " name an empty or absent one"
        )
    if not create:
        raise DataDirectoryError(f"{path} is empty; a node that is started with it makes a data directory of it")
    stamp = Stamp(DIRECTORY_FORMAT, uuid.uuid4().hex)
    _write_stamp(root_fd, stamp)
    return stamp


def _read_stamp(path: Path, root_fd: int) -> bytes | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = call("open", os.open, FORMAT, flags, dir_fd=root_fd)
    except StorageError as error:
        if error.errno_name == "ENOENT":
            return None
        raise DataDirectoryError(f"{path / FORMAT} can't be read: {error.problem}") from error
    try:
        if not stat.S_ISREG(call("fstat", os.fstat, fd).st_mode):
            raise DataDirectoryError(f"{path / FORMAT} is not a regular file")
        return call("read", os.read, fd, _MAX_STAMP_BYTES)
    finally:
        os.close(fd)


def _check_stamp(path: Path, raw: bytes) -> Stamp:
    try:
        stamp = msgspec.json.decode(raw, type=Stamp)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataDirectoryError(
            f"{path / FORMAT} is damaged ({error}); if this is a data directory of tierkv, restore that file, or empty"
            " the directory to start anew"
        ) from error
    if stamp.format > DIRECTORY_FORMAT:
        raise DataDirectoryNewer(
            f"{path} has format {stamp.format}, made by a newer tierkv; this one knows up to {DIRECTORY_FORMAT}."
            " It was left as it is: run the newer tierkv, or name another directory"
        )
    if stamp.format < 1:
        raise DataDirectoryError(f"{path / FORMAT} names a format that never was: {stamp.format}")
    return stamp


def _write_stamp(root_fd: int, stamp: Stamp) -> None:
    """Whole or absent: a killed set-up leaves at most FORMAT.new, which the next one writes over."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = call("open", os.open, _NEW_FORMAT, flags, 0o600, dir_fd=root_fd)
    try:
        call("fchmod", os.fchmod, fd, 0o600)
        text = msgspec.json.format(msgspec.json.encode(stamp)) + b"\n"
        if call("write", os.write, fd, text) != len(text):
            raise StorageError("write", "ENOSPC", Reason.DISK_FULL, f"{FORMAT} could not be written whole")
        call("fsync", os.fsync, fd)
    finally:
        os.close(fd)
    call("fchmod", os.fchmod, root_fd, 0o700)
    call("rename", os.rename, _NEW_FORMAT, FORMAT, src_dir_fd=root_fd, dst_dir_fd=root_fd)
    call("fsync", os.fsync, root_fd)


def _flush_way(path: Path, root_fd: int) -> None:
    """Flush the directories above, up to where the file system is mounted."""
    device = call("fstat", os.fstat, root_fd).st_dev
    for above in path.parents:
        try:
            fd = call("open", os.open, above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except StorageError as error:
            if error.errno_name in _NOT_OURS_TO_FLUSH:
                continue
            raise
        try:
            if call("fstat", os.fstat, fd).st_dev != device:
                return
            call("fsync", os.fsync, fd)
        except StorageError as error:
            if error.errno_name not in _NOT_OURS_TO_FLUSH:
                raise
        finally:
            os.close(fd)
