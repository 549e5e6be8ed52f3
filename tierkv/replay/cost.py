"""What a hit saves: the seconds of prefill that need not be spent again."""

from __future__ import annotations

ATTENTION_TOKENS = 40_000
"""At so many tokens of context attention costs as much again as everything else."""

PREFILL_TOKENS_PER_SECOND = 12_000.0


def prefill_seconds(tokens: int, block_tokens: int, rate: float) -> float:
    """Computing the first `tokens` tokens of a prompt: each block of B tokens at position d costs
    B / rate x (1 + d / ATTENTION_TOKENS), what is left behind the last full block likewise."""
    full, rest = divmod(tokens, block_tokens)
    at_blocks = block_tokens * full * (full - 1) // 2  # sum of the blocks' positions
    linear = full * block_tokens + rest
    return (linear + (block_tokens * at_blocks + rest * full * block_tokens) / ATTENTION_TOKENS) / rate
