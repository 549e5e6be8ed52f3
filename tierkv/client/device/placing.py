"""In which memory the slots of a reply lie: what a node says is checked before it is used as an address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierkv.client.device.pool import DevicePool, MappedPool
from tierkv.client.session import Session


@dataclass(frozen=True, slots=True)
class Placed:
    """The first `count` slots lie in memory that is mapped here: in the arena, or in `pool`, which is held then."""

    count: int
    pool: MappedPool | None = None

    def let_go(self) -> None:
        if self.pool is not None:
            self.pool.let_go()


def place(offsets: np.ndarray, session: Session, slot_bytes: int, pools: Sequence[DevicePool]) -> Placed | None:
    """None for addresses that no node may grant. Addresses beyond the arena are those of a pool that is mapped now;
    where none has them, though there were pools, it has ended meanwhile, and what comes before them counts."""
    arena = session.arena
    if arena is None:
        return None
    page = arena.page_bytes
    last = arena.arena_bytes - slot_bytes
    if page & (page - 1) or last < 0:
        return None
    all_bits = int(np.bitwise_or.reduce(offsets))  # negative where one of them is: 2**63 and more, as it was sent
    if all_bits < 0 or all_bits & (page - 1):
        return None
    if int(offsets.max()) <= last:
        return Placed(len(offsets))
    beyond = offsets > last
    lowest, highest = int(offsets[beyond].min()), int(offsets.max()) + slot_bytes
    if lowest < arena.arena_bytes or not pools:
        return None
    for pool in pools:
        mapped = pool.mapped_under(session)
        if mapped is not None and mapped.base <= lowest and highest <= mapped.base + mapped.num_bytes and mapped.hold():
            return Placed(len(offsets), mapped)
    return Placed(int(np.argmax(beyond)))
