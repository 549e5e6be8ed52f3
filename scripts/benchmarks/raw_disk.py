"""What the disk itself does: whole files, O_DIRECT, in pieces of 2 MiB, at a given queue depth."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 2 * 2**20
DEPTHS = (1, 2, 4, 8)


class RawDisk:
    """As many files at a time as there are buffers, each from or into one of them: pages, of the files' size. A context
    manager.

    Give it memory of the kind that it stands beside: how the pages of a buffer lie in physical memory decides how many
    parts a transfer has, and that alone makes a difference of half with some drives.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._depth = len(buffers)
        self._pool = ThreadPoolExecutor(self._depth)
        self._buffers = buffers

    def __enter__(self) -> RawDisk:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown()

    def write(self, paths: Sequence[Path]) -> float:
        """Seconds until all of them are written and fdatasync has returned for each."""
        return self._run(_write, paths)

    def read(self, paths: Sequence[Path]) -> float:
        return self._run(_read, paths)

    def _run(self, move: Callable[[Sequence[Path], memoryview], None], paths: Sequence[Path]) -> float:
        shares = [list(paths[lane :: self._depth]) for lane in range(self._depth)]
        start = time.perf_counter()
        for done in [
            self._pool.submit(move, share, buffer) for share, buffer in zip(shares, self._buffers, strict=True)
        ]:
            done.result()
        return time.perf_counter() - start


def _write(paths: Sequence[Path], buffer: memoryview) -> None:
    for path in paths:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        try:
            for start in range(0, len(buffer), PIECE_BYTES):
                _whole(os.pwritev(fd, [buffer[start : start + PIECE_BYTES]], start), start, len(buffer))
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _read(paths: Sequence[Path], buffer: memoryview) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            for start in range(0, len(buffer), PIECE_BYTES):
                _whole(os.preadv(fd, [buffer[start : start + PIECE_BYTES]], start), start, len(buffer))
        finally:
            os.close(fd)


def _whole(moved: int, start: int, end: int) -> None:
    """A short transfer would make the limit look better than it is."""
    if moved != min(PIECE_BYTES, end - start):
        raise OSError(f"{moved} bytes were moved at byte {start} of {end}")
