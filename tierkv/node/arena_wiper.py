"""Zeroing memory of an arena on a node without a storage worker: by the supervisor, which owns it, a slice a round.

It maps nothing for that; the slots belong to nobody until it has said that they are zeroed.
"""

from __future__ import annotations

import os
from collections import deque

SLICE_BYTES = 16 * 2**20
"""What one round zeroes: some milliseconds."""

_ZEROS = bytes(2**20)


class ArenaWiper:
    def __init__(self, arena_fd: int) -> None:
        self._fd = arena_fd
        self._todo: deque[tuple[int, deque[tuple[int, int]]]] = deque()  # (op, ranges left of it)

    @property
    def has_work(self) -> bool:
        return bool(self._todo)

    def add(self, op: int, ranges: list[tuple[int, int]]) -> None:
        self._todo.append((op, deque(ranges)))

    def step(self) -> list[int]:
        """Zero a slice; the operations that are through."""
        done = []
        left = SLICE_BYTES
        while self._todo and left > 0:
            op, ranges = self._todo[0]
            while ranges and left > 0:
                offset, num_bytes = ranges.popleft()
                count = os.pwrite(self._fd, memoryview(_ZEROS)[: min(num_bytes, left)], offset)
                left -= count
                if count < num_bytes:
                    ranges.appendleft((offset + count, num_bytes - count))
            if not ranges:
                done.append(op)
                self._todo.popleft()
        return done
