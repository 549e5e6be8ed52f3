"""Copies of a grant's blocks where some of its slots are in a pool.

The order is what keeps this right: every copy is asked for, then every one has completed (its event, seen from the
host), then the caller compares generations, then somebody is told. A copy that fails, or a pool that ended meanwhile,
proves nothing: then nothing counts from the first block in the pool on.

Nothing here gives up a copy that is under way. The pages that it writes are the engine's, and the slots that it reads
are held for it; whoever went on without it would hand out memory that is still being written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tierkv.client.device.pages import DevicePages
from tierkv.errors import DeviceError

if TYPE_CHECKING:
    from tierkv.client.copying import Deliver
    from tierkv.client.device.pool import MappedPool
    from tierkv.client.slots import Slots
    from tierkv.device.backends import Pending, PoolMap
    from tierkv.device.memory import HostMemory

STAGED_BYTES = 16 * 2**20
"""So much of a pool's blocks goes through host memory at once on its way to or from an engine's own buffers."""
WARN_SECONDS = 10.0

_Copy = TypeVar("_Copy", bound="Pending")

_log = logging.getLogger("tierkv.client")


class Copies:
    """Those that were begun in one pool. Leaving the `with` waits for all of them, whatever happened in it."""

    def __init__(self, pool: MappedPool) -> None:
        self._pool = pool
        self._pending: list[Pending] = []
        self._completed: list[Pending] = []
        self.has_failed = False

    def begin(self, copy: Callable[[], _Copy]) -> _Copy | None:
        """None where it was not begun, for one has failed."""
        if self.has_failed:
            return None
        try:
            made = copy()
        except DeviceError as error:
            self._fail(error)
            return None
        self._pending.append(made)
        return made

    def has_completed(self, copy: Pending) -> bool:
        """Whether it was seen to be done, and has not failed."""
        return any(copy is one for one in self._completed)

    def follow(self, event: object) -> None:
        """What is begun from now on runs behind it."""
        try:
            self._pool.backend.wait_for(event)
        except DeviceError as error:
            self._fail(error)

    def complete(self) -> bool:
        """Wait for those begun so far. Whether all that ever began have done what they were to do."""
        while self._pending:
            self._await(self._pending[0])
            del self._pending[0]
        return not self.has_failed

    def _await(self, copy: Pending) -> None:
        waited = 0.0
        try:
            while not copy.wait(WARN_SECONDS):
                waited += WARN_SECONDS
                _log.warning(
                    "a copy on %s has not completed in %.0f s; it is waited for", self._pool.owner.name, waited
                )
            self._completed.append(copy)
        except DeviceError as error:
            self._fail(error)

    def _fail(self, error: DeviceError) -> None:
        self.has_failed = True
        error.__traceback__ = None  # a copy that keeps it would keep the memory of these frames mapped
        self._pool.fail(error.problem)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        interruption: BaseException | None = None
        while self._pending:
            try:
                self.complete()
            except BaseException as error:  # noqa: BLE001 - Ctrl-C, say: it goes on when nothing is under way any more
                interruption = error
        if interruption is not None:
            raise interruption


def copy_out_mixed(
    slots: Slots, pool: MappedPool, numbers: np.ndarray, destination: DevicePages | None, deliver: Deliver
) -> int:
    """As copying.copy_out. `deliver` takes blocks in host memory; `destination` is given where the engine's pages are
    on the pool's own device, and takes those in the pool."""
    in_pool = slots.offsets[: len(numbers)] >= pool.base
    first_in_pool = int(np.argmax(in_pool)) if in_pool.any() else len(numbers)
    places, in_arena = np.flatnonzero(in_pool), np.flatnonzero(~in_pool)
    arena = None if destination is None else pool.arena
    with Copies(pool) as copies:
        if destination is not None:
            copies.follow(destination.after)
            _scatter(pool, copies, destination, pool.memory, numbers[places], slots.offsets[places] - pool.base)
        if destination is not None and arena is not None:
            _scatter(pool, copies, destination, arena, numbers[in_arena], slots.offsets[in_arena])
        else:
            for first, blocks in slots.runs_at(in_arena, numbers, slots.readable):
                deliver(first, blocks)  # meanwhile
        if destination is None:
            _download(slots, pool, copies, places, numbers, deliver)
    if copies.has_failed and arena is not None:
        return 0
    return len(numbers) if pool.is_usable else first_in_pool  # after a copy that failed it isn't, either


