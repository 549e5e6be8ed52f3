"""The order that knows value: seconds saved per byte, times uses a second that blocks of the kind and age still see.

A token counts the same wherever it is in its prompt. To count those deep in it by what they cost there keeps tails of
long prompts for the sake of few: it lost a fifth of the hits of coding agents, and saved no more seconds.

Within a kind the oldest is the least likely to come back, as a rule; but not where sessions return in a cycle longer
than the tier holds. There keeping some whole is worth more than keeping all for a while, and so the youngest of each
kind is a candidate too, at a small advantage. What is not stored yet is the youngest of all.

    of each kind   oldest ... youngest        two heaps, entries that are out of date are passed over
    candidates     <-             ->          their ranks are kept until age, estimate, prices or the heap change
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from tierkv.core.extent import Extent
from tierkv.core.ghosts import Ghost
from tierkv.core.value.hazards import Hazards, age_bucket, bucket_end
from tierkv.core.value.kinds import NUM_KINDS
from tierkv.core.value.order import Rank, Savings

ALL_APART: Sequence[int] = range(NUM_KINDS)
ALL_ALIKE: Sequence[int] = (0,) * NUM_KINDS
"""With one kind the oldest goes, always: least recently used."""


_NEVER = float("inf")


class _Candidate(NamedTuple):
    rank: Rank
    number: int  # of the offer
    extent: Extent
    until: float  # it is right so long


_Entry = tuple[float, int, Extent]  # last use and number, for the youngest negated


class _Queue:
    """The extents on offer of one kind, from both ends."""

    __slots__ = ("candidates", "heaps", "kind", "live")

    def __init__(self, kind: int, num_ends: int) -> None:
        self.kind = kind
        self.heaps: list[list[_Entry]] = [[] for _ in range(num_ends)]
        self.candidates: list[_Candidate | None] = [None] * num_ends
        self.live = 0


class Density:
    def __init__(self, hazards: Hazards, savings: Savings, kinds: Sequence[int] = ALL_APART) -> None:
        self._hazards = hazards
        self._advantage = hazards.tuning.youngest_advantage
        self._savings = savings
        self._kinds = kinds
        self._is_plain = len(set(kinds)) == 1
        self._queues = [_Queue(kind, 1 if self._is_plain else 2) for kind in range(max(kinds) + 1)]
        self._orphans = _Queue(0, 1)
        self._offers: dict[Extent, tuple[int, _Queue, int]] = {}  # number, queue, index of the block
        self._numbers = count(1)
        self._version = 0  # of the hazards that the candidates were ranked by
        self._choice: _Candidate | None = None  # while nothing that it was chosen from has changed
        self._choice_until = 0.0

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._offers

    # ---- who is on offer

    def offer(self, extent: Extent, index: int) -> None:
        self.withdraw(extent)
        queue = self._orphans if extent.is_orphan else self._queues[self._kinds[extent.kind_at(index)]]
        number, used = next(self._numbers), extent.used_at(index)
        self._offers[extent] = number, queue, index
        queue.live += 1
        for end, heap in enumerate(queue.heaps):
            heapq.heappush(heap, (-used, -number, extent) if end else (used, number, extent))
            if len(heap) > 4 * queue.live + 64:
                heap[:] = [entry for entry in heap if self._is_offered(entry)]
                heapq.heapify(heap)
            if queue.candidates[end] is None or abs(heap[0][1]) == number:
                queue.candidates[end] = self._choice = None

    def withdraw(self, extent: Extent) -> None:
        known = self._offers.pop(extent, None)
        if known is None:
            return
        number, queue, _ = known
        queue.live -= 1
        for end, candidate in enumerate(queue.candidates):
            if candidate is not None and candidate.number == number:
                queue.candidates[end] = self._choice = None

    def _is_offered(self, entry: _Entry) -> bool:
        known = self._offers.get(entry[2])
        return known is not None and known[0] == abs(entry[1])

    # ---- who goes

    def next_victim(self, now: float) -> Extent | None:
        choice = self._choose(now)
        return choice.extent if choice is not None else None

    def pop(self, now: float) -> Extent | None:
        victim = self.next_victim(now)
        if victim is not None:
            self.withdraw(victim)
        return victim

    def cheapest(self, now: float) -> Rank | None:
        choice = self._choose(now)
        return choice.rank if choice is not None else None

    def _choose(self, now: float) -> _Candidate | None:
        if self._version != self._hazards.version:
            self._version = self._hazards.version
            self._forget_ranks()
        if self._choice is not None and now < self._choice_until:
            return self._choice
        choice = self._candidate(self._orphans, 0, now) if self._orphans.live else None
        until = choice.until if choice is not None else _NEVER
        for queue in self._queues if choice is None else ():
            if queue.live:
                for end, known in enumerate(queue.candidates):
                    is_right = known is not None and now < known.until
                    candidate = known if is_right and known is not None else self._candidate(queue, end, now)
                    if choice is None or candidate.rank < choice.rank:
                        choice = candidate
                    if candidate.until < until:  # noqa: PLR1730 this is the inner loop of every decision
                        until = candidate.until
        self._choice, self._choice_until = choice, until
        return choice

    def _candidate(self, queue: _Queue, end: int, now: float) -> _Candidate:
        """The oldest or youngest of a queue that is not empty, ranked as `rank` does it, with what is known here."""
        heap = queue.heaps[end]
        while not self._is_offered(heap[0]):
            heapq.heappop(heap)
        used, number, extent = heap[0]
        if end:
            used, number = -used, -number
        if self._is_plain or queue is self._orphans:
            candidate = _Candidate((queue is not self._orphans, used), number, extent, _NEVER)
        elif not self._hazards.has_learnt:
            candidate = _Candidate((True, used), number, extent, now)
        else:
            bucket = age_bucket(now - used)
            value = self._hazards.index_in(queue.kind, bucket) * self._savings.seconds_per_byte(extent)
            rank = True, value * self._advantage if end else value
            candidate = _Candidate(rank, number, extent, used + bucket_end(bucket))
        queue.candidates[end] = candidate
        return candidate

    # ---- what it is worth

    def rank(self, extent: Extent, index: int, now: float) -> Rank:
        if self._is_plain or extent.is_orphan or not self._hazards.has_learnt:
            return not extent.is_orphan, extent.used_at(index)
        return True, self.value(extent, index, now)

    def rank_of_new(self, kind: int, worth: float) -> Rank | None:
        if self._is_plain or not self._hazards.has_learnt:
            return None
        return True, self._advantage * self._hazards.index(kind, 0.0) * worth

    def value(self, extent: Extent, index: int, now: float) -> float:
        age = now - extent.used_at(index)
        return self._hazards.index(extent.kind_at(index), age) * self._savings.seconds_per_byte(extent)

    def regretted(self, ghost: Ghost) -> None:
        pass

    def repriced(self) -> None:
        """The heaps are by last use, whatever it is worth."""
        self._forget_ranks()

    def _forget_ranks(self) -> None:
        self._choice = None
        for queue in self._queues:
            queue.candidates = [None] * len(queue.candidates)
