"""The slots of a grant, as the process that holds it sees them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tierkv.client.buffers import find_runs, slot_rows
from tierkv.client.groups import GroupRecord
from tierkv.client.session import Session
from tierkv.errors import ForkedClient

if TYPE_CHECKING:
    from tierkv.client.device.pool import MappedPool


class Slots:
    """The slots of a grant: one for each entry of `offsets`, int64, in the arena, or in a pool if there is one.
    `generations` are packed, as sent, and looked at in one place for slots of either kind.

    What is done for each grant is done in few steps: behind a copy, which has swept the processor's caches, every call
    takes microseconds.
    """

    pool: MappedPool | None = None

    def __init__(
        self,
        session: Session,
        group: GroupRecord,
        offsets: np.ndarray,
        generations: bytes,
        pool: MappedPool | None = None,
    ) -> None:
        """`pool`, held until `let_go`, has those slots whose addresses are beyond the arena."""
        arena = session.arena
        assert arena is not None, "only sessions that map the arena get grants"
        self.session = session
        self.block_bytes = group.block_bytes
        self.slot_bytes = slot_bytes(group.block_bytes, arena.page_bytes)
        self.offsets = offsets
        self.readable = arena.readable
        self.writable = arena.writable
        self._granted = generations
        self._current = arena.generations
        self._page_bytes = arena.page_bytes
        self._pid = os.getpid()
        self.pool = pool

    def let_go(self) -> None:
        """Once, when no copy touches them any more."""
        if self.pool is not None and os.getpid() == self._pid:
            self.pool.let_go()
        self.pool = None

    def require_host(self) -> Slots:
        """For views and single blocks, which are of the arena."""
        if self.pool is not None:
            raise ValueError("some of these slots are in a GPU's pool: use copy_into and copy_from")
        return self

    def require_own_process(self) -> Slots:
        """A forked child hasn't got the memory: it must not even try."""
        if os.getpid() != self._pid:
            raise ForkedClient("this grant was made before fork(): its slots are the parent's")
        return self

    def count_in_pool(self, first: int, end: int) -> int:
        """How many of the slots [first, end) are in the pool of a device."""
        return 0 if self.pool is None else int(np.count_nonzero(self.offsets[first:end] >= self.pool.base))

    def runs(self, blocks: np.ndarray, memory: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """(first block, rows) of neighbours, where `blocks` numbers the block in each slot."""
        for start, end in find_runs(blocks, self.offsets[: len(blocks)], self.slot_bytes):
            rows = slot_rows(
                memory,
                int(self.offsets[start]),
                end - start,
                slot_bytes=self.slot_bytes,
                block_bytes=self.block_bytes,
            )
            yield int(blocks[start]), rows

    def runs_at(self, places: np.ndarray, blocks: np.ndarray, memory: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """As `runs`, of the slots at these places only."""
        chosen, offsets = blocks[places], self.offsets[places]
        for start, end in find_runs(chosen, offsets, self.slot_bytes):
            at = int(offsets[start])
            rows = slot_rows(memory, at, end - start, slot_bytes=self.slot_bytes, block_bytes=self.block_bytes)
            yield int(chosen[start]), rows

    def count_valid(self, first: int = 0, end: int | None = None) -> int:
        """How many of the slots [first, end), from the first of them, still hold what was granted: what was read from
        them before is proven."""
        _fence()
        current = self._current[self.offsets[first:end] // self._page_bytes]
        granted = self._granted if not first and end is None else self._granted[8 * first : 8 * (first + len(current))]
        if current.tobytes() == granted:
            return len(current)
        return int(np.argmin(current == np.frombuffer(granted, "<u8")))


def slot_bytes(block_bytes: int, page_bytes: int) -> int:
    return -(-block_bytes // page_bytes) * page_bytes


def _fence() -> None:
    """Keeps the reads of a copy before the reads of the generations that follow.

    x86 does not reorder loads with loads, nor stores with stores, and the node stores the generation first: if a byte
    we read was a new one, the new generation is there to be read. Elsewhere the machine needs to be told: releasing
    one lock and taking another is a release followed by an acquire, which no load crosses both ways.
    """
    with _BEFORE:
        pass
    with _AFTER:
        pass


_BEFORE, _AFTER = threading.Lock(), threading.Lock()
