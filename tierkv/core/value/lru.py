"""Least recently used: by last use and nothing else."""

from __future__ import annotations

from tierkv.core.extent import Extent
from tierkv.core.value.order import FixedOrder


class LeastRecentlyUsed(FixedOrder):
    def key(self, extent: Extent, index: int) -> float:
        return extent.used_at(index)
