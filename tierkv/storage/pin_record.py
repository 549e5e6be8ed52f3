"""Pins on disk, so that a start finds them.

    pins/<32 hex>        a checked file: MessagePack of a PinRecord and its format

A record holds digests, an owner and times; no salt and no tokens. One that can't be understood is left where it is and
named: nothing is lost with it but a wish, and whoever had it can have it again.
"""

from __future__ import annotations

import logging
import os
import re

import msgspec

from tierkv.core.instructions import PinRecord
from tierkv.errors import StorageError
from tierkv.storage.checked_file import Unusable, read_checked, remove_checked, write_checked
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import PINS
from tierkv.storage.system_calls import call

PIN_FORMAT = 1
MAX_RECORD_BYTES = 4 * 2**20
"""A pin of as many blocks as a request may have takes half of that."""

_NAME = re.compile(r"[0-9a-f]{32}")

log = logging.getLogger(__name__)


class _File(msgspec.Struct, frozen=True):
    record: PinRecord
    format: int = PIN_FORMAT


def write_pin(directory: DataDirectory, record: PinRecord) -> None:
    """Durable when it returns. Raises StorageError."""
    write_checked(directory, (PINS,), record.pin.hex(), msgspec.msgpack.encode(_File(record)))


def remove_pin(directory: DataDirectory, pin: bytes) -> None:
    """Durable when it returns; one that is not there is fine. Raises StorageError."""
    remove_checked(directory, (PINS,), pin.hex())


def read_pins(directory: DataDirectory) -> tuple[list[PinRecord], int]:
    """The pins, the oldest first, and how many records could not be understood or read; the log says which. What has
    not a name of ours is left alone."""
    records, bad = [], 0
    try:
        with directory.folder((PINS,)) as folder_fd:
            for name in sorted(filter(_NAME.fullmatch, call("listdir", os.listdir, folder_fd))):
                found = _read(folder_fd, name)
                if isinstance(found, PinRecord):
                    records.append(found)
                else:
                    bad += 1
                    path = directory.path / PINS / name
                    log.warning("%s is no pin that can be read (%s): remove it, and pin again", path, found.problem)
    except StorageError as error:
        if error.errno_name != "ENOENT":
            bad += 1
            log.warning("no pin is known: %s can't be read: %s", directory.path / PINS, error)
    return sorted(records, key=lambda record: record.made), bad


def _read(folder_fd: int, name: str) -> PinRecord | Unusable:
    try:
        body = read_checked(folder_fd, name, MAX_RECORD_BYTES)
    except StorageError as error:
        return Unusable(str(error))
    if isinstance(body, Unusable):
        return body
    try:
        file = msgspec.msgpack.decode(body, type=_File)
    except msgspec.DecodeError as error:
        return Unusable(str(error))
    if file.format != PIN_FORMAT or file.record.pin.hex() != name:
        return Unusable(f"it is of format {file.format}, for {file.record.pin.hex()}")
    return file.record
