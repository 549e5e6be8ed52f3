"""Records of starts on disk: `starts/<13 digits>-<kind>.json`, one file a start, whole or absent.

They say how this node has started and what that cost; nothing depends on them. So what can't be read, or is of a newer
format, is left out, and the oldest go when there are many.
"""

from __future__ import annotations

import os
import re

import msgspec

from tierkv.core.starts import Start, StartKind
from tierkv.errors import ForeignFile, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import open_regular
from tierkv.storage.names import STARTS
from tierkv.storage.system_calls import call
from tierkv.storage.temp_file import write_small_file

MAX_STARTS = 64
"""Kept of the node's own, and as many of engines."""

MAX_RECORD_BYTES = 64 * 1024
FORMAT = 1

_NAME = re.compile(r"[0-9]{13,16}-(node|front|engine)\.json")


def write_start(directory: DataDirectory, start: Start) -> None:
    """In the place of what was kept of it. Durable when it returns. Raises StorageError."""
    name = f"{start.number:013d}-{start.kind}.json"
    write_small_file(directory, (STARTS,), name, msgspec.json.encode(start) + b"\n")


def prune_starts(directory: DataDirectory) -> None:
    """Remove the oldest beyond MAX_STARTS of each sort. Raises StorageError."""
    with directory.folder((STARTS,), create=True) as folder_fd:
        names = _names(folder_fd)
        engines = [name for name in names if name.endswith("-engine.json")]
        lives = [name for name in names if name not in engines]
        for name in (*engines[:-MAX_STARTS], *lives[:-MAX_STARTS]):
            call("unlink", os.unlink, name, dir_fd=folder_fd)


def read_starts(directory: DataDirectory) -> list[Start]:
    """The oldest first. Raises StorageError when the folder can't be read."""
    try:
        with directory.folder((STARTS,)) as folder_fd:
            found = [_read(folder_fd, name) for name in _names(folder_fd)]
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return []  # made by an earlier release, or just now
    return sorted((start for start in found if start is not None), key=lambda start: (start.began, start.number))


def _names(folder_fd: int) -> list[str]:
    """The oldest first. Numbers are of one length but for clocks that were set wildly."""
    names = [name for name in call("listdir", os.listdir, folder_fd) if _NAME.fullmatch(name)]
    return sorted(names, key=lambda name: int(name.partition("-")[0]))


def _read(folder_fd: int, name: str) -> Start | None:
    try:
        with open_regular(folder_fd, name) as (fd, _):
            content = call("read", os.read, fd, MAX_RECORD_BYTES)
        start = msgspec.json.decode(content, type=Start)
    except (StorageError, ForeignFile, msgspec.DecodeError):
        return None  # removed meanwhile, torn, or not ours: one start less to tell of
    is_named_so = (str(start.number), start.kind) == (
        str(int(name.partition("-")[0])),
        StartKind(name[:-5].partition("-")[2]),
    )
    return start if start.format == FORMAT and is_named_so else None
