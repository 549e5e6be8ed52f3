"""Digests of weight files, remembered between runs, so that only the first start reads all of a model.

    digests/<device>-<inode>.json        stat and digest of one file

A digest is used again only for exactly the same (device, inode, size, mtime, ctime), and remembered only when ctime was
more than two seconds older than the start of hashing: within the granularity of a clock a file can change and look the
same. Several processes may use it at a time, engines too. It is a memory, not a record: garbage in it is ignored and
written over, and where it can't be read or written, files are hashed again.
"""

from __future__ import annotations

import logging
import os

import msgspec
from blake3 import blake3

from tierkv.errors import ForeignFile, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import open_regular
from tierkv.storage.names import DIGESTS
from tierkv.storage.system_calls import call
from tierkv.storage.temp_file import write_small_file
from tierkv.storage.weight_files import FileStat

SETTLED_NS = 2_000_000_000
MAX_ENTRIES = 4_096
_MAX_FILE_BYTES = 4_096

log = logging.getLogger(__name__)


class _Entry(msgspec.Struct, frozen=True):
    stat: FileStat
    digest: str
    check: str  # against rotten bits: a wrong digest would look like another model


class DigestMemory:
    """The digests in an open data directory, which stays the caller's to close."""

    def __init__(self, directory: DataDirectory) -> None:
        self._directory = directory

    def recall(self, stat: FileStat) -> bytes | None:
        """The digest of the file that has this stat; None when it isn't known."""
        try:
            with self._directory.folder((DIGESTS,)) as folder_fd, open_regular(folder_fd, _file(stat)) as (fd, _):
                raw = call("read", os.read, fd, _MAX_FILE_BYTES)
            entry = msgspec.json.decode(raw, type=_Entry)
            digest = bytes.fromhex(entry.digest)
        except StorageError as error:
            if error.errno_name != "ENOENT":
                log.warning("remembered digests can't be read, hashing again: %s", error)
            return None
        except (ForeignFile, msgspec.DecodeError, ValueError, RecursionError):
            return None
        return digest if entry.stat == stat and entry.check == _check(stat, digest) else None

    def remember(self, stat: FileStat, digest: bytes, *, started_ns: int) -> bool:
        """Keep a digest whose making began at `started_ns` (wall clock); says whether it was kept."""
        if stat.ctime_ns + SETTLED_NS >= started_ns:
            return False
        entry = _Entry(stat, digest.hex(), _check(stat, digest))
        try:
            write_small_file(self._directory, (DIGESTS,), _file(stat), msgspec.json.encode(entry))
            self._forget_oldest()
        except StorageError as error:
            log.warning("the digest of a weight file is not remembered: %s", error)
            return False
        return True

    def _forget_oldest(self) -> None:
        with self._directory.folder((DIGESTS,)) as fd:
            files = [file for file in call("listdir", os.listdir, fd) if file.endswith(".json")]
            if len(files) <= MAX_ENTRIES:
                return
            aged = sorted(files, key=lambda file: _modified(fd, file))
            for file in aged[: len(files) - MAX_ENTRIES]:
                call("unlink", os.unlink, file, dir_fd=fd)


def _file(stat: FileStat) -> str:
    return f"{stat.device:x}-{stat.inode:x}.json"


def _check(stat: FileStat, digest: bytes) -> str:
    numbers = (stat.device, stat.inode, stat.size, stat.mtime_ns, stat.ctime_ns)
    packed = b"".join(number.to_bytes(16, "little", signed=True) for number in numbers)
    return blake3(b"tierkv digest 1" + packed + digest).hexdigest()


def _modified(folder_fd: int, file: str) -> float:
    return call("stat", os.stat, file, dir_fd=folder_fd, follow_symlinks=False).st_mtime
