"""Greedy dual size frequency: uses x cost / bytes, above a clock that rises to what each victim had.

H = clock + (uses again + 1) x seconds saved per byte. One clock for all orders of a cache, so that their ranks compare.

When prices change, H of what is on offer is made anew with the clock that it was offered at: some of it with each
offer, since there may be a million.
"""

from __future__ import annotations

from tierkv.core.extent import Extent
from tierkv.core.value.order import FixedOrder, Savings


class Clock:
    def __init__(self) -> None:
        self.value = 0.0


REPRICED_AT_A_TIME = 16


class GreedyDual(FixedOrder):
    def __init__(self, clock: Clock, savings: Savings) -> None:
        super().__init__()
        self._clock = clock
        self._savings = savings
        self._bases: dict[Extent, tuple[float, int]] = {}  # the clock when it was offered, and the block
        self._outdated: list[Extent] = []  # offered when prices were others

    def key(self, extent: Extent, index: int) -> float:
        return self._clock.value + self._price(extent, index)

    def _price(self, extent: Extent, index: int) -> float:
        return (extent.uses_at(index) + 1) * self._savings.seconds_per_byte_at(extent, index)

    def offer(self, extent: Extent, index: int) -> None:
        self._bases[extent] = self._clock.value, index
        super().offer(extent, index)
        for outdated in self._outdated[-REPRICED_AT_A_TIME:]:
            if outdated in self._offers:
                base, block = self._bases[outdated]
                self._push(outdated, base + self._price(outdated, block))
        del self._outdated[-REPRICED_AT_A_TIME:]

    def withdraw(self, extent: Extent) -> None:
        super().withdraw(extent)
        self._bases.pop(extent, None)

    def pop(self, now: float) -> Extent | None:
        rank = self.cheapest(now)
        if rank is not None and rank[0]:
            self._clock.value = max(self._clock.value, rank[1])
        victim = super().pop(now)
        if victim is not None:
            del self._bases[victim]
        return victim

    def repriced(self) -> None:
        self._outdated = list(self._offers)
