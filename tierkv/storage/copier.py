"""One extent's file, copied from one directory to another: its blocks as they are, proven on the way, whole under its
name or absent.

    NVMe file -> header against the order -> what has the name on disk?
        nothing                                  copied, and put there if there is nothing still
        the same blocks, or more of them         read; taken over as it is where all of it is right, else replaced
        the first of these blocks                copied, and put in its place
        blocks that go on otherwise              name_taken
        a damaged file                           copied, and put in its place
        a file of a newer version, or foreign    left: name_taken

    copy     tmp/<unique> <- header, blocks hashed beside -> compared with the header's checksums -> flush -> name
    recode   where the target is written in another codec: blocks read and proven -> encoded, and decoded again -> the
             file -> compared with the source's checksums -> flush -> name

Where nodes share the target, two of them may want one name at the same moment. A name that was free is taken by making
it, which only one of them can; the other looks again. A shorter file is replaced by renaming, a moment after it was
looked at: in that moment a still longer one may have come, and is then replaced by a shorter one. That costs blocks,
and never makes one wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import Enum

import msgspec

from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import Demote
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, ForeignFile, OtherExtent, StorageError, UnknownFormat
from tierkv.storage.codec_names import PLAIN, FileCodec
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import Verified, WrittenFile, check_expected, require_ours, verify_file
from tierkv.storage.extent_header import FoundExtent, check_name, load_extent, open_regular, read_header_at
from tierkv.storage.format import Header, decode_intact, stored_bytes
from tierkv.storage.names import ExtentName
from tierkv.storage.payload import plan_content, read_payload, write_content
from tierkv.storage.system_calls import Failure, call
from tierkv.storage.temp_file import TempFile
from tierkv.storage.transfer import BlockFile, copy_blocks, mapped_pages

__all__ = ["copy_extent"]

ATTEMPTS = 3
"""How often a name that another node has taken meanwhile is looked at again."""

COARSE_SECONDS = 600.0
_NO_TIMES = ("EPERM", "EOPNOTSUPP", "ENOTSUP", "ENOSYS")

Reached = Callable[[str], None]


class _Name(Enum):
    """What has the name in the target, where that is not a file to be taken over."""

    FREE = 1
    TO_REPLACE = 2
    TAKEN = 3


_There = FoundExtent | _Name | Reason
"""A file that may be taken over, or why one that is damaged is not."""


class _SourceFailed(Exception):
    """The file can't be copied, for a cause that says nothing about the target."""

    def __init__(self, reason: Reason, problem: str) -> None:
        super().__init__(problem)
        self.failure = Failure(reason, "copy", "", f"the file to be copied: {problem}")


class _NameChanged(Exception):
    """Another node was quicker."""


def copy_extent(
    source: DataDirectory,
    target: DataDirectory,
    demote: Demote,
    *,
    identity: Identity | None = None,
    reached: Reached = lambda stage: None,
) -> WrittenFile | Failure:
    """Copy a file, or take over the one that is there, in whichever codec that is. `identity` is that of the group;
    where it is not known, the copy is in the source's codec.

    A Failure leaves no file of ours behind, and what had the name as it was. One without an errno says nothing about
    the target: the source is damaged (its reason says how), gone (not_found) or can't be read, or the name is taken.
    `reached` is told "temp_written", "before_rename" and "renamed", for tests that kill a process there.
    """
    name = ExtentName.of(demote)
    try:
        for _ in range(ATTEMPTS):
            try:
                return _copy_once(source, target, demote, name, identity, reached)
            except _NameChanged:
                continue
    except _SourceFailed as error:
        return error.failure
    except StorageError as error:
        return _target_failed(error)
    except UnknownFormat as error:
        return Failure(Reason.NAME_TAKEN, "rename", "", f"{name} is of another version and was left: {error}")
    except ForeignFile as error:
        return Failure(Reason.NAME_TAKEN, "rename", "", f"{name}: {error}")
    return Failure(Reason.NAME_TAKEN, "rename", "", f"{name} was taken by others {ATTEMPTS} times")


