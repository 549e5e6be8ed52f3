"""In which order extents leave a tier: the one small interface, and what all orders share."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Protocol

from tierkv.core.extent import Extent
from tierkv.core.ghosts import Ghost

Rank = tuple[bool, float]
"""(whether it is no orphan, value): of two, the lower goes first, whatever order of the policy it stands in."""


class EvictionOrder(Protocol):
    """Holds the extents of one tier (of host memory: of one slot size) that may lose blocks now, leaves that nobody
    holds, and names the next victim. Orphans, which nobody can reach, go before all others."""

    def offer(self, extent: Extent, index: int) -> None:
        """`extent` may go, block `index` of it first. Replaces an earlier offer."""

    def withdraw(self, extent: Extent) -> None:
        """`extent` may not go now. No offer: no effect."""

    def next_victim(self, now: float) -> Extent | None:
        """The extent that should go first; None when nothing may go."""

    def pop(self, now: float) -> Extent | None:
        """Take out what `next_victim` names."""

    def cheapest(self, now: float) -> Rank | None:
        """The rank of what `pop` would take out."""

    def rank(self, extent: Extent, index: int, now: float) -> Rank:
        """Of block `index`, on offer or not."""

    def rank_of_new(self, kind: int, worth: float) -> Rank | None:
        """Of blocks of this kind and worth that are not stored yet: if that is below the cheapest, they are refused
        instead. None: what is new is never refused."""

    def value(self, extent: Extent, index: int, now: float) -> float:
        """Seconds that the block is expected to save, per byte and second; 0.0 if this order reckons otherwise."""

    def regretted(self, ghost: Ghost) -> None:
        """Blocks that went were asked for."""

    def repriced(self) -> None:
        """What a use saves is reckoned otherwise from now on: ranks follow."""

    def __contains__(self, extent: Extent) -> bool: ...


class Savings(Protocol):
    """What a use of a block saves."""

    def seconds_per_byte(self, extent: Extent) -> float:
        """Of prefill, for one of its blocks, wherever it is: as if at the start of the prompt."""

    def seconds_per_byte_at(self, extent: Extent, index: int) -> float:
        """Of prefill, for block `index` alone, at its position."""

    def prefix_tokens(self, extent: Extent, index: int) -> int:
        """From the first token of the prompt to the end of block `index`."""


class FixedOrder:
    """An order whose keys don't change while they wait: a heap, O(log n) an operation."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, float, int, Extent]] = []
        self._offers: dict[Extent, int] = {}
        self._numbers = count()

    def key(self, extent: Extent, index: int) -> float:
        """What goes first has the lowest."""
        raise NotImplementedError

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._offers

    def offer(self, extent: Extent, index: int) -> None:
        self._push(extent, self.key(extent, index))

    def _push(self, extent: Extent, key: float) -> None:
        number = self._offers[extent] = next(self._numbers)
        heapq.heappush(self._heap, (not extent.is_orphan, key, number, extent))
        if len(self._heap) > 4 * len(self._offers) + 64:
            self._heap = [entry for entry in self._heap if self._offers.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)

    def withdraw(self, extent: Extent) -> None:
        self._offers.pop(extent, None)

    def next_victim(self, now: float) -> Extent | None:
        while self._heap:
            _, _, number, extent = self._heap[0]
            if self._offers.get(extent) == number:
                return extent
            heapq.heappop(self._heap)
        return None

    def pop(self, now: float) -> Extent | None:
        victim = self.next_victim(now)
        if victim is not None:
            heapq.heappop(self._heap)
            del self._offers[victim]
        return victim

    def cheapest(self, now: float) -> Rank | None:
        return self._heap[0][:2] if self.next_victim(now) is not None else None

    def rank(self, extent: Extent, index: int, now: float) -> Rank:
        return not extent.is_orphan, self.key(extent, index)

    def rank_of_new(self, kind: int, worth: float) -> Rank | None:
        return None

    def value(self, extent: Extent, index: int, now: float) -> float:
        return 0.0

    def regretted(self, ghost: Ghost) -> None:
        pass

    def repriced(self) -> None:
        pass
