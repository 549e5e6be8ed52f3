"""Memory that is to be zeroed before anybody else gets it, in pieces that are asked for one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SLOTS_OF_A_WIPE = 2_048
BYTES_OF_A_WIPE = 16 * 2**20


@dataclass(slots=True, eq=False)
class Wipe:
    """Memory that is being zeroed: slots, and ranges that belong to none."""

    slots: list[int]
    ranges: list[tuple[int, int]]  # (address, bytes)
    tails: list[tuple[int, int]]  # those of them that belong to no slot

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.ranges)


def wipes_of(slots: list[int], slot_bytes: int) -> Iterator[Wipe]:
    step = max(1, min(SLOTS_OF_A_WIPE, BYTES_OF_A_WIPE // slot_bytes))
    for start in range(0, len(slots), step):
        piece = slots[start : start + step]
        yield Wipe(piece, [(slot, slot_bytes) for slot in piece], [])
