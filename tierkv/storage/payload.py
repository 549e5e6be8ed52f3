"""The blocks of a file as its header describes them: read into memory and proven, or laid out to be written.

read     stored blocks, a few at a time -> proven -> decoded beside, while the next ones are read -> proven again
         one that is stored as it is goes straight to its place
write    blocks -> encoded, some at a time -> the smaller file, or the plain one -> blocks, then header
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from functools import partial

import msgspec
from blake3 import blake3

from tierkv.core.identity import Layout
from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant, DamagedFile, StorageError
from tierkv.storage import transfer
from tierkv.storage.codec_names import PLAIN, FileCodec, codec_name
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import (
    ALIGN_BYTES,
    CHECKSUM_BYTES,
    MAX_HEADER_BYTES,
    Header,
    encode_header,
    pack_header,
    pack_lengths,
    stored_bytes,
)
from tierkv.storage.plane_codec import PlaneCodec
from tierkv.storage.transfer import PIECE_BYTES, BlockFile, mapped_pages

__all__ = ["Views", "read_payload", "count_intact", "Content", "plan_content", "write_content"]

Views = list[memoryview]
"""One block: a slot, or a slot without its last page and a page that carries the rest and zeros."""

_NOT_AS_BEFORE = "is not what it was before it was stored"

BLOCKS_AHEAD = 4
"""That are encoded or decoded at one time for one file."""


def _split(packed: bytes) -> list[bytes]:
    return [packed[start : start + CHECKSUM_BYTES] for start in range(0, len(packed), CHECKSUM_BYTES)]


# ---- reading


def read_payload(
    file: BlockFile, header: Header, first: int, slots: list[memoryview], hashers: Executor
) -> tuple[int, StorageError | DamagedFile | None]:
    """Blocks `first` and following into `slots`, each of them as long as a block is with its zeros: how many, from the
    first, are what the header says, and what ended it. `file` stands at the first block of the payload. Slots behind
    those hold anything."""
    checksums = _split(header.checksums)[first : first + len(slots)]
    if header.codec == PLAIN:
        file.offset += first * header.stored_block_bytes
        return transfer.read_blocks(file, [[slot] for slot in slots], checksums, hashers)
    lengths = header.block_lengths()
    file.offset += sum(map(stored_bytes, lengths[:first]))
    return _PayloadReader(file, header, hashers).read(first, slots, lengths, checksums)


class _PayloadReader:
    def __init__(self, file: BlockFile, header: Header, hashers: Executor) -> None:
        self._file = file
        self._block_bytes = header.block_bytes
        self._stored_checksums = _split(header.stored_checksums)
        self._codec = PlaneCodec.of(header.codec)
        self._hashers = hashers
        self._decoding: deque[Future[bool]] = deque()
        self._right = 0
        self._is_right = True

    def read(
        self, first: int, slots: list[memoryview], lengths: list[int], checksums: list[bytes]
    ) -> tuple[int, StorageError | DamagedFile | None]:
        problem: StorageError | DamagedFile | None = None
        try:
            for start, stop in _batches(lengths[first : first + len(slots)]):
                stored = [self._place(slots[index], lengths[first + index]) for index in range(start, stop)]
                wanted = self._stored_checksums[first + start : first + stop]
                valid, problem = transfer.read_blocks(self._file, [[view] for view in stored], wanted, self._hashers)
                for index, view in enumerate(stored[:valid], start):
                    self._submit(view, lengths[first + index], slots[index], checksums[index])
                self._settle(BLOCKS_AHEAD)
                if problem is not None or not self._is_right:
                    break
        finally:
            self._settle(0)
        if not self._is_right:
            told = f"block {first + self._right} {_NOT_AS_BEFORE}"
            problem = DamagedFile(Reason.CHECKSUM, told, valid_blocks=self._right)
        elif isinstance(problem, DamagedFile):
            problem = DamagedFile(problem.reason, problem.problem, valid_blocks=self._right)
        return self._right, problem

    def _place(self, slot: memoryview, length: int) -> memoryview:
        """Where a stored block is read to: one that is stored as it is straight into its slot."""
        return slot if length == len(slot) else mapped_pages(stored_bytes(length))

    def _submit(self, stored: memoryview, length: int, slot: memoryview, checksum: bytes) -> None:
        if length == len(slot):  # proven already: its two checksums are one
            done: Future[bool] = Future()
            done.set_result(True)
            self._decoding.append(done)
            return
        run = partial(_decode_block, self._codec, stored[:length], slot, self._block_bytes, checksum)
        self._decoding.append(self._hashers.submit(run))

    def _settle(self, most: int) -> None:
        """Until at most so many are still decoded. Behind the first one that is wrong none counts. No deadline, since
        that is computing."""
        while len(self._decoding) > most or (self._decoding and not self._is_right):
            self._is_right = self._decoding.popleft().result() and self._is_right
            self._right += self._is_right


def _decode_block(codec: PlaneCodec, stored: memoryview, slot: memoryview, block_bytes: int, checksum: bytes) -> bool:
    """Fill `slot` with a block and the zeros behind it. Whether that is what was stored once."""
    try:
        codec.decode(stored, slot[:block_bytes])
    except DamagedFile:
        return False
    slot[block_bytes:] = bytes(len(slot) - block_bytes)
    return blake3(slot).digest() == checksum


def _batches(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of blocks that are read together: of at most PIECE_BYTES, or a single one."""
    start = num_bytes = 0
    for index, length in enumerate(map(stored_bytes, lengths)):
        if num_bytes and num_bytes + length > PIECE_BYTES:
            yield start, index
            start, num_bytes = index, 0
        num_bytes += length
    if num_bytes:
        yield start, len(lengths)


