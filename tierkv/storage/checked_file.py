"""Small files that say whether they are whole: BLAKE3 of the rest, 32 bytes | the rest. Made by rename, so a crash
leaves one whole or absent; what else can be wrong with it is told from its checksum."""

from __future__ import annotations

import os
from dataclasses import dataclass

from blake3 import blake3

from tierkv.core.reasons import Reason
from tierkv.errors import ForeignFile, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import open_regular
from tierkv.storage.names import Parts
from tierkv.storage.system_calls import call
from tierkv.storage.temp_file import write_small_file

_CHECKSUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a file is not what was written."""

    problem: str


def write_checked(directory: DataDirectory, folder: Parts, file: str, body: bytes) -> None:
    """In the place of what has that name. Durable when it returns. Raises StorageError."""
    write_small_file(directory, folder, file, blake3(body).digest() + body)


def read_checked(folder_fd: int, file: str, max_bytes: int) -> bytes | Unusable:
    """What was written. One with more than `max_bytes` is none of ours. Raises StorageError when it can't be read."""
    try:
        with open_regular(folder_fd, file) as (fd, found):
            raw = _read_whole(fd, min(found.st_size, max_bytes + _CHECKSUM_BYTES + 1))
    except ForeignFile as error:
        return Unusable(str(error))
    body = raw[_CHECKSUM_BYTES:]
    if len(body) > max_bytes or blake3(body).digest() != raw[:_CHECKSUM_BYTES]:
        return Unusable("its checksum is wrong")
    return body


def remove_checked(directory: DataDirectory, folder: Parts, file: str) -> None:
    """Durable when it returns; one that is not there is fine. Raises StorageError."""
    if directory.read_only:
        raise StorageError("unlink", "EROFS", Reason.READ_ONLY, f"{directory.path} is used read only")
    with directory.folder(folder, create=True) as folder_fd:
        try:
            call("unlink", os.unlink, file, dir_fd=folder_fd)
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
    directory.flush(folder)


def _read_whole(fd: int, num_bytes: int) -> bytes:
    parts = []
    while num_bytes and (part := call("read", os.read, fd, num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
