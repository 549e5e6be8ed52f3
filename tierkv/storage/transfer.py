"""Moving blocks between a file and memory in pieces, one piece being hashed while the next one moves.

A block is a list of memory views: one slot of the arena, or the slot without its last page and a page of our own that
carries the rest and zeros. Views are page-aligned, so that O_DIRECT takes them as they are.

    disk    | piece 0 | piece 1 | piece 2 |
    hash              | piece 0 | piece 1 | piece 2 |        (reading; in writing both begin at the same time)
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from blake3 import blake3

from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, StorageError
from tierkv.storage.directory import DIRECT_REFUSED, PAGE_BYTES, DataDirectory
from tierkv.storage.system_calls import call

# Large enough that a device runs at its full rate, small enough that little is left to hash when the last one is in.
PIECE_BYTES = 2 * 2**20
# Below this, waking a thread takes longer than hashing.
_BESIDE_BYTES = 128 * 2**10


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive bytes of one block; `last` where they end it."""

    view: memoryview
    last: bool


Piece = list[Chunk]


def cut(blocks: Iterable[list[memoryview]]) -> Iterator[Piece]:
    """Blocks as pieces of at most PIECE_BYTES. No chunk is shorter than a page, so a piece fits one vectored call."""
    piece: Piece = []
    room = PIECE_BYTES
    for views in blocks:
        for index, view in enumerate(views):
            start = 0
            while start < len(view):
                stop = min(len(view), start + room)
                piece.append(Chunk(view[start:stop], stop == len(view) and index == len(views) - 1))
                room -= stop - start
                start = stop
                if not room:
                    yield piece
                    piece, room = [], PIECE_BYTES
    if piece:
        yield piece