def copy_in_mixed(
    slots: Slots, pool: MappedPool, numbers: np.ndarray, source: DevicePages | None, fill: Deliver
) -> bool:
    """As copying.copy_in. Whether the blocks are where they were to go; else they must not be published."""
    in_pool = slots.offsets >= pool.base
    places, in_arena = np.flatnonzero(in_pool), np.flatnonzero(~in_pool)
    arena = None if source is None else pool.arena
    with Copies(pool) as copies:
        if source is not None:
            copies.follow(source.after)
            require_all(source, numbers if arena is not None else numbers[places])
            _gather(pool, copies, source, pool.memory, numbers[places], slots.offsets[places] - pool.base)
        if source is not None and arena is not None:
            _gather(pool, copies, source, arena, numbers[in_arena], slots.offsets[in_arena])
        else:
            for first, blocks in slots.runs_at(in_arena, numbers, slots.writable):
                fill(first, blocks)
        if source is None:
            _upload(slots, pool, copies, places, numbers, fill)
    return not copies.has_failed and (pool.is_usable or not len(places))


def _scatter(
    pool: MappedPool,
    copies: Copies,
    pages: DevicePages,
    memory: PoolMap | HostMemory,
    numbers: np.ndarray,
    offsets: np.ndarray,
) -> None:
    """The blocks `numbers`, at those offsets of `memory`, to their pages."""
    if len(numbers):
        for layout, chosen, begins in pages.parts(numbers, offsets):
            copies.begin(lambda p=chosen, o=begins, n=layout: pool.backend.scatter(memory, o, n, p))  # type: ignore[misc]


def _gather(
    pool: MappedPool,
    copies: Copies,
    pages: DevicePages,
    memory: PoolMap | HostMemory,
    numbers: np.ndarray,
    offsets: np.ndarray,
) -> None:
    if len(numbers):
        for layout, chosen, begins in pages.parts(numbers, offsets):
            copies.begin(lambda p=chosen, o=begins, n=layout: pool.backend.gather(n, p, memory, o))  # type: ignore[misc]


def _download(
    slots: Slots, pool: MappedPool, copies: Copies, places: np.ndarray, numbers: np.ndarray, deliver: Deliver
) -> None:
    """Through memory of our own, a few blocks at a time."""
    from tierkv.device.memory import HostMemory  # noqa: PLC0415 - only where there is a pool

    for some, rows in _staged(places, slots.block_bytes):
        host = HostMemory(rows.reshape(-1))
        begins = list(range(0, rows.nbytes, slots.block_bytes))
        offsets = (slots.offsets[some] - pool.base).tolist()
        copies.begin(lambda h=host, b=begins, o=offsets: pool.backend.download(pool.memory, o, h, b, slots.block_bytes))  # type: ignore[misc]
        if not copies.complete():
            return
        for first, end in _neighbours(numbers[some]):
            ready = rows[first:end]
            ready.flags.writeable = False
            deliver(int(numbers[some[first]]), ready)


def _upload(
    slots: Slots, pool: MappedPool, copies: Copies, places: np.ndarray, numbers: np.ndarray, fill: Deliver
) -> None:
    from tierkv.device.memory import HostMemory  # noqa: PLC0415 - only where there is a pool

    for some, rows in _staged(places, slots.block_bytes):
        for first, end in _neighbours(numbers[some]):
            fill(int(numbers[some[first]]), rows[first:end])
        host = HostMemory(rows.reshape(-1))
        begins = list(range(0, rows.nbytes, slots.block_bytes))
        offsets = (slots.offsets[some] - pool.base).tolist()
        copies.begin(lambda h=host, b=begins, o=offsets: pool.backend.upload(h, b, pool.memory, o, slots.block_bytes))  # type: ignore[misc]
        if not copies.complete():
            return


def _staged(places: np.ndarray, block_bytes: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Some of the places, and memory for as many blocks: each time the same."""
    most = max(1, STAGED_BYTES // block_bytes)
    memory = np.empty((min(most, len(places)), block_bytes), np.uint8)
    for begin in range(0, len(places), most):
        some = places[begin : begin + most]
        yield some, memory[: len(some)]


def _neighbours(numbers: np.ndarray) -> Iterable[tuple[int, int]]:
    borders = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    return pairwise(borders)


def require_all(source: DevicePages, numbers: np.ndarray) -> None:
    """What has no page can't be stored."""
    for layout_pages in source.pages:
        pages = np.asarray(layout_pages, np.int64)
        places = numbers - source.first_block
        if len(places) and (places.min() < 0 or places.max() >= len(pages) or (pages[places] < 0).any()):
            raise ValueError(f"source: blocks {source.first_block} to {source.end_block} have not all got a page")
