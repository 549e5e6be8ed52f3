"""Purges under way, on disk: what is to go is written down before anything goes, and crossed out when it is gone.

    purges/<32 hex>         a checked file: MessagePack of a PurgeRecord
    disk-purges/<32 hex>    the same, where there is or was a disk tier: what its directory is still to be swept for

A crash leaves a record whole or absent. It holds digests and counts, no salt and no tokens. At
a start, what is recorded is removed before a row of it is told to anybody. A record that is there and can't be read
says that something is to go and not what: then nothing is served, until an operator has removed the record and asked
for the purge anew. To go on as if it were not there would hand out what somebody was about to be rid of.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import msgspec

from tierkv.core.instructions import PurgeAbout, PurgeScope
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.checked_file import Unusable, read_checked, remove_checked, write_checked
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import DISK_PURGES, PURGES
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


@dataclass(frozen=True, slots=True)
class PurgeRecords:
    """The records that one tier is to be swept by. They are the node's own, whatever directory is swept."""

    directory: DataDirectory
    folder: str = PURGES

    def read(self) -> list[PurgeRecord]:
        return read_records(self.directory, self.folder)

    def remove(self, purge: bytes) -> None:
        remove_record(self.directory, purge, self.folder)


def write_record(directory: DataDirectory, record: PurgeRecord, *, nvme: bool = True, disk: bool | None = None) -> None:
    """For each tier that is to be swept; `disk` None: if this node has had a disk tier. Durable when it returns. Raises
    StorageError."""
    if disk:
        with directory.folder((DISK_PURGES,), create=True):
            pass
    if disk or (disk is None and _has_folder(directory, DISK_PURGES)):
        _write(directory, DISK_PURGES, record)
    if nvme:
        _write(directory, PURGES, record)


def _write(directory: DataDirectory, folder: str, record: PurgeRecord) -> None:
    write_checked(directory, (folder,), record.purge.hex(), msgspec.msgpack.encode(record))


def _has_folder(directory: DataDirectory, name: str) -> bool:
    try:
        with directory.folder((name,)):
            return True
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return False


def read_records(directory: DataDirectory, folder: str = PURGES) -> list[PurgeRecord]:
    """Those that are under way. Raises DataDirectoryError for one that is damaged, StorageError when the folder or a
    record can't be read now. What has not a name of ours is left alone."""
    try:
        with directory.folder((folder,)) as folder_fd:
            names = sorted(name for name in call("listdir", os.listdir, folder_fd) if _NAME.fullmatch(name))
            return [_read(directory, folder, folder_fd, name) for name in names]
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return []


def remove_record(directory: DataDirectory, purge: bytes, folder: str = PURGES) -> None:
    """The purge is through. Durable when it returns; one that is not there is fine. Raises StorageError."""
    remove_checked(directory, (folder,), purge.hex())


def _read(directory: DataDirectory, folder: str, folder_fd: int, name: str) -> PurgeRecord:
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
        f"{directory.path / folder / name} can't be read ({problem}): it says what a purge was to remove, and without"
        " it nobody knows; remove that file, start the node, and ask for the purge again"
    )
