"""Kinds of blocks: what is known of a block when it was used last. Blocks of one kind come back alike.

    never hit    5 kinds, by the tokens of the uncached suffix it was computed with
    hit          4 x 5 kinds: hit once, twice, 3 to 5 times, more often; each by the time between its last two uses

Chat: of a new suffix of one to three blocks of 512 every second one is reused, of one with 128 every fifth.
"""

from __future__ import annotations

from math import log2

from tierkv.core.value.tuning import Tuning

NUM_KINDS = 25
KINDS_OF_A_GROUP = 5
"""Kinds of one number of hits: estimates of kinds with little data lean on those of their group."""

UNKNOWN_NEW = 2
UNKNOWN_GAP_SECONDS = 240.0
"""The middle ones, for what an earlier life of the node has left on disk."""

_GROUP_OF_HITS = (0, 1, 2, 3, 3, 3)


def kind_of_new(suffix_tokens: int, tuning: Tuning) -> int:
    """Of a block that was never hit: edges at 1 Ki, 7 Ki, 31 Ki and 127 Ki tokens, if nothing else is said."""
    return min(4, int(log2(1 + suffix_tokens / tuning.suffix_tokens) / 2 + 0.5))


def kind_of_used(hits: int, gap_seconds: float, tuning: Tuning) -> int:
    """Of a block that has been hit `hits` times, the last time `gap_seconds` after the use before."""
    group = _GROUP_OF_HITS[hits] if hits < len(_GROUP_OF_HITS) else 4
    return KINDS_OF_A_GROUP * group + min(4, int(log2(1 + max(0.0, gap_seconds) / tuning.gap_seconds) / 2))
