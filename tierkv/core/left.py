"""What an extent has in host memory and what hangs on it: as it is, or as it would be when others had gone. Rules that
decide what may leave ask this, so that a preview of an eviction goes by the same ones as the eviction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tierkv.core.extent import Branch, Extent


class Left(Protocol):
    def host_blocks(self, extent: Extent) -> int:
        """In some rank."""

    def has_host_kids(self, branch: Branch) -> bool:
        """Whether some that hang there have blocks in host memory."""

    def kids(self, branch: Branch) -> Collection[Extent]:
        """Who hangs there."""


class _AsItIs:
    def host_blocks(self, extent: Extent) -> int:
        return extent.longest_host_blocks

    def has_host_kids(self, branch: Branch) -> bool:
        return branch.host_kids > 0

    def kids(self, branch: Branch) -> Collection[Extent]:
        return branch.kids


AS_IT_IS: Left = _AsItIs()


def stay_of_segment(extent: Extent, floor: int, longest: int) -> int:
    """How many of `longest` blocks stay at least, where those from `floor` on may go: at most one segment of use goes
    at a time, the cold tail before what was hit."""
    return extent.hot_blocks if floor < extent.hot_blocks < longest else floor


def stay_of_tail(lengths: Sequence[int], floor: int, slots_needed: int) -> int:
    """How many blocks stay when as few as will do go from the tail, none before `floor`. `lengths` are those of the
    ranks' copies, each block of which has a slot."""
    longest = max(lengths)
    if min(lengths) == longest:  # as a rule: each block frees a slot of every rank
        return max(floor, longest - -(-slots_needed // len(lengths)))
    remaining, freed = longest, 0
    while remaining > floor and freed < slots_needed:
        remaining -= 1
        freed += sum(length > remaining for length in lengths)
    return remaining
