"""In which order extents leave a tier. The seam for other formulas: whatever ranks extents implements EvictionOrder."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Protocol

from tierkv.core.extent import Extent

Rank = tuple[bool, float]
"""(whether it is no orphan, last use): of two, the lower goes first, whatever order it stands in."""


class EvictionOrder(Protocol):
    """Holds the extents that may lose blocks now (leaves, not held) and names the next victim."""

    def offer(self, extent: Extent, used: float) -> None:
        """`extent` may go; the blocks that would go first were last used at `used`. Replaces an earlier offer."""

    def withdraw(self, extent: Extent) -> None:
        """`extent` may not go now. No offer: no effect."""

    def pop(self) -> Extent | None:
        """Take out the extent that should go first; None when nothing may go."""

    def next_victim(self) -> Extent | None:
        """What `pop` would take out."""

    def oldest(self) -> Rank | None:
        """The rank of what `pop` would take out."""

    def __contains__(self, extent: Extent) -> bool: ...


class LeastRecentlyUsed:
    """Orphans first, which nobody can reach; then by last use. O(log n) an operation."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, float, int, Extent]] = []
        self._offers: dict[Extent, int] = {}
        self._numbers = count()

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._offers

    def offer(self, extent: Extent, used: float) -> None:
        number = self._offers[extent] = next(self._numbers)
        heapq.heappush(self._heap, (not extent.is_orphan, used, number, extent))
        if len(self._heap) > 4 * len(self._offers) + 64:
            self._forget_stale()

    def withdraw(self, extent: Extent) -> None:
        self._offers.pop(extent, None)

    def pop(self) -> Extent | None:
        victim = self.next_victim()
        if victim is not None:
            heapq.heappop(self._heap)
            del self._offers[victim]
        return victim

    def next_victim(self) -> Extent | None:
        while self._heap:
            _, _, number, extent = self._heap[0]
            if self._offers.get(extent) == number:
                return extent
            heapq.heappop(self._heap)
        return None

    def oldest(self) -> Rank | None:
        return self._heap[0][:2] if self.next_victim() is not None else None

    def _forget_stale(self) -> None:
        self._heap = [entry for entry in self._heap if self._offers.get(entry[3]) == entry[2]]
        heapq.heapify(self._heap)
