"""One extent, one file: written whole or not at all, and read back only as what it was written as.

    write    tmp/<unique> -> blocks straight from the arena, hashed beside -> header -> fdatasync -> rename
    read     header against the tree -> blocks straight into the arena, hashed beside -> how many are proven

A file is durable once the directories that `write_extent` names have been flushed, which the caller does for many
files together. Operations on one extent must come one after the other; different extents need no order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from tierkv.core.identity import Identity
from tierkv.core.instructions import Demote, Read, Write
from tierkv.core.keys import count_keys
from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant, DamagedFile, ForeignFile, OtherExtent, StorageError, UnknownFormat
from tierkv.storage.codec_names import PLAIN
from tierkv.storage.directory import PAGE_BYTES, DataDirectory
from tierkv.storage.extent_header import (
    FoundExtent,
    check_name,
    load_extent,
    load_header,
    open_regular,
    read_header,
    read_header_at,
)
from tierkv.storage.format import (
    CHECKSUM_BYTES,
    PLAIN_VERSION,
    PREFIX_BYTES,
    Header,
    decode_intact,
    decode_prefix,
    describe_layout,
    stored_bytes,
)
from tierkv.storage.names import ExtentName, Parts
from tierkv.storage.payload import Views, count_intact, plan_content, read_payload, write_content
from tierkv.storage.system_calls import Failure, call
from tierkv.storage.temp_file import TempFile
from tierkv.storage.transfer import BlockFile, mapped_pages

__all__ = [
    "write_extent",
    "WrittenFile",
    "read_blocks",
    "ReadOutcome",
    "read_header",
    "read_header_at",
    "FoundExtent",
    "verify_file",
    "Verified",
    "remove_extent",
    "unlink_extent",
    "require_ours",
    "check_expected",
    "remove_if_empty",
]

Deviation = StorageError | DamagedFile | UnknownFormat | ForeignFile


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """`file_bytes` lie under the extent's name, and hold the blocks of `keys`; `flush` are the directories whose flush
    makes that durable. `damaged`: why a file that had the name before was of no use to anybody."""

    file_bytes: int
    flush: tuple[Parts, ...]
    keys: bytes
    damaged: Reason | None = None


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """`valid` blocks, from the first asked for, are in their slots and proven; behind them slots hold anything.

    Fewer than asked: `reason` and `problem` say why. `damaged`: the file is not what it should be and is to be set
    aside; otherwise it stays (a passing error, a newer format, nothing of ours under that name). `failure` is there
    when a call failed, for counting, also where a second try went better. `tokens` and `extras` are the header's, of
    the whole file; empty without a header.
    """

    valid: int
    reason: Reason | None = None
    problem: str = ""
    damaged: bool = False
    failure: Failure | None = None
    tokens: bytes = b""
    extras: dict[int, list[bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verified:
    """`valid` of `blocks` are intact, counted from the first. The rest as in ReadOutcome."""

    valid: int
    blocks: int
    file_bytes: int
    reason: Reason | None = None
    problem: str = ""
    damaged: bool = False
    failure: Failure | None = None

    @property
    def is_worth_telling(self) -> bool:
        """It is damaged or can't be read. A file that went away meanwhile is fine, and an unknown format is not ours to
        judge."""
        return self.damaged or (self.failure is not None and self.reason != Reason.NOT_FOUND)


# ---- writing


def write_extent(
    directory: DataDirectory,
    arena: memoryview,
    write: Write,
    *,
    identity: Identity,
    reached: Callable[[str], None] = lambda stage: None,
) -> WrittenFile | Failure:
    """Write a sealed extent from its slots to its file, replacing a file of that name.

    `identity` is that of the group. The slots must not change meanwhile. Bytes of the last page of a slot that are not
    the block's are not written; zeros are. `reached` is told "temp_written", "before_rename" and "renamed", for tests
    that kill a process there. A Failure leaves no file of ours behind, and an earlier file as it was.
    """
    name = ExtentName.of(write)
    blocks = _blocks_to_write(arena, write)
    try:
        header = _header_of(write, identity)
        content = plan_content(directory.codec, header, blocks, identity.layout, directory.hashers)
    except DamagedFile as error:
        return Failure(Reason(error.reason), "encode", "", error.problem)
    try:
        with TempFile(directory, direct=True) as temp:
            size, _ = write_content(directory, temp.fd, content)
            temp.flush()
            reached("temp_written")
            reached("before_rename")
            temp.publish(name.folder, name.file, refuse=lambda folder_fd: require_ours(folder_fd, name.file))
            reached("renamed")
    except StorageError as error:
        return _write_failure(directory, error)
    except UnknownFormat as error:
        return Failure(Reason.UNKNOWN_FORMAT, "rename", "", f"{name} is of another version and was left: {error}")
    except ForeignFile as error:
        return Failure(Reason.NAME_TAKEN, "rename", "", f"{name}: {error}")
    return WrittenFile(size, directory.unflushed(name.folder), write.keys)


def _header_of(write: Write, identity: Identity) -> Header:
    return Header(
        group=write.group,
        fingerprint=write.fingerprint,
        rank=write.rank,
        parent=write.parent,
        first_token=write.first_token,
        block_tokens=write.block_tokens,
        keys=write.keys,
        tokens=write.tokens,
        extras={index: list(extras) for index, extras in sorted(write.extras.items()) if extras},
        block_bytes=write.block_bytes,
        dtype=identity.layout.dtype,
        layout=describe_layout(identity.layout),
        codec=PLAIN,
        checksums=bytes(count_keys(write.keys) * CHECKSUM_BYTES),
        created=write.created,
    )


def _blocks_to_write(arena: memoryview, write: Write) -> list[Views]:
    """Each block's views: its slot, or, where it does not fill its last page, a page of ours in place of that one."""
    slots = _slots(arena, write.slots, write.block_bytes)
    if len(slots) != count_keys(write.keys):
        raise BrokenInvariant(f"{len(slots)} slots for {count_keys(write.keys)} keys")
    rest = write.block_bytes % PAGE_BYTES
    if not rest:
        return [[slot] for slot in slots]
    pages = mapped_pages(len(slots) * PAGE_BYTES)
    whole = write.block_bytes - rest
    blocks = []
    for index, slot in enumerate(slots):
        page = pages[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
        page[:rest] = slot[whole : whole + rest]
        blocks.append([slot[:whole], page] if whole else [page])
    return blocks


def _slots(arena: memoryview, offsets: list[int], block_bytes: int) -> list[memoryview]:
    size = stored_bytes(block_bytes)
    for offset in offsets:
        if offset % PAGE_BYTES or not 0 <= offset <= len(arena) - size:
            raise BrokenInvariant(f"a slot of {size} bytes at {offset} is not in an arena of {len(arena)}")
    return [arena[offset : offset + size] for offset in offsets]


def require_ours(folder_fd: int, file: str) -> None:
    """Nothing there, or a file of a version and a codec that we know, or one that is damaged or can't be read, may be
    replaced or removed. Raises UnknownFormat or ForeignFile for the rest."""
    try:
        with open_regular(folder_fd, file) as (fd, found):
            start = call("pread", os.pread, fd, PREFIX_BYTES, 0)
            if decode_prefix(start).version != PLAIN_VERSION:  # which has one codec
                load_header(fd, found.st_size, decode=decode_intact)
    except StorageError as error:
        if error.errno_name not in ("ENOENT", "EIO"):
            raise
    except DamagedFile:
        return


def _write_failure(directory: DataDirectory, error: StorageError) -> Failure:
    if error.errno_name == "ENOENT" and not directory.is_present():
        problem = f"{directory.path} was removed or replaced while it was in use"
        return Failure(Reason.IO_ERROR, error.operation, error.errno_name, problem)
    return Failure.of(error)


# ---- reading


def read_blocks(
    directory: DataDirectory, arena: memoryview, read: Read, *, identity: Identity | None = None
) -> ReadOutcome:
    """Read blocks of a file into slots, each verified. With `identity`, the file's layout is compared with its too."""
    name = ExtentName.of(read)
    slots = _slots(arena, read.slots, read.block_bytes)
    if read.first + len(slots) > count_keys(read.keys):
        raise BrokenInvariant(f"{len(slots)} slots from block {read.first} on, but {count_keys(read.keys)} keys")
    try:
        with directory.folder(name.folder) as folder_fd, open_regular(folder_fd, name.file) as (fd, found):
            extent = load_extent(fd, found)
            header = extent.header
            check_name(header, name)
            check_expected(header, read, identity)
            payload = BlockFile(directory, fd, extent.header_bytes)
            valid, problem = read_payload(payload, header, read.first, slots, directory.hashers)
            overcome = Failure.of(payload.overcome) if payload.overcome is not None else None
    except OtherExtent as error:  # where nodes share the files, it is another one's
        return ReadOutcome(0, Reason(error.reason), error.problem, damaged=not directory.is_shared)
    except (StorageError, DamagedFile, UnknownFormat, ForeignFile) as error:
        return _outcome(0, error, None)
    return _outcome(valid, problem, header, overcome)


def _outcome(
    valid: int, problem: Deviation | None, header: Header | None, overcome: Failure | None = None
) -> ReadOutcome:
    tokens, extras = (header.tokens, header.extras) if header is not None else (b"", {})
    if problem is None:
        return ReadOutcome(valid, failure=overcome, tokens=tokens, extras=extras)
    told = _tell(problem)
    return ReadOutcome(valid, told.reason, told.problem, told.damaged, told.failure, tokens, extras)


def verify_file(
    directory: DataDirectory, name: ExtentName, *, pause: Callable[[int], None] = lambda num_bytes: None
) -> Verified:
    """Read all of a file from the device and compare it with its header and checksums. Takes no slots.

    `pause` is called with the bytes read since the last time, at most 2 MiB: there a scrub keeps its rate, or raises
    to end it.
    """
    blocks = size = 0
    try:
        with directory.folder(name.folder) as folder_fd, open_regular(folder_fd, name.file) as (fd, found):
            size = found.st_size
            extent = load_extent(fd, found)
            blocks = extent.header.num_blocks
            check_name(extent.header, name)
            valid = count_intact(BlockFile(directory, fd, extent.header_bytes), extent.header, pause)
    except (StorageError, DamagedFile, UnknownFormat, ForeignFile) as error:
        told = _tell(error)
        intact = error.valid_blocks if isinstance(error, DamagedFile) else 0
        return Verified(intact, blocks, size, told.reason, told.problem, told.damaged, told.failure)
    return Verified(valid, blocks, size)


def remove_extent(directory: DataDirectory, name: ExtentName) -> bool:
    """Unlink a file of ours, and its folder when that was the last one; says whether there was one. Raises
    StorageError.

    What else has its name (a file of a newer version, a link) is left: a write that was refused because of it is given
    up by removing what the write may have left.
    """
    *above, shelf = name.folder
    try:
        with directory.folder(tuple(above)) as namespace_fd:
            with directory.folder(name.folder) as folder_fd:
                if not unlink_extent(folder_fd, name.file):
                    return False
            remove_if_empty(namespace_fd, shelf)
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return False
    return True


def unlink_extent(folder_fd: int, file: str) -> bool:
    """`remove_extent` for who has the folder open; nothing is flushed. Raises StorageError, ENOENT among them."""
    try:
        require_ours(folder_fd, file)
    except (UnknownFormat, ForeignFile):
        return False
    call("unlink", os.unlink, file, dir_fd=folder_fd)
    return True


def remove_if_empty(parent_fd: int, name: str) -> None:
    """rmdir; a folder that is not empty, or not there, is fine. Raises StorageError."""
    try:
        call("rmdir", os.rmdir, name, dir_fd=parent_fd)
    except StorageError as error:
        if error.errno_name not in ("ENOTEMPTY", "EEXIST", "ENOENT"):
            raise


# ---- parts of reading


def check_expected(header: Header, read: Read | Demote, identity: Identity | None) -> None:
    """Raises DamagedFile for what can't be in a file of that group, OtherExtent for another one than was meant."""
    layout: list[tuple[str, object, object]] = [
        ("block_tokens", header.block_tokens, read.block_tokens),
        ("block_bytes", header.block_bytes, read.block_bytes),
    ]
    if identity is not None:
        layout.append(("dtype", header.dtype, identity.layout.dtype))
        layout.append(("layout", header.layout, describe_layout(identity.layout)))
    for what, found, wanted in layout:
        if found != wanted:
            raise DamagedFile(Reason.LAYOUT_MISMATCH, f"{what}: the file has {found!r}, the group {wanted!r}")
    if header.parent != read.parent or header.first_token != read.first_token:
        raise OtherExtent(
            Reason.KEY_MISMATCH, f"position: the file follows another block, at token {header.first_token}"
        )
    if not header.keys.startswith(read.keys):
        raise OtherExtent(Reason.KEY_MISMATCH, "keys: the file holds other blocks than the tree says")


@dataclass(frozen=True, slots=True)
class _Told:
    """A deviation as values."""

    reason: Reason
    problem: str
    damaged: bool = False
    failure: Failure | None = None


def _tell(error: Deviation) -> _Told:
    if isinstance(error, StorageError):
        return _Told(Reason(error.reason), str(error), failure=Failure.of(error))
    if isinstance(error, DamagedFile):
        return _Told(Reason(error.reason), error.problem, damaged=True)
    if isinstance(error, UnknownFormat):
        return _Told(Reason.UNKNOWN_FORMAT, str(error))
    return _Told(Reason.NOT_FOUND, str(error))
