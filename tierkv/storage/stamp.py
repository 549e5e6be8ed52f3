"""The root of a directory of ours: whose it is, what it holds, which format it has, and of which kind it is.

    data    one node's own, under its lock
    disk    of the disk tier: nodes may share it, and there is no lock

FORMAT is made first and renamed into place last, so that a set-up that was killed leaves a directory that still counts
as empty. What is not ours is refused before anything is made in it, and so is a directory of the other kind. Two nodes
may set up one disk directory at the same moment: the first FORMAT that is in place is everybody's.

A file is only as durable as the names of all directories above it, the data directory's own and those that were made
for it included: they are flushed at each start, for whoever made them may have been killed before.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import uuid
from enum import StrEnum
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
_NEW_SHARED_FORMAT = re.compile(r"FORMAT\.[0-9a-f]{8}\.new")
NO_LINKS = ("EPERM", "EOPNOTSUPP", "ENOTSUP", "ENOSYS", "EMLINK")  # how file systems say that a file has one name
_ATTEMPTS = 3  # to find a FORMAT in a directory that is not empty: another node may be putting it there
# A directory above ours that we may not open, or a file system that has nothing to flush: not ours to make durable.
_NOT_OURS_TO_FLUSH = ("EACCES", "EPERM", "EROFS", "EINVAL")
# Besides a lock, what a set-up that was killed half-way and a fresh file system leave behind.
COUNTS_AS_EMPTY = {LOCK, _NEW_FORMAT, "lost+found"}
_MAX_STAMP_BYTES = 4096


class Kind(StrEnum):
    """What a directory is for. Its value is what FORMAT says."""

    DATA = "data"
    DISK = "disk"


_ABOUT = {
    Kind.DATA: "data directory of tierkv: cached KV blocks of language models, may be deleted while no node runs",
    Kind.DISK: "disk directory of tierkv, which nodes may share: cached KV blocks of language models, may be deleted"
    " while no node runs",
}
_CALLED = {Kind.DATA: "the data directory of a node", Kind.DISK: "a directory of the disk tier"}
_WANTED = {Kind.DATA: "data_dir", Kind.DISK: "disk_dir"}


class Stamp(msgspec.Struct, frozen=True, omit_defaults=True):
    """Content of FORMAT. Later versions may add fields, so unknown ones are ignored until the version is known. One
    without a kind is a data directory's."""

    format: int
    store: str
    about: str = ""
    kind: str = Kind.DATA


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
            culprit = next((one for one in (*reversed(path.parents), path) if not one.is_dir()), path)
            raise DataDirectoryError(f"{culprit} is not a directory") from error
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


def require_no_data_directory(path: str | Path) -> None:
    """Raises DataDirectoryError when `path` is the data directory of a node; whatever else it is, is nobody's business
    here."""
    try:
        fd = os.open(path, OPEN_FOLDER)
    except OSError:
        return
    try:
        raw = _read_stamp(Path(path), fd)
        if raw is not None and _decode_stamp(Path(path), raw).kind == Kind.DATA:
            raise _other_kind(Path(path), Kind.DATA, Kind.DISK)
    except StorageError:
        return
    finally:
        os.close(fd)


def read_or_make_stamp(
    path: Path, root_fd: int, *, create: bool, kind: Kind = Kind.DATA, ours: frozenset[str] = frozenset()
) -> Stamp:
    """What FORMAT says; an empty directory gets one where `create` says so. `ours` are names that don't make it one of
    others. Raises DataDirectoryError for a directory of others or of another kind, a newer format, a damaged FORMAT;
    StorageError."""
    foreign: list[str] = []
    for _ in range(_ATTEMPTS):
        raw = _read_stamp(path, root_fd)
        if raw is not None:
            return _check_stamp(path, raw, kind)
        foreign = sorted(name for name in call("listdir", os.listdir, root_fd) if not _counts_as_empty(name, ours))
        if not foreign:  # or else another node may just have set it up
            break
    if FORMAT in foreign:
        raise StorageError("open", "ENOENT", Reason.NOT_FOUND, f"{FORMAT} is listed and was not found a moment ago")
    if foreign:
        raise DataDirectoryError(
            f"{path} is not empty (it has {foreign[0]!r}) and is not a {kind} directory of tierkv (it has no {FORMAT});"
            " name an empty or absent one"
        )
    if not create:
        raise DataDirectoryError(f"{path} is empty; a node that is started with it makes a {kind} directory of it")
    stamp = Stamp(DIRECTORY_FORMAT, uuid.uuid4().hex, _ABOUT[kind], kind)
    if kind is Kind.DATA:
        _write_stamp(root_fd, _NEW_FORMAT, stamp)
        call("rename", os.rename, _NEW_FORMAT, FORMAT, src_dir_fd=root_fd, dst_dir_fd=root_fd)
        call("fsync", os.fsync, root_fd)
        return stamp
    return _share_stamp(path, root_fd, stamp)


