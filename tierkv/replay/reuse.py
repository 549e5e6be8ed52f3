"""How much room each hit needs: from one pass over a trace, what every capacity would find.

A block is found by a cache that drops what was used longest ago if its capacity holds the block and all that was used
since. That is the cache's LRU, exactly, as long as blocks are stored when they are missed; the policy of a node does
as well or better (docs/replay.md), and `tierkv replay` says by how much.

Blocks are used in paths, the deepest as the oldest. So of a path that was used before, what has been used again since
is a beginning of it, and what is left takes one step and not one a block.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from tierkv.core.prefix_sums import PrefixSums
from tierkv.core.value.cost import prefill_seconds
from tierkv.replay.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class Found:
    """Sums over all hits: tokens, seconds of prefill they spare, bytes that were read for them."""

    tokens: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReuseCurve:
    """`needs` are capacities at which more is found than below, ascending; `found` what is found there."""

    needs: list[int]
    found: list[Found]

    def at(self, capacity_bytes: int) -> Found:
        place = bisect_right(self.needs, capacity_bytes)
        return self.found[place - 1] if place else Found()

    @property
    def ceiling_bytes(self) -> int:
        """The least capacity that finds everything there is to find; 0 where nothing is ever used again."""
        return self.needs[-1] if self.needs else 0

    @property
    def ceiling(self) -> Found:
        return self.found[-1] if self.found else Found()

    def need_for(self, share: float) -> int:
        """The least capacity that saves this share of the seconds that can be saved."""
        wanted = share * self.ceiling.seconds
        return next((need for need, found in zip(self.needs, self.found, strict=True) if found.seconds >= wanted), 0)

    def knee_bytes(self) -> int:
        """Where the curve of saved seconds bends most: it lies highest above the line from nothing to the ceiling."""
        if not self.needs or not self.ceiling.seconds:
            return 0
        height, width = self.ceiling.seconds, self.ceiling_bytes
        places = range(len(self.needs))
        best = max(places, key=lambda place: self.found[place].seconds / height - self.needs[place] / width)
        return self.needs[best]


def reuse_curve(trace: Trace, rate: float) -> ReuseCurve:
    """`rate`: tokens of prefill a second."""
    last = array("l", [-1]) * trace.num_blocks  # the step that used a block last
    used = PrefixSums(len(trace.steps))  # bytes of blocks by the step that used them last
    gains: defaultdict[int, list[float]] = defaultdict(lambda: [0, 0.0, 0])
    for number, step in enumerate(trace.steps):
        group = trace.groups[step.group]
        runs = list(_runs(step, last))
        if step.asks:
            for first, count, step_before in runs:
                newer = used.after(step_before)
                for place in range(count):
                    gain = gains[newer + (place + 1) * group.block_bytes]
                    gain[0] += group.block_tokens
                    gain[1] += prefill_seconds(group.block_tokens, (first + place) * group.block_tokens, rate)
                    gain[2] += group.block_bytes
        known = sum(count for _, count, _ in runs)
        for _, count, step_before in runs:
            used.add(step_before, -count * group.block_bytes)
        touched = step.blocks if step.stores else step.blocks[:known]
        used.add(number, len(touched) * group.block_bytes)
        for block in touched:
            last[block] = number
    needs = sorted(gains)
    parts = zip(*(gains[need] for need in needs), strict=True)
    sums = zip(*map(accumulate, parts), strict=True)
    return ReuseCurve(needs, [Found(int(tokens), seconds, int(num_bytes)) for tokens, seconds, num_bytes in sums])


def _runs(step: Step, last: array[int]) -> Iterator[tuple[int, int, int]]:
    """Stretches of a path that one earlier step used last, as (first, count, that step). Behind a block that nobody
    has used yet there is none that anybody has."""
    blocks = step.blocks
    first = 0
    while first < len(blocks) and (before := last[blocks[first]]) >= 0:
        stop = first + 1
        while stop < len(blocks) and last[blocks[stop]] == before:
            stop += 1
        yield first, stop - first, before
        first = stop
