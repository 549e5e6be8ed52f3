"""What it costs to compute KV again: seconds of prefill.

    seconds(n tokens at position d) = n / rate x (1 + d / 40,000)

Attention makes a token at 40,000 cost twice what one at the start does; the rate is the engine's at the start.
"""

from __future__ import annotations

DOUBLING_TOKENS = 40_000
"""A token at this position costs twice what the first one does (a 70B model with grouped heads)."""


def prefill_seconds(tokens: int, position: int, tokens_per_second: float) -> float:
    """Seconds of prefill for `tokens` tokens, the first of which is at `position`. Exact for a stretch: the middle
    stands for all of it."""
    return tokens / tokens_per_second * (1 + (position + tokens / 2) / DOUBLING_TOKENS)
