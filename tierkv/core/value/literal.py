"""The formula as it is said first: tokens saved on a hit x recent hit rate. For comparison; it loses to LRU.

A hit on a block saves its whole prefix, and the rate halves every 300 s. All rates fade alike, so that
log2(tokens x uses at the last use) + last use / 300 s orders blocks once and for all.
"""

from __future__ import annotations

from math import log2

from tierkv.core.extent import Extent
from tierkv.core.value.order import FixedOrder, Savings

HALF_LIFE_SECONDS = 300.0


class TokensTimesRate(FixedOrder):
    def __init__(self, savings: Savings) -> None:
        super().__init__()
        self._savings = savings
        self._uses: dict[Extent, tuple[float, float]] = {}  # last use, and uses then, each fading since its time

    def offer(self, extent: Extent, index: int) -> None:
        self._note_use(extent, index)
        super().offer(extent, index)

    def key(self, extent: Extent, index: int) -> float:
        tokens = self._savings.prefix_tokens(extent, index)
        _, uses = self._uses.get(extent, (0.0, 1.0))
        return log2(tokens * uses) + extent.used_at(index) / HALF_LIFE_SECONDS

    def _note_use(self, extent: Extent, index: int) -> None:
        used = extent.used_at(index)
        before, uses = self._uses.get(extent, (used, 1.0 + extent.uses_at(index)))
        if used > before:
            uses = 1 + uses * 2 ** ((before - used) / HALF_LIFE_SECONDS)
        self._uses[extent] = used, uses
        if len(self._uses) > 4 * len(self._offers) + 1_024:
            self._uses = {known: state for known, state in self._uses.items() if known.in_tree}
