"""The formula as it is said first: tokens saved on a hit x recent hit rate. For comparison; it loses to LRU.

A hit on a block saves its whole prefix, and the rate halves every 300 s. All rates fade alike, so that
log2(tokens x uses at the last use) + last use / 300 s orders blocks once and for all.
"""

from __future__ import annotations

from math import log2

from tierkv.core.extent import HALF_LIFE_SECONDS, Extent
from tierkv.core.value.order import FixedOrder, Savings


class TokensTimesRate(FixedOrder):
    def __init__(self, savings: Savings) -> None:
        super().__init__()
        self._savings = savings

    def key(self, extent: Extent, index: int) -> float:
        tokens = self._savings.prefix_tokens(extent, index)
        return log2(tokens * extent.heat_at(index)) + extent.used_at(index) / HALF_LIFE_SECONDS