def _counts_as_empty(name: str, ours: frozenset[str]) -> bool:
    return name in COUNTS_AS_EMPTY or name in ours or is_new_stamp(name)


def is_new_stamp(name: str) -> bool:
    """Whether a name in the root is that of a FORMAT that was not put in place, by now or for good."""
    return name == _NEW_FORMAT or _NEW_SHARED_FORMAT.fullmatch(name) is not None


def _share_stamp(path: Path, root_fd: int, stamp: Stamp) -> Stamp:
    """Put FORMAT in place unless another node has, and say whose it is. Where a file can't have two names the last one
    stays, which costs the other node one rebuilding of its index."""
    new = f"{FORMAT}.{secrets.token_hex(4)}.new"
    _write_stamp(root_fd, new, stamp)
    try:
        call("link", os.link, new, FORMAT, src_dir_fd=root_fd, dst_dir_fd=root_fd, follow_symlinks=False)
    except StorageError as error:
        if error.errno_name in NO_LINKS:
            call("rename", os.rename, new, FORMAT, src_dir_fd=root_fd, dst_dir_fd=root_fd)
        elif error.errno_name != "EEXIST":
            raise
    try:
        call("unlink", os.unlink, new, dir_fd=root_fd)
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
    call("fsync", os.fsync, root_fd)
    raw = _read_stamp(path, root_fd)
    if raw is None:
        raise StorageError("open", "ENOENT", Reason.NOT_FOUND, f"{FORMAT} was there a moment ago")
    return _check_stamp(path, raw, Kind.DISK)


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


def _decode_stamp(path: Path, raw: bytes) -> Stamp:
    try:
        return msgspec.json.decode(raw, type=Stamp)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataDirectoryError(
            f"{path / FORMAT} is damaged ({error}); if this is a directory of tierkv, restore that file, or empty"
            " the directory to start anew"
        ) from error


def _check_stamp(path: Path, raw: bytes, kind: Kind) -> Stamp:
    stamp = _decode_stamp(path, raw)
    if stamp.format > DIRECTORY_FORMAT:
        raise DataDirectoryNewer(
            f"{path} has format {stamp.format}, made by a newer tierkv; this one knows up to {DIRECTORY_FORMAT}."
            " It was left as it is: run the newer tierkv, or name another directory"
        )
    if stamp.format < 1:
        raise DataDirectoryError(f"{path / FORMAT} names a format that never was: {stamp.format}")
    if stamp.kind != kind:
        raise _other_kind(path, stamp.kind, kind)
    return stamp


def _other_kind(path: Path, found: str, wanted: Kind) -> DataDirectoryError:
    called = _CALLED[Kind(found)] if found in tuple(Kind) else f"a directory of tierkv of the kind {found!r}"
    return DataDirectoryError(
        f"{path} is {called} and can't be the {_WANTED[wanted]} of one; name an empty or absent one"
    )


def _write_stamp(root_fd: int, new: str, stamp: Stamp) -> None:
    """Under its first name. A killed set-up leaves at most that, and the next one does not mind."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = call("open", os.open, new, flags, 0o600, dir_fd=root_fd)
    try:
        call("fchmod", os.fchmod, fd, 0o600)
        text = msgspec.json.format(msgspec.json.encode(stamp)) + b"\n"
        if call("write", os.write, fd, text) != len(text):
            raise StorageError("write", "ENOSPC", Reason.DISK_FULL, f"{FORMAT} could not be written whole")
        call("fsync", os.fsync, fd)
    finally:
        os.close(fd)
    call("fchmod", os.fchmod, root_fd, 0o700)


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