def count_intact(file: BlockFile, header: Header, pause: Callable[[int], None]) -> int:
    """Blocks read, decoded and found right: all of them. `pause` is told of the bytes read, at most 2 MiB at a time.
    Raises DamagedFile at the first that is not, StorageError, and what `pause` raises."""
    lengths = header.block_lengths()
    checksums = _split(header.checksums)
    wanted = checksums if header.codec == PLAIN else _split(header.stored_checksums)
    coded = [length for length in lengths if length != header.stored_block_bytes]
    buffer = mapped_pages(max([PIECE_BYTES, *map(stored_bytes, coded)]))
    slot = mapped_pages(header.stored_block_bytes) if coded else buffer
    for index, length in enumerate(lengths):
        start, size = file.offset, stored_bytes(length)
        try:
            if _hash_block(file, size, buffer, pause) != wanted[index]:
                file.look_again(start)
                if _hash_block(file, size, buffer, _is_counted) != wanted[index]:
                    raise DamagedFile(Reason.CHECKSUM, f"block {index} of {len(lengths)}")
            if length != header.stored_block_bytes:
                codec = PlaneCodec.of(header.codec)
                if not _decode_block(codec, buffer[:length], slot, header.block_bytes, checksums[index]):
                    raise DamagedFile(Reason.CHECKSUM, f"block {index} {_NOT_AS_BEFORE}")
        except DamagedFile as error:
            raise DamagedFile(error.reason, error.problem, valid_blocks=index) from error
    return len(lengths)


def _hash_block(file: BlockFile, size: int, buffer: memoryview, pause: Callable[[int], None]) -> bytes:
    """Of a stored block, which `buffer` holds afterwards where it is long enough."""
    found = blake3()
    for start in range(0, size, PIECE_BYTES):
        at = start if size <= len(buffer) else 0
        view = buffer[at : at + min(PIECE_BYTES, size - start)]
        file.read([view])
        found.update(view)
        pause(len(view))
    return found.digest()


def _is_counted(num_bytes: int) -> None:
    """What is read a second time, which is rare."""


# ---- writing


@dataclass(frozen=True, slots=True)
class Content:
    """What a file is to hold. `header` has passed the reader's own rules; checksums of what is stored come in when they
    are known."""

    header: Header
    header_bytes: int
    blocks: list[Views]