def _target_failed(error: StorageError) -> Failure:
    """A folder that somebody took away: not_found would say that the source is gone."""
    reason = Reason.IO_ERROR if error.reason == Reason.NOT_FOUND else Reason(error.reason)
    return Failure(reason, error.operation, error.errno_name, error.problem)


def _copy_once(
    source: DataDirectory,
    target: DataDirectory,
    demote: Demote,
    name: ExtentName,
    identity: Identity | None,
    reached: Reached,
) -> WrittenFile | Failure:
    with ExitStack() as opened:
        fd, extent = _open_source(opened, source, demote, name, identity)
        there = _look(target, demote, name, identity)
        damaged = there if isinstance(there, Reason) else None
        if isinstance(there, FoundExtent):
            seen = _read_whole(target, name)
            if seen.reason is None:
                _refresh(target, name, there, demote.last_used)
                return WrittenFile(there.file_bytes, target.unflushed(name.folder), there.header.keys)
            damaged = seen.reason if seen.damaged else None
        if there is _Name.TAKEN:
            return Failure(Reason.NAME_TAKEN, "rename", "", f"{name} is there, with blocks that go on otherwise")
        temp = opened.enter_context(TempFile(target, direct=True))
        from_file = _SourceFile(source, fd, 0)
        if identity is not None and _is_recoded(extent.header, target):
            num_bytes = _recode(from_file, temp.fd, extent, target, identity.layout)
        else:
            num_bytes = extent.file_bytes
            _copy_proven(from_file, BlockFile(target, temp.fd, 0), extent, target)
        _set_last_use(temp.fd, demote.last_used)
        temp.flush()
        reached("temp_written")
        reached("before_rename")
        if there is _Name.FREE:
            if not temp.publish_new(name.folder, name.file):
                raise _NameChanged
        else:
            temp.publish(
                name.folder, name.file, refuse=lambda folder_fd: _require_same(folder_fd, demote, name, identity, there)
            )
        reached("renamed")
    return WrittenFile(num_bytes, target.unflushed(name.folder), extent.header.keys, damaged)


# ---- the source


class _SourceFile(BlockFile):
    def read(self, views: list[memoryview]) -> None:
        """Raises _SourceFailed, and DamagedFile where the file ends too early."""
        try:
            super().read(views)
        except StorageError as error:
            raise _source_failed(error) from error


def _open_source(
    opened: ExitStack, source: DataDirectory, demote: Demote, name: ExtentName, identity: Identity | None
) -> tuple[int, FoundExtent]:
    try:
        folder_fd = opened.enter_context(source.folder(name.folder))
        fd, found = opened.enter_context(open_regular(folder_fd, name.file))
        extent = load_extent(fd, found)
        check_name(extent.header, name)
        check_expected(extent.header, demote, identity)
    except (StorageError, DamagedFile, UnknownFormat, ForeignFile) as error:
        raise _source_failed(error) from error
    return fd, extent


def _source_failed(error: StorageError | DamagedFile | UnknownFormat | ForeignFile) -> _SourceFailed:
    match error:
        case StorageError() | DamagedFile():
            return _SourceFailed(Reason(error.reason), str(error))
        case UnknownFormat() | ForeignFile():  # nothing of ours under that name
            return _SourceFailed(Reason.NOT_FOUND, str(error))


def _copy_proven(source: BlockFile, temp: BlockFile, extent: FoundExtent, target: DataDirectory) -> None:
    """Header and blocks. What is not what its checksum says is read a second time, from the device. Raises
    _SourceFailed, StorageError."""
    try:
        _copy_header(source, temp, extent)
        if not _copy_blocks(source, temp, extent, target):
            source.look_again(extent.header_bytes)
            temp.offset = extent.header_bytes
            if not _copy_blocks(source, temp, extent, target):
                raise DamagedFile(Reason.CHECKSUM, "blocks are not what their checksums say")
    except DamagedFile as error:
        raise _source_failed(error) from error


def _copy_header(source: BlockFile, temp: BlockFile, extent: FoundExtent) -> None:
    pages = mapped_pages(extent.header_bytes)
    source.read([pages])
    if decode_intact(pages) != extent.header:
        raise DamagedFile(Reason.BAD_HEADER, "it was changed while it was read")
    temp.write([pages])


