"""Greedy dual size frequency: uses x cost / bytes, above a clock that rises to what each victim had.

H = clock + (uses again + 1) x seconds saved per byte. One clock for all orders of a cache, so that their ranks compare.
"""

from __future__ import annotations

from tierkv.core.extent import Extent
from tierkv.core.value.order import FixedOrder, Savings


class Clock:
    def __init__(self) -> None:
        self.value = 0.0


class GreedyDual(FixedOrder):
    def __init__(self, clock: Clock, savings: Savings) -> None:
        super().__init__()
        self._clock = clock
        self._savings = savings

    def key(self, extent: Extent, index: int) -> float:
        return self._clock.value + (extent.uses_at(index) + 1) * self._savings.seconds_per_byte_at(extent, index)

    def pop(self, now: float) -> Extent | None:
        rank = self.cheapest(now)
        if rank is not None and rank[0]:
            self._clock.value = max(self._clock.value, rank[1])
        return super().pop(now)
