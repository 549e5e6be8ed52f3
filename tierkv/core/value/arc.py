"""ARC (adaptive replacement cache) in tree form: what was used once beside what was used again, and a moving border.

Two queues by last use, of leaves never hit and of leaves hit. A ghost that is asked for says which of them was kept too
short: the share of the first grows with each that was never hit before it went, and shrinks with each that was. The
ghost lists are the node's ghosts, which reach further back than the two lists of the original.
"""

from __future__ import annotations

from tierkv.core.extent import Extent
from tierkv.core.ghosts import Ghost
from tierkv.core.value.lru import LeastRecentlyUsed
from tierkv.core.value.order import Rank


class AdaptiveReplacement:
    """Counts in blocks. Ranks are last use, as those of other orders must compare with them."""

    def __init__(self) -> None:
        self._once, self._again = LeastRecentlyUsed(), LeastRecentlyUsed()
        self._sizes: dict[Extent, tuple[LeastRecentlyUsed, int]] = {}
        self._blocks = {self._once: 0, self._again: 0}
        self._gone = {self._once: 0, self._again: 0}  # blocks that went and were not asked for since
        self._target = 0.0  # for `_once`

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._sizes

    def offer(self, extent: Extent, index: int) -> None:
        self.withdraw(extent)
        queue = self._again if extent.uses_at(index) else self._once
        self._sizes[extent] = queue, index + 1
        self._blocks[queue] += index + 1
        queue.offer(extent, index)

    def withdraw(self, extent: Extent) -> None:
        known = self._sizes.pop(extent, None)
        if known is not None:
            queue, blocks = known
            self._blocks[queue] -= blocks
            queue.withdraw(extent)

    def _next_queue(self, now: float) -> LeastRecentlyUsed:
        once, again = self._once.cheapest(now), self._again.cheapest(now)
        if once is None or again is None:
            return self._once if again is None else self._again
        if once[0] != again[0]:  # an orphan
            return self._once if once < again else self._again
        return self._once if self._blocks[self._once] > self._target else self._again

    def next_victim(self, now: float) -> Extent | None:
        return self._next_queue(now).next_victim(now)

    def pop(self, now: float) -> Extent | None:
        victim = self.next_victim(now)
        if victim is not None:
            queue, blocks = self._sizes[victim]
            self._gone[queue] += blocks
            self.withdraw(victim)
        return victim

    def cheapest(self, now: float) -> Rank | None:
        return self._next_queue(now).cheapest(now)

    def rank(self, extent: Extent, index: int, now: float) -> Rank:
        return self._once.rank(extent, index, now)

    def rank_of_new(self, kind: int, worth: float) -> Rank | None:
        return None

    def value(self, extent: Extent, index: int, now: float) -> float:
        return 0.0

    def regretted(self, ghost: Ghost) -> None:
        mine, other = (self._again, self._once) if ghost.uses else (self._once, self._again)
        step = ghost.blocks * max(1.0, self._gone[other] / max(1, self._gone[mine]))
        self._gone[mine] = max(0, self._gone[mine] - ghost.blocks)
        if mine is self._once:
            self._target = min(self._target + step, float(sum(self._blocks.values())))
        else:
            self._target = max(0.0, self._target - step)

    def repriced(self) -> None:
        pass