def plan_content(
    codec: FileCodec, header: Header, blocks: list[Views], layout: Layout, hashers: Executor, *, prove: bool = False
) -> Content:
    """How `blocks` are stored: by the codec for their `layout` where one is wanted and the file becomes smaller by it,
    else as they are, which is what `header` says. `prove`: what was encoded is decoded again and compared, for whoever
    gives up the file that the blocks came from. Raises DamagedFile for a header that the reader would not take."""
    plain = Content(header, len(encode_header(header)), blocks)
    if codec is FileCodec.RAW:
        return plain
    name = codec_name(layout, header.block_bytes)
    encoded = _encode_blocks(PlaneCodec.of(name), blocks, header.block_bytes, hashers, prove=prove)
    checksums = b"".join(block.checksum for block in encoded)
    smaller = msgspec.structs.replace(
        header,
        codec=name,
        lengths=pack_lengths(block.length for block in encoded),
        checksums=checksums,
        stored_checksums=checksums,  # until they are written: right for blocks that are stored as they are
    )
    header_bytes = len(pack_header(smaller))
    plain_bytes = plain.header_bytes + header.payload_bytes
    if header_bytes > MAX_HEADER_BYTES or header_bytes + smaller.payload_bytes >= plain_bytes:
        return plain
    encode_header(smaller)
    return Content(smaller, header_bytes, [block.views for block in encoded])


def write_content(directory: DataDirectory, fd: int, content: Content) -> tuple[int, Header]:
    """Write blocks, then header: the length of the file, and the header as it is now. Raises StorageError."""
    file = BlockFile(directory, fd, content.header_bytes)
    stored = b"".join(transfer.write_blocks(file, content.blocks, directory.hashers))
    known = {"checksums": stored} if content.header.codec == PLAIN else {"stored_checksums": stored}
    header = msgspec.structs.replace(content.header, **known)
    encoded = pack_header(header)
    if len(encoded) != content.header_bytes:
        raise BrokenInvariant(f"a header of {content.header_bytes} bytes became {len(encoded)} with its checksums")
    pages = mapped_pages(len(encoded))
    pages[:] = encoded
    BlockFile(directory, fd, 0).write([pages])
    return file.offset, header


@dataclass(frozen=True, slots=True)
class _EncodedBlock:
    """What is stored of a block, with its zeros, and of how many bytes without them; `checksum` is the block's own."""

    views: Views
    length: int
    checksum: bytes


def _encode_blocks(
    codec: PlaneCodec, blocks: list[Views], block_bytes: int, hashers: Executor, *, prove: bool
) -> list[_EncodedBlock]:
    """Each block by itself; one that would not become smaller by a page is stored as it is."""
    done: list[_EncodedBlock] = []
    waiting: deque[Future[_EncodedBlock]] = deque()
    try:
        for views in blocks:
            if len(waiting) == BLOCKS_AHEAD:
                done.append(waiting.popleft().result())
            waiting.append(hashers.submit(_encode_block, codec, views, block_bytes, prove))
        while waiting:
            done.append(waiting.popleft().result())
    finally:
        wait(waiting)  # where one of them has failed, the others still read what our caller has lent
    return done


def _encode_block(codec: PlaneCodec, views: Views, block_bytes: int, prove: bool) -> _EncodedBlock:
    digest = blake3()
    for view in views:
        digest.update(view)
    checksum, plain_bytes = digest.digest(), sum(map(len, views))
    block = (views[0] if len(views) == 1 else memoryview(b"".join(views)))[:block_bytes]
    stored = codec.encode(block, plain_bytes - ALIGN_BYTES)
    if stored is None or (prove and not _is_reversible(codec, stored, plain_bytes, block_bytes, checksum)):
        return _EncodedBlock(views, plain_bytes, checksum)
    pages = mapped_pages(stored_bytes(len(stored)))
    pages[: len(stored)] = stored
    return _EncodedBlock([pages], len(stored), checksum)


def _is_reversible(codec: PlaneCodec, stored: bytes, plain_bytes: int, block_bytes: int, checksum: bytes) -> bool:
    return _decode_block(codec, memoryview(stored), memoryview(bytearray(plain_bytes)), block_bytes, checksum)
