"""Reading many headers: the work of one process of several, and what it says about each file.

`python -m tierkv.storage.header_reader DIRECTORY KIND` takes jobs on its standard input and answers each on its
standard output, both as u32 length | MessagePack. It ends at the end of its input. It writes nothing to the directory.
"""

from __future__ import annotations

import os
import struct
import sys
from contextlib import ExitStack
from enum import StrEnum
from typing import BinaryIO

import msgspec

from tierkv.core.instructions import ExtentRow
from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, ForeignFile, StorageError, UnknownFormat
from tierkv.storage.directory import PAGE_BYTES, DataDirectory, Kind
from tierkv.storage.extent_header import check_name, load_extent, open_regular
from tierkv.storage.format import decode_intact
from tierkv.storage.index_row import IndexedFile, Namespace
from tierkv.storage.names import ExtentName
from tierkv.storage.system_calls import call

FRAME = struct.Struct("<I")
FILES_AHEAD = 64


class HeaderJob(msgspec.Struct, frozen=True, array_like=True):
    """Files of one folder whose headers are wanted: packed keys, the first byte of all of them naming the folder.
    Times later than `now` are taken for `now`."""

    fingerprint: str
    group: bytes
    rank: int
    keys: bytes
    now: float

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.fingerprint, self.group, self.rank)

    @property
    def num_files(self) -> int:
        return len(self.keys) // KEY_BYTES

    def split_keys(self) -> list[bytes]:
        return [self.keys[start : start + KEY_BYTES] for start in range(0, len(self.keys), KEY_BYTES)]


class Outcome(StrEnum):
    """Why a file gives no row."""

    DAMAGED = "damaged"
    UNKNOWN_FORMAT = "unknown_format"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"  # an error that may pass: it stays, and is tried again at the next start
    GONE = "gone"


class Unusable(msgspec.Struct, frozen=True, array_like=True, tag="unusable"):
    key: bytes
    outcome: Outcome
    reason: Reason
    problem: str


class Usable(msgspec.Struct, frozen=True, array_like=True, tag="usable", gc=False):
    file: IndexedFile


Finding = Usable | Unusable


def read_headers(directory: DataDirectory, job: HeaderJob) -> list[Finding]:
    """What each file of the job is, in their order."""
    names = [job.namespace.extent(key) for key in job.split_keys()]
    if not names:
        return []
    findings: list[Finding] = []
    try:
        with directory.folder(names[0].folder) as folder_fd:
            for start in range(0, len(names), FILES_AHEAD):
                findings += _read_together(folder_fd, names[start : start + FILES_AHEAD], job.now)
    except StorageError as error:
        findings += [_unusable(name, error) for name in names[len(findings) :]]
    return findings


def _read_together(folder_fd: int, names: list[ExtentName], now: float) -> list[Finding]:
    """All headers are asked for before the first one is waited for: a disk has many in flight as fast as one."""
    with ExitStack() as opened:
        files: list[tuple[int, os.stat_result] | Unusable] = []
        for name in names:
            try:
                fd, status = opened.enter_context(open_regular(folder_fd, name.file))
                call("posix_fadvise", os.posix_fadvise, fd, 0, PAGE_BYTES, os.POSIX_FADV_WILLNEED)
                files.append((fd, status))
            except (StorageError, ForeignFile) as error:
                files.append(_unusable(name, error))
        return [
            file if isinstance(file, Unusable) else _find(name, *file, now)
            for name, file in zip(names, files, strict=True)
        ]


def _find(name: ExtentName, fd: int, status: os.stat_result, now: float) -> Finding:
    try:
        header = load_extent(fd, status, decode=decode_intact).header
        check_name(header, name)
    except (StorageError, DamagedFile, UnknownFormat) as error:
        return _unusable(name, error)
    created = min(header.created, now)
    row = ExtentRow(
        key=name.key,
        parent=header.parent,
        first_token=header.first_token,
        keys=header.keys,
        block_bytes=header.block_bytes,
        file_bytes=status.st_size,
        created=created,
        last_used=min(max(status.st_mtime, created), now),
        hits=0,
    )
    return Usable(IndexedFile(row, status.st_ino, status.st_ctime_ns))


def _unusable(name: ExtentName, error: StorageError | DamagedFile | UnknownFormat | ForeignFile) -> Unusable:
    match error:
        case DamagedFile():
            return Unusable(name.key, Outcome.DAMAGED, Reason(error.reason), error.problem)
        case UnknownFormat():
            return Unusable(name.key, Outcome.UNKNOWN_FORMAT, Reason.UNKNOWN_FORMAT, str(error))
        case ForeignFile():
            return Unusable(name.key, Outcome.FOREIGN, Reason.NOT_FOUND, str(error))
        case StorageError():
            outcome = Outcome.GONE if error.reason == Reason.NOT_FOUND else Outcome.UNREADABLE
            return Unusable(name.key, outcome, Reason(error.reason), str(error))


def encode_frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return FRAME.pack(len(body)) + body


def _read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body; None at the end of the stream, also in the middle of a frame: its sender is gone."""
    prefix = stream.read(FRAME.size)
    if len(prefix) < FRAME.size:
        return None
    num_bytes: int = FRAME.unpack(prefix)[0]
    body = stream.read(num_bytes)
    return body if len(body) == num_bytes else None


def main(path: str, kind: Kind) -> None:
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    decode = msgspec.msgpack.Decoder(HeaderJob).decode
    with DataDirectory.open(path, create=False, writable=False, kind=kind) as directory:
        while (body := _read_frame(jobs)) is not None:
            answers.write(encode_frame(read_headers(directory, decode(body))))
            answers.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1], Kind(sys.argv[2]))
    except BrokenPipeError:
        os._exit(0)  # whoever asked is gone
