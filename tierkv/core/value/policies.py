"""How each policy makes its orders."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.core.value.arc import AdaptiveReplacement
from tierkv.core.value.density import ALL_ALIKE, ALL_APART, Density
from tierkv.core.value.gdsf import Clock, GreedyDual
from tierkv.core.value.hazards import Hazards
from tierkv.core.value.literal import TokensTimesRate
from tierkv.core.value.lru import LeastRecentlyUsed
from tierkv.core.value.order import EvictionOrder, Savings

ONE_KIND = "density of one kind"
"""No name for the settings: what makes density differ from last use is its kinds, and tests hold it to that."""


def order_of(policy: str, hazards: Hazards, savings: Savings) -> Callable[[], EvictionOrder]:
    """Makes the orders of one cache, one for each tier (in host memory: for each slot size). Raises KeyError for a
    policy that nobody knows."""
    clock = Clock()
    makers: dict[str, Callable[[], EvictionOrder]] = {
        "density": lambda: Density(hazards, savings, ALL_APART),
        "lru": LeastRecentlyUsed,
        "arc": AdaptiveReplacement,
        "gdsf": lambda: GreedyDual(clock, savings),
        "literal": lambda: TokensTimesRate(savings),
        ONE_KIND: lambda: Density(hazards, savings, ALL_ALIKE),
    }
    return makers[policy]
