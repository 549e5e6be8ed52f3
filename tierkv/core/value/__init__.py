"""What blocks are worth, and in which order they leave a tier."""

from tierkv.core.value.lru import EvictionOrder, LeastRecentlyUsed, Rank

__all__ = ["EvictionOrder", "LeastRecentlyUsed", "Rank"]
