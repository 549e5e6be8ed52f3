"""Copies of a coded group's blocks between an engine's pages and slots, coded on the pool's own device.

Slots in the arena go that way too: only coded bytes cross to the device or from it. The order is that of copies.py,
with one step more: the verdicts of a copy are read when it has completed, and those of no other count. A copy that
failed proves nothing of its own blocks; a pool that ended, nothing of what lies in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierkv.client.coding import Decoding, Encoding
from tierkv.client.device.copies import Copies, require_all
from tierkv.client.device.pages import DevicePages

if TYPE_CHECKING:
    from tierkv.client.device.pool import MappedPool
    from tierkv.client.slots import Slots
    from tierkv.device.backends import Coding


def copy_out_coded(
    slots: Slots, pool: MappedPool, destination: DevicePages, numbers: np.ndarray, decoding: Decoding
) -> int:
    """As copying.copy_out; `decoding` is told which blocks are not right."""
    from tierkv.device.memory import HostMemory  # noqa: PLC0415 - only where there is a pool

    backend, codec = pool.backend, decoding.codec
    offsets = slots.offsets[: len(numbers)]
    in_pool = offsets >= pool.base
    first_in_pool = int(np.argmax(in_pool)) if in_pool.any() else len(numbers)

    def decode(places: np.ndarray, memory: object, base: int) -> Coding:
        parts = destination.of_blocks(numbers[places])
        return backend.decode(codec, memory, (offsets[places] - base).tolist(), parts)  # type: ignore[arg-type]

    arena = pool.arena or HostMemory(slots.readable)
    there, here = np.flatnonzero(in_pool), np.flatnonzero(~in_pool)
    with Copies(pool) as copies:
        copies.follow(destination.after)
        from_pool = copies.begin(lambda: decode(there, pool.memory, pool.base)) if len(there) else None
        from_arena = copies.begin(lambda: decode(here, arena, 0)) if len(here) else None
    for coding, places in ((from_pool, there), (from_arena, here)):
        if coding is not None and copies.has_completed(coding):
            decoding.note(numbers[places], coding.good)
    if pool.is_usable and not copies.has_failed:
        return len(numbers)
    proven = not len(here) or (from_arena is not None and copies.has_completed(from_arena))
    return first_in_pool if proven else 0


def copy_in_coded(slots: Slots, pool: MappedPool, source: DevicePages, numbers: np.ndarray, encoding: Encoding) -> bool:
    """As copying.copy_in; `encoding` is told which blocks could not be coded."""
    from tierkv.device.memory import HostMemory  # noqa: PLC0415 - only where there is a pool

    backend, codec = pool.backend, encoding.codec
    in_pool = slots.offsets >= pool.base
    require_all(source, numbers)

    def encode(places: np.ndarray, memory: object, base: int) -> Coding:
        parts = source.of_blocks(numbers[places])
        return backend.encode(codec, parts, memory, (slots.offsets[places] - base).tolist())  # type: ignore[arg-type]

    arena = pool.arena or HostMemory(slots.writable)
    there, here = np.flatnonzero(in_pool), np.flatnonzero(~in_pool)
    with Copies(pool) as copies:
        copies.follow(source.after)
        to_pool = copies.begin(lambda: encode(there, pool.memory, pool.base)) if len(there) else None
        to_arena = copies.begin(lambda: encode(here, arena, 0)) if len(here) else None
    for coding, places in ((to_pool, there), (to_arena, here)):
        if coding is not None and copies.has_completed(coding):
            encoding.note(numbers[places], coding.good)
    return not copies.has_failed and (pool.is_usable or not len(there))
