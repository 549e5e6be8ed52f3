"""What no policy can pass: a cache that never forgets, and one that knows the future.

The second keeps, of all it has and of all that was just computed, the blocks whose next use is soonest (Belady, with
the freedom to keep nothing of what is new). Among blocks of one size that is the most hits there can be, also in a
prefix tree: a block is never used later than what hangs on it, so that leaves are always the first to go.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass

from tierkv.core.value.cost import prefill_seconds
from tierkv.replay.trace import Step, Trace

_NEVER = 2**40
_DEPTH_BITS = 22  # of a number that orders by next use and then by depth


@dataclass(frozen=True, slots=True)
class Bound:
    hit_tokens: int
    saved_seconds: float


def infinite(trace: Trace, rate: float) -> Bound:
    """Everything that was stored is found again."""
    known = bytearray(trace.num_blocks)
    hits = _Hits(trace, rate)
    for step in trace.steps:
        if step.asks:
            hits.count(step, _leading(step.blocks, known))
        if step.stores:
            for block in step.blocks:
                known[block] = 1
    return hits.bound()


def belady(trace: Trace, capacity_bytes: int, rate: float) -> Bound | None:
    """The most hits that a cache of this size could have had. None where blocks have several sizes: the best choice
    among them can't be found in reasonable time."""
    size = trace.block_bytes
    if size is None:
        return None
    capacity = capacity_bytes // size
    next_uses = _next_uses(trace)
    there = bytearray(trace.num_blocks)
    due = array("q", bytes(8 * trace.num_blocks))
    used = 0
    latest: list[tuple[int, int]] = []  # (-what is in due, block): the first goes first
    hits = _Hits(trace, rate)
    for step, uses in zip(trace.steps, next_uses, strict=True):
        if step.asks:
            hits.count(step, _leading(step.blocks, there))
        for depth, (block, use) in enumerate(zip(step.blocks, uses, strict=True)):
            if not (there[block] or step.stores):
                continue
            stays = use < _NEVER
            used += stays - there[block]
            there[block] = stays
            if stays:
                due[block] = use << _DEPTH_BITS | depth
                heapq.heappush(latest, (-due[block], block))
        while used > capacity:
            order, block = heapq.heappop(latest)
            if there[block] and due[block] == -order:
                there[block] = False
                used -= 1
    return hits.bound()


def _next_uses(trace: Trace) -> list[array[int]]:
    """For each block of each step, the number of the next step that asks for it."""
    following = array("q", [_NEVER]) * trace.num_blocks
    uses: list[array[int]] = []
    for number in range(len(trace.steps) - 1, -1, -1):
        step = trace.steps[number]
        uses.append(array("q", map(following.__getitem__, step.blocks)))
        if step.asks:
            for block in step.blocks:
                following[block] = number
    uses.reverse()
    return uses


def _leading(blocks: array[int], there: bytearray) -> int:
    """How many blocks from the first on are there."""
    for index, block in enumerate(blocks):
        if not there[block]:
            return index
    return len(blocks)


class _Hits:
    def __init__(self, trace: Trace, rate: float) -> None:
        self._block_tokens = [group.block_tokens for group in trace.groups]
        self._rate = rate
        self._tokens = 0
        self._seconds = 0.0

    def count(self, step: Step, blocks: int) -> None:
        size = self._block_tokens[step.group]
        self._tokens += blocks * size
        self._seconds += prefill_seconds(blocks * size, 0, self._rate)

    def bound(self) -> Bound:
        return Bound(self._tokens, self._seconds)
