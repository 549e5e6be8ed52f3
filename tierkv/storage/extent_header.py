"""Finding a `.kv` file and reading its header: what a walk at start does a hundred thousand times.

Whatever may stand under a name of ours: links are not followed, a FIFO is not waited for, a file of a newer version is
told apart from a damaged one, and the header must say what the path says.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tierkv.core.keys import key_at
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, ForeignFile, StorageError
from tierkv.storage.directory import PAGE_BYTES, DataDirectory
from tierkv.storage.format import Header, decode_header, decode_prefix
from tierkv.storage.names import ExtentName
from tierkv.storage.system_calls import call

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # not blocking: a FIFO would wait for a writer
Decode = Callable[[bytes], Header]  # decode_header, or decode_intact
_FOREIGN = ("ELOOP", "ENXIO")  # how opening a symbolic link, or a socket, fails


@dataclass(frozen=True, slots=True)
class FoundExtent:
    """A header that was read and is consistent with the file's size; the blocks are not verified by that."""

    header: Header
    header_bytes: int
    file_bytes: int
    modified: float  # mtime, coarsely the time of last use; nothing else may be concluded from it


def read_header(directory: DataDirectory, name: ExtentName) -> FoundExtent:
    """The header of a file, compared with its name. Raises StorageError (not_found among them), DamagedFile,
    UnknownFormat and ForeignFile."""
    with directory.folder(name.folder) as folder_fd:
        return read_header_at(folder_fd, name)


def read_header_at(folder_fd: int, name: ExtentName) -> FoundExtent:
    """`read_header` for walks that have the folder open."""
    with open_regular(folder_fd, name.file) as (fd, found):
        extent = load_extent(fd, found)
    check_name(extent.header, name)
    return extent


@contextmanager
def open_regular(folder_fd: int, file: str) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file, open for reading, and its stat. Raises StorageError, or ForeignFile for anything else."""
    try:
        fd = call("open", os.open, file, _OPEN_FILE, dir_fd=folder_fd)
    except StorageError as error:
        if error.errno_name in _FOREIGN:
            raise ForeignFile("not a regular file: left alone") from error
        raise
    try:
        found = call("fstat", os.fstat, fd)
        if not stat.S_ISREG(found.st_mode):
            raise ForeignFile("not a regular file: left alone")
        yield fd, found
    finally:
        os.close(fd)


def load_extent(fd: int, found: os.stat_result, *, decode: Decode = decode_header) -> FoundExtent:
    """The header of an open file, in agreement with its size. One that looks damaged is read a second time, from the
    device. Raises DamagedFile, UnknownFormat, StorageError."""
    try:
        return _load_extent(fd, found, decode)
    except DamagedFile:
        call("posix_fadvise", os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return _load_extent(fd, found, decode)


def _load_extent(fd: int, found: os.stat_result, decode: Decode) -> FoundExtent:
    header, header_bytes = load_header(fd, found.st_size, decode=decode)
    promised = header_bytes + header.payload_bytes
    if found.st_size != promised:
        raise DamagedFile(Reason.SHORT_FILE, f"{found.st_size} bytes long; its header says {promised}")
    return FoundExtent(header, header_bytes, promised, found.st_mtime)


def check_name(header: Header, name: ExtentName) -> None:
    """The header must say what the path says: a file that was moved or linked elsewhere is not used."""
    if header.group != name.group:
        raise DamagedFile(Reason.IDENTITY_MISMATCH, f"group: the file is of {header.group.hex()}")
    if header.fingerprint != name.fingerprint:
        raise DamagedFile(Reason.IDENTITY_MISMATCH, f"fingerprint: the file is of {header.fingerprint}")
    if header.rank != name.rank:
        raise DamagedFile(Reason.IDENTITY_MISMATCH, f"rank: the file is of {header.rank}")
    if key_at(header.keys, 0) != name.key:
        raise DamagedFile(Reason.KEY_MISMATCH, f"key: the file begins with {key_at(header.keys, 0).hex()}")


def load_header(fd: int, size: int, *, decode: Decode = decode_header) -> tuple[Header, int]:
    """Header and its length. Through the page cache, where a walk at start has left it, and without reading ahead."""
    call("posix_fadvise", os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_RANDOM)
    raw = _pread(fd, min(size, PAGE_BYTES), 0)
    prefix = decode_prefix(raw)
    if prefix.header_bytes > size:
        raise DamagedFile(Reason.SHORT_FILE, f"{size} bytes long; its header alone has {prefix.header_bytes}")
    if prefix.header_bytes > len(raw):
        raw += _pread(fd, prefix.header_bytes - len(raw), len(raw))
    return decode(raw), prefix.header_bytes


def _pread(fd: int, size: int, offset: int) -> bytes:
    parts = []
    while size:
        part = call("pread", os.pread, fd, size, offset)
        if not part:
            raise DamagedFile(Reason.SHORT_FILE, f"it ends at byte {offset}")
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return b"".join(parts)
