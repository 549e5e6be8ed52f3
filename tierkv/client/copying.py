"""Blocks between the slots of a grant and an engine's memory: what a lease or ticket promises is in grants.py, how its
bytes are moved is here, in one place for each direction.

The engine's memory is rows of blocks (uint8 [blocks, block_bytes], which may lie apart), or an object that moves blocks
by itself (BlockWriter, BlockReader). When a function here returns, every copy that it began has completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from tierkv.client.buffers import BlockReader, BlockWriter
from tierkv.client.coding import Decoding, Encoding
from tierkv.client.device.coded import copy_in_coded, copy_out_coded
from tierkv.client.device.copies import copy_in_mixed, copy_out_mixed
from tierkv.client.device.pages import DevicePages
from tierkv.core.codec import BlockCodec

if TYPE_CHECKING:
    from tierkv.client.device.pool import MappedPool
    from tierkv.client.slots import Slots

Deliver = Callable[[int, np.ndarray], None]
"""Takes the number of the first block, and a read-only array [n, block_bytes] that is valid during the call."""


def deliver_to(destination: np.ndarray | BlockWriter) -> Deliver:
    if not isinstance(destination, np.ndarray):
        return destination.write_blocks

    def copy(first: int, blocks: np.ndarray) -> None:
        destination[first : first + len(blocks)] = blocks

    return copy


def fill_from(source: np.ndarray | BlockReader, first_block: int) -> Deliver:
    """The other way: it fills the writable array that it is given. `first_block` is the number of a source's first
    row."""
    if not isinstance(source, np.ndarray):
        return source.read_blocks

    def copy(first: int, blocks: np.ndarray) -> None:
        start = first - first_block
        blocks[:] = source[start : start + len(blocks)]

    return copy


def copy_out(slots: Slots, numbers: np.ndarray, destination: np.ndarray | BlockWriter) -> int:
    """Copy the blocks `numbers`, which are in the first slots. How many, from the first, were copied; whether they are
    what was granted is for the generations to say, which are to be looked at now and not before."""
    if isinstance(destination, Decoding):
        with _coding_on_device(slots, destination.destination, destination.codec) as found:
            if found is not None:
                return copy_out_coded(slots, *found, numbers, destination)
    deliver = deliver_to(destination)
    if slots.pool is not None:
        return copy_out_mixed(slots, slots.pool, numbers, _pages_of(destination, slots.pool), deliver)
    if isinstance(destination, DevicePages) and (reaching := _reaching_arena(slots, destination)) is not None:
        try:
            return copy_out_mixed(slots, reaching, numbers, destination, deliver)
        finally:
            reaching.let_go()
    for first, blocks in slots.runs(numbers, slots.readable):
        deliver(first, blocks)
    return len(numbers)


def copy_in(slots: Slots, numbers: np.ndarray, source: np.ndarray | BlockReader, first_block: int) -> bool:
    """Fill the slots of the blocks `numbers`. False when what is there now must not be published."""
    if isinstance(source, Encoding):
        with _coding_on_device(slots, source.source, source.codec) as found:
            if found is not None:
                return copy_in_coded(slots, *found, numbers, source)
    fill = fill_from(source, first_block)
    if slots.pool is not None:
        return copy_in_mixed(slots, slots.pool, numbers, _pages_of(source, slots.pool), fill)
    if isinstance(source, DevicePages) and (reaching := _reaching_arena(slots, source)) is not None:
        try:
            return copy_in_mixed(slots, reaching, numbers, source, fill)
        finally:
            reaching.let_go()
    for first, blocks in slots.runs(numbers, slots.writable):
        fill(first, blocks)
    return True


def _pages_of(memory: object, pool: MappedPool) -> DevicePages | None:
    """Pages that the pool's device can reach: only those of that device."""
    return memory if isinstance(memory, DevicePages) and memory.pool is pool.owner else None


def _reaching_arena(slots: Slots, pages: DevicePages) -> MappedPool | None:
    """Held, where the device of these pages copies from and to the arena by itself: the slots are all there."""
    pool = pages.pool.mapped_under(slots.session)
    return pool if pool is not None and pool.arena is not None and pool.hold() else None


@contextmanager
def _coding_on_device(
    slots: Slots, memory: object, codec: BlockCodec
) -> Iterator[tuple[MappedPool, DevicePages] | None]:
    """The pool whose device has these pages, reaches all of the slots and has the codec; held meanwhile."""
    pool = slots.pool
    reaching = _reaching_arena(slots, memory) if pool is None and isinstance(memory, DevicePages) else None
    try:
        there = pool or reaching
        pages = None if there is None else _pages_of(memory, there)
        if there is None or pages is None or not there.backend.codes(codec):
            yield None
        else:
            yield there, pages
    finally:
        if reaching is not None:
            reaching.let_go()
