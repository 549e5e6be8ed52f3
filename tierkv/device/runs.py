"""Copies of blocks, joined where their slots are neighbours on both sides: each costs the driver a few microseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SLOT_ALIGNMENT = 4096
"""A block's slot ends at a multiple of it: what is between belongs to the same slot, and may be copied along."""


def find_copies(
    sources: Sequence[int], targets: Sequence[int], block_bytes: int, *, whole_slots: bool
) -> Iterator[tuple[int, int, int]]:
    """(source, target, bytes) for blocks of `block_bytes` at the offsets given, in their order. `whole_slots`: nothing
    but the block is in its slot, on either side, so that the rest of it may be copied along."""
    if block_bytes == 0:
        return
    slot_bytes = -(-block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT if whole_slots else block_bytes
    first = 0
    for index in range(1, len(sources) + 1):
        if index < len(sources):
            step = sources[index] - sources[index - 1]
            if step in (block_bytes, slot_bytes) and targets[index] - targets[index - 1] == step:
                continue
        last = index - 1
        yield sources[first], targets[first], sources[last] - sources[first] + block_bytes
        first = index
