"""Purges under way, on disk: what is to go is written down before anything goes, and crossed out when it is gone.

    purges/<32 hex>      a checked file: MessagePack of a PurgeRecord

A crash leaves a record whole or absent. It holds digests and counts, no salt and no tokens. At
a start, what is recorded is removed before a row of it is told to anybody. A record that is there and can't be read
says that something is to go and not what: then nothing is served, until an operator has removed the record and asked
for the purge anew. To go on as if it were not there would hand out what somebody was about to be rid of.
"""

from __future__ import annotations

import os
import re

import msgspec

from tierkv.core.instructions import PurgeAbout, PurgeScope
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.checked_file import Unusable, read_checked, remove_checked, write_checked
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import PURGES
from tierkv.storage.system_calls import call

RECORD_FORMAT = 1
MAX_RECORD_BYTES = 64 * 2**20
"""Two million extents: more than a node holds, and no more than is read at once."""

_NAME = re.compile(r"[0-9a-f]{32}")


class PurgeRecord(msgspec.Struct, frozen=True):
    purge: bytes
    scope: PurgeScope
    about: PurgeAbout
    format: int = RECORD_FORMAT


def write_record(directory: DataDirectory, record: PurgeRecord) -> None:
    """Durable when it returns. Raises StorageError."""
    write_checked(directory, (PURGES,), record.purge.hex(), msgspec.msgpack.encode(record))


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
    remove_checked(directory, (PURGES,), purge.hex())


def _read(directory: DataDirectory, folder_fd: int, name: str) -> PurgeRecord:
    body = read_checked(folder_fd, name, MAX_RECORD_BYTES)
    if isinstance(body, Unusable):
        problem = body.problem
    else:
        try:
            record = msgspec.msgpack.decode(body, type=PurgeRecord)
        except msgspec.DecodeError as error:
            problem = str(error)
        else:
            if record.format == RECORD_FORMAT and record.purge.hex() == name:
                return record
            problem = f"it is of format {record.format}, for {record.purge.hex()}"
    raise DataDirectoryError(
        f"{directory.path / PURGES / name} can't be read ({problem}): it says what a purge was to remove, and without"
        " it nobody knows; remove that file, start the node, and ask for the purge again"
    )