def _copy_blocks(source: BlockFile, temp: BlockFile, extent: FoundExtent, target: DataDirectory) -> bool:
    """Whether the blocks that were copied are what the header says."""
    header = extent.header
    digests = copy_blocks(source, temp, list(map(stored_bytes, header.block_lengths())), target.hashers)
    return b"".join(digests) == (header.stored_checksums or header.checksums)


def _is_recoded(header: Header, target: DataDirectory) -> bool:
    return (header.codec == PLAIN) != (target.codec is FileCodec.RAW)


def _recode(source: BlockFile, temp_fd: int, extent: FoundExtent, target: DataDirectory, layout: Layout) -> int:
    """The same blocks in the target's codec, proven by the source's checksums when they are read, when they are encoded
    and when they are written. The length of the file. Raises _SourceFailed, StorageError."""
    header = extent.header
    pages = mapped_pages(header.num_blocks * header.stored_block_bytes)
    size = header.stored_block_bytes
    slots = [pages[start : start + size] for start in range(0, len(pages), size)]
    source.offset = extent.header_bytes
    valid, problem = read_payload(source, header, 0, slots, target.hashers)
    if problem is not None:
        raise _source_failed(problem)
    plain = msgspec.structs.replace(header, codec=PLAIN, lengths=b"", stored_checksums=b"")
    blocks = [[slot] for slot in slots[:valid]]
    content = plan_content(target.codec, plain, blocks, layout, target.hashers, prove=True)
    num_bytes, written = write_content(target, temp_fd, content)
    if written.checksums != header.checksums:
        raise _source_failed(DamagedFile(Reason.CHECKSUM, "blocks have changed in memory while they were encoded"))
    return num_bytes


# ---- the target


def _look(target: DataDirectory, demote: Demote, name: ExtentName, identity: Identity | None) -> _There:
    """Raises StorageError, and UnknownFormat or ForeignFile for what is to be left."""
    try:
        with target.folder(name.folder) as folder_fd:
            return _look_in(folder_fd, demote, name, identity)
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return _Name.FREE


def _look_in(folder_fd: int, demote: Demote, name: ExtentName, identity: Identity | None) -> _There:
    try:
        require_ours(folder_fd, name.file)
        found = read_header_at(folder_fd, name)
        check_expected(found.header, demote, identity)
    except OtherExtent:
        return _Name.TO_REPLACE if demote.keys.startswith(found.header.keys) else _Name.TAKEN
    except DamagedFile as error:
        return Reason(error.reason)
    except StorageError as error:
        if error.errno_name != "EIO":  # what can't be read is of no use to anybody
            raise
        return _Name.TO_REPLACE
    return found


def _read_whole(target: DataDirectory, name: ExtentName) -> Verified:
    """Whether a file that was found is right to its last block. The file on NVMe is given up for it, so what its header
    says is not enough. Raises _NameChanged where it is gone."""
    seen = verify_file(target, name)
    if seen.reason is Reason.NOT_FOUND:
        raise _NameChanged
    return seen


def _require_same(folder_fd: int, demote: Demote, name: ExtentName, identity: Identity | None, seen: _There) -> None:
    """Still to be replaced, as it was `seen`, or gone. Raises _NameChanged."""
    try:
        there = _look_in(folder_fd, demote, name, identity)
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return
    if there is not _Name.TO_REPLACE and not isinstance(there, Reason) and there != seen:
        raise _NameChanged


def _set_last_use(fd: int, last_used: float) -> None:
    """Where the file system lets nobody set times, it was used when it was copied."""
    try:
        call("utime", os.utime, fd, (last_used, last_used))
    except StorageError as error:
        if error.errno_name not in _NO_TIMES:
            raise


def _refresh(target: DataDirectory, name: ExtentName, there: FoundExtent, last_used: float) -> None:
    """It was used here as well. That it is older by a while does no harm."""
    if there.modified + COARSE_SECONDS >= last_used:
        return
    with suppress(StorageError), target.folder(name.folder) as folder_fd:
        call("utime", os.utime, name.file, (last_used, last_used), dir_fd=folder_fd, follow_symlinks=False)
