"""Purges under way, on disk: what is to go is written down before anything goes, and crossed out when it is gone.

    purges/<32 hex>      BLAKE3 of the rest, 32 bytes | MessagePack of a PurgeRecord

A record is made by rename, so a crash leaves it whole or absent. It holds digests and counts, no salt and no tokens. At
a start, what is recorded is removed before a row of it is told to anybody. A record that is there and can't be read
says that something is to go and not what: then nothing is served, until an operator has removed the record and asked
for the purge anew. To go on as if it were not there would hand out what somebody was about to be rid of.
"""

from __future__ import annotations

import os
import re

import msgspec
from blake3 import blake3

from tierkv.core.instructions import PurgeAbout, PurgeScope
from tierkv.errors import DataDirectoryError, ForeignFile, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import open_regular
from tierkv.storage.names import PURGES
from tierkv.storage.system_calls import call
from tierkv.storage.temp_file import write_small_file

RECORD_FORMAT = 1
MAX_RECORD_BYTES = 64 * 2**20
"""Two million extents: more than a node holds, and no more than is read at once."""

_CHECKSUM_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{32}")


class PurgeRecord(msgspec.Struct, frozen=True):
    purge: bytes
    scope: PurgeScope
    about: PurgeAbout
    format: int = RECORD_FORMAT


def write_record(directory: DataDirectory, record: PurgeRecord) -> None:
    """Durable when it returns. Raises StorageError."""
    body = msgspec.msgpack.encode(record)
    write_small_file(directory, (PURGES,), record.purge.hex(), blake3(body).digest() + body)


def read_records(directory: DataDirectory) -> list[PurgeRecord]:
    """Those that are under way. Raises DataDirectoryError for one that is damaged, StorageError when the folder or a
    record can't be read now. What has not a name of ours is left alone."""
    try:
        with directory.folder((PURGES,)) as folder_fd:
            names = sorted(name for name in call("listdir", os.listdir, folder_fd) if _NAME.fullmatch(name))
            return [_read(directory, folder_fd, name) for name in names]
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return []


def remove_record(directory: DataDirectory, purge: bytes) -> None:
    """The purge is through. Durable when it returns; one that is not there is fine. Raises StorageError."""
    with directory.folder((PURGES,), create=True) as folder_fd:
        try:
            call("unlink", os.unlink, purge.hex(), dir_fd=folder_fd)
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
    directory.flush((PURGES,))


def _read(directory: DataDirectory, folder_fd: int, name: str) -> PurgeRecord:
    problem = ""
    try:
        with open_regular(folder_fd, name) as (fd, found):
            raw = _read_whole(fd, found.st_size)
    except ForeignFile as error:
        problem = str(error)
    else:
        if blake3(raw[_CHECKSUM_BYTES:]).digest() == raw[:_CHECKSUM_BYTES]:
            try:
                record = msgspec.msgpack.decode(raw[_CHECKSUM_BYTES:], type=PurgeRecord)
            except msgspec.DecodeError as error:
                problem = str(error)
            else:
                if record.format == RECORD_FORMAT and record.purge.hex() == name:
                    return record
                problem = f"it is of format {record.format}, for {record.purge.hex()}"
        else:
            problem = "its checksum is wrong"
    raise DataDirectoryError(
        f"{directory.path / PURGES / name} can't be read ({problem}): it says what a purge was to remove, and without"
        " it nobody knows; remove that file, start the node, and ask for the purge again"
    )


def _read_whole(fd: int, num_bytes: int) -> bytes:
    """As much of the file as there is, up to a byte more than a record may have."""
    parts = []
    left = min(num_bytes, MAX_RECORD_BYTES + 1)
    while left and (part := call("read", os.read, fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
