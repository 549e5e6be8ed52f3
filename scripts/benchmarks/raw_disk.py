"""What the disk itself does: whole files, O_DIRECT, in pieces of 2 MiB, at a given queue depth."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 2 * 2**20
DEPTHS = (1, 2, 4, 8)


class RawDisk:
    """`depth` files at a time, each from or into a buffer of its own. A context manager."""

    def __init__(self, depth: int, file_bytes: int) -> None:
        self._depth = depth
        self._pool = ThreadPoolExecutor(depth)
        self._buffers = [mmap.mmap(-1, file_bytes) for _ in range(depth)]
        for buffer in self._buffers:
            buffer.write(os.urandom(file_bytes))

    def __enter__(self) -> RawDisk:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown()
        for buffer in self._buffers:
            buffer.close()

    def write(self, paths: Sequence[Path]) -> float:
        """Seconds until all of them are written and fdatasync has returned for each."""
        return self._run(_write, paths)

    def read(self, paths: Sequence[Path]) -> float:
        return self._run(_read, paths)

    def _run(self, move: Callable[[Sequence[Path], mmap.mmap], None], paths: Sequence[Path]) -> float:
        shares = [list(paths[lane :: self._depth]) for lane in range(self._depth)]
        start = time.perf_counter()
        for done in [
            self._pool.submit(move, share, buffer) for share, buffer in zip(shares, self._buffers, strict=True)
        ]:
            done.result()
        return time.perf_counter() - start


def _write(paths: Sequence[Path], buffer: mmap.mmap) -> None:
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        try:
            with memoryview(buffer) as view:
                for start in range(0, len(view), PIECE_BYTES):
                    _whole(os.pwritev(fd, [view[start : start + PIECE_BYTES]], start), start, len(view))
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _read(paths: Sequence[Path], buffer: mmap.mmap) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with memoryview(buffer) as view:
                for start in range(0, len(view), PIECE_BYTES):
                    _whole(os.preadv(fd, [view[start : start + PIECE_BYTES]], start), start, len(view))
        finally:
            os.close(fd)


def _whole(moved: int, start: int, end: int) -> None:
    """A short transfer would make the limit look better than it is."""
    if moved != min(PIECE_BYTES, end - start):
        raise OSError(f"{moved} bytes were moved at byte {start} of {end}")