class BlockHasher:
    """BLAKE3 of each block of a stream of pieces. `digests` holds the blocks that are complete."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self._begun: blake3 | None = None

    def feed(self, piece: Piece) -> None:
        for chunk in piece:
            found = blake3(chunk.view) if self._begun is None else self._begun.update(chunk.view)
            if chunk.last:
                self.digests.append(found.digest())
                self._begun = None
            else:
                self._begun = found


class BlockFile:
    """An open file and its position; transfers are whole or fail. Goes on buffered where O_DIRECT is refused."""

    def __init__(self, directory: DataDirectory, fd: int, offset: int) -> None:
        self._directory = directory
        self._fd = fd
        self.offset = offset
        self._direct = directory.use_direct(fd)
        self.overcome: StorageError | None = None  # a failure that a second try got over, still to be counted

    def write(self, views: list[memoryview]) -> None:
        """Raises StorageError."""
        while views:
            views = self._moved(self._attempt("pwritev", os.pwritev, views), views)

    def read(self, views: list[memoryview]) -> None:
        """Raises StorageError, and DamagedFile where the file ends too early."""
        while views:
            count = self._attempt("preadv", os.preadv, views)
            if not count:
                raise DamagedFile(Reason.SHORT_FILE, f"it ends at byte {self.offset}")
            views = self._moved(count, views)

    def look_again(self, offset: int) -> None:
        """Go back, and read from the device what memory holds of the file. Raises StorageError."""
        self.offset = offset
        forget_pages(self._fd)

    def _attempt(
        self, operation: str, function: Callable[[int, list[memoryview], int], int], views: list[memoryview]
    ) -> int:
        try:
            return call(operation, function, self._fd, views, self.offset)
        except StorageError as error:
            if not self._direct or error.errno_name not in DIRECT_REFUSED:
                raise
        self._directory.refuse_direct(operation)
        self._go_buffered()
        return call(operation, function, self._fd, views, self.offset)

    def _moved(self, count: int, views: list[memoryview]) -> list[memoryview]:
        """Step over `count` bytes; what is left to move."""
        if not count:
            raise StorageError("pwritev", "ZERO", Reason.IO_ERROR, f"nothing was written at byte {self.offset}")
        self.offset += count
        left = list(_behind(views, count))
        if left and count % PAGE_BYTES and self._direct:
            self._go_buffered()  # the rest is not aligned any more; the next file is direct again
        return left

    def _go_buffered(self) -> None:
        flags = call("fcntl", fcntl.fcntl, self._fd, fcntl.F_GETFL)
        call("fcntl", fcntl.fcntl, self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False


def write_blocks(file: BlockFile, blocks: list[list[memoryview]], hashers: Executor) -> list[bytes]:
    """Write blocks one after the other; their digests. Raises StorageError."""
    hasher = BlockHasher()
    beside = _Beside(hashers, hasher)
    try:
        for piece in cut(blocks):
            beside.feed(piece)
            file.write([chunk.view for chunk in piece])
    finally:
        beside.wait()
    return hasher.digests


def read_blocks(
    file: BlockFile, blocks: list[list[memoryview]], digests: list[bytes], hashers: Executor
) -> tuple[int, StorageError | DamagedFile | None]:
    """Read blocks one after the other: how many, from the first, are what their digests say, and what ended it.

    Where a transfer fails, the blocks before the one that failed still count. A block that is not what it should be is
    read a second time, from the device, before it is called damaged.
    """
    start = file.offset
    valid, problem = _read_once(file, blocks, digests, hashers)
    if not isinstance(problem, DamagedFile) or problem.reason != Reason.CHECKSUM:
        return valid, problem
    file.look_again(start + sum(len(view) for views in blocks[:valid] for view in views))
    more, problem = _read_once(file, blocks[valid:], digests[valid:], hashers)
    if more:
        file.overcome = StorageError("preadv", "CHECKSUM", Reason.CHECKSUM, "a block was right when it was read again")
    if isinstance(problem, DamagedFile):
        problem = DamagedFile(problem.reason, problem.problem, valid_blocks=valid + more)
    return valid + more, problem


def copy_blocks(source: BlockFile, target: BlockFile, sizes: Sequence[int], hashers: Executor) -> list[bytes]:
    """Copy blocks of these sizes, each a multiple of 4 KiB; the digests of what was read. Raises StorageError, and
    DamagedFile where the source ends too early."""
    hasher = BlockHasher()
    beside = _Beside(hashers, hasher)
    buffer = mapped_pages(min(PIECE_BYTES, sum(sizes)))
    try:
        for piece in _cut_stream(buffer, sizes):
            views = [chunk.view for chunk in piece]
            source.read(list(views))
            beside.feed(piece)
            target.write(views)
            beside.wait()  # before the next piece takes its place
    finally:
        beside.wait()
    return hasher.digests


def _cut_stream(buffer: memoryview, sizes: Sequence[int]) -> Iterator[Piece]:
    """A stream of blocks as pieces that all lie in `buffer`."""
    piece: Piece = []
    start = 0
    for size in sizes:
        left = size
        while left:
            stop = min(len(buffer), start + left)
            left -= stop - start
            piece.append(Chunk(buffer[start:stop], not left))
            start = stop
            if start == len(buffer):
                yield piece
                piece, start = [], 0
    if piece:
        yield piece


def _read_once(
    file: BlockFile, blocks: list[list[memoryview]], digests: list[bytes], hashers: Executor
) -> tuple[int, StorageError | DamagedFile | None]:
    hasher = BlockHasher()
    beside = _Beside(hashers, hasher)
    problem: StorageError | DamagedFile | None = None
    try:
        for wanted in cut(blocks):
            piece, problem = _read_piece(file, wanted)
            beside.feed(piece)
            if problem is not None:
                break
    finally:
        beside.wait()
    for index, (found, expected) in enumerate(zip(hasher.digests, digests, strict=False)):
        if found != expected:
            return index, DamagedFile(Reason.CHECKSUM, f"block {index} of those read", valid_blocks=index)
    return len(hasher.digests), problem


def _read_piece(file: BlockFile, piece: Piece) -> tuple[Piece, StorageError | DamagedFile | None]:
    """The chunks that could be read. One call reads a piece; when that fails, each chunk on its own tells which."""
    start = file.offset
    try:
        file.read([chunk.view for chunk in piece])
    except (StorageError, DamagedFile) as error:
        file.overcome = error if isinstance(error, StorageError) else None
        file.offset = start
        for index, chunk in enumerate(piece):
            try:
                file.read([chunk.view])
            except (StorageError, DamagedFile) as error:
                return piece[:index], error
    return piece, None


class _Beside:
    """Feeds a hasher from another thread, one piece at a time and in order."""

    def __init__(self, hashers: Executor, hasher: BlockHasher) -> None:
        self._hashers = hashers
        self._hasher = hasher
        self._pending: Future[None] | None = None

    def feed(self, piece: Piece) -> None:
        self.wait()
        if sum(len(chunk.view) for chunk in piece) < _BESIDE_BYTES:
            self._hasher.feed(piece)
        else:
            self._pending = self._hashers.submit(self._hasher.feed, piece)

    def wait(self) -> None:
        """Until the last piece is hashed: no deadline, since that is computing and takes a millisecond or less."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


def forget_pages(fd: int) -> None:
    """Have the next read of a file come from the device. Raises StorageError."""
    call("posix_fadvise", os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _behind(views: list[memoryview], count: int) -> Iterator[memoryview]:
    for view in views:
        if count >= len(view):
            count -= len(view)
        else:
            yield view[count:]
            count = 0


def mapped_pages(num_bytes: int) -> memoryview:
    """Page-aligned zeros, for what does not come from the arena. They are unmapped with the last view of them."""
    return memoryview(mmap.mmap(-1, num_bytes))
