"""How likely and how soon blocks of a kind are used again, learnt from the uses themselves.

An *exposure* is the time from one use of some blocks to the next. For each kind of block and bucket of age

    E  uses that came at that age
    R  exposures that reached that age: those that ended by a use then or later, and those that wait and are older
       (that wait and have just that age: half)
    p  = E / R, both pooled with the neighbouring buckets', drawn towards the group's and the whole's where there is
       little data: the hazard

and from the hazards the index: uses a second of residence, if one gives up at the best time. Exposures of evicted
blocks count like those of cached ones, or the estimate would believe that whatever is evicted was never wanted.

What was learnt fades, E and R alike and at every age alike: both are counts of the same stretch of time, the last few
thousand requests. To count exposures from their beginning to their end instead lets what is old be known only from late
times and what is young from early ones as well; where requests grow, what is old then looks the more wanted. To let
only the uses fade would make everything look less wanted than it is.

Weights are in units of 512 tokens, whatever the size of blocks and extents.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from math import exp, log2

from tierkv.core.value.kinds import KINDS_OF_A_GROUP, NUM_KINDS
from tierkv.core.value.tuning import AS_MEASURED, Tuning

TOKENS_OF_A_UNIT = 512

NUM_BUCKETS = 44
"""Of age, three to each doubling of 1 + seconds: the last begins after 5.7 hours."""

_FIRST_REQUESTS = frozenset({16, 32, 64, 128})

_SLOT_SECONDS = (1, 8, 64, 512)
_SLOTS_OF_A_SIZE = 64
"""What waits is counted by its time of last use in slots of each size at once, and read in those that are fine enough
for its age: of each size about so many, of the last all there are."""

_EDGES = [2 ** (bucket / 3) - 1 for bucket in range(NUM_BUCKETS + 1)]
_WIDTHS = [high - low for low, high in pairwise(_EDGES)]


def age_bucket(age: float) -> int:
    return min(NUM_BUCKETS - 1, int(3 * log2(1 + age))) if age > 0 else 0


def bucket_end(bucket: int) -> float:
    """The age at which the next bucket begins."""
    return _EDGES[bucket + 1] if bucket + 1 < NUM_BUCKETS else float("inf")


class _Counts:
    """Of one kind, by bucket of age: what ended since the start, and what is remembered of uses and of exposures that
    came so far."""

    __slots__ = ("_seen_reached", "_seen_used", "forgotten", "reached", "used", "uses")

    def __init__(self) -> None:
        self.used, self.forgotten = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS
        self._seen_used, self._seen_reached = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS
        self.uses, self.reached = [0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS

    def new_uses(self) -> float:
        return sum(self.used) - sum(self._seen_used)

    def learn(self, waiting: list[float], fade: float) -> None:
        """What is new since the last time is the difference of sums over all time; `waiting` is what waits now."""
        reached = _reached(self.used, _add(waiting, self.forgotten))
        self.uses = _faded(self.uses, fade, self.used, self._seen_used)
        self.reached = _faded(self.reached, fade, reached, self._seen_reached)
        self._seen_used, self._seen_reached = self.used[:], reached


class Hazards:
    """One for all tiers: uses happen to prefixes, wherever they are."""

    def __init__(self, tuning: Tuning = AS_MEASURED) -> None:
        self.tuning = tuning
        self.version = 0
        self._start: float | None = None  # exposures that began before are not counted
        self._counts = [_Counts() for _ in range(NUM_KINDS)]
        self._waiting: list[list[defaultdict[int, float]]] = [
            [defaultdict(float) for _ in _SLOT_SECONDS] for _ in range(NUM_KINDS)
        ]
        self._ancient = [0.0] * NUM_KINDS  # what waits and is in the last bucket for good
        self._ancient_until = 0  # slots of the coarsest size below this one are in there
        self._index: list[list[float]] = []  # by kind and bucket; none before there is data
        self._requests = 0
        self._learnt_at = 0  # request
        self._due = 0.0
        self._kept_since = 0  # second from which on the finest slots are all there

    def begin(self, kind: int, used: float, units: float) -> None:
        """Blocks of this kind were used at `used`, and wait for their next use."""
        time = int(used)
        for seconds, slots in zip(_SLOT_SECONDS, self._waiting[kind], strict=True):
            slots[time // seconds] += units

    def withdraw(self, kind: int, used: float, units: float) -> None:
        """As if `begin` had not been said."""
        time = int(used)
        for seconds, slots in zip(_SLOT_SECONDS, self._waiting[kind], strict=True):
            if time // seconds in slots:
                slots[time // seconds] -= units
            elif seconds == _SLOT_SECONDS[-1] and time // seconds < self._ancient_until and self.counts(used):
                self._ancient[kind] -= units

    def end(self, kind: int, used: float, now: float, units: float) -> None:
        """They are used."""
        self.withdraw(kind, used, units)
        if self.counts(used):
            self._counts[kind].used[age_bucket(now - used)] += units

    def forget(self, kind: int, used: float, now: float, units: float) -> None:
        """Nobody will know whether they are used again: until now they were not."""
        self.withdraw(kind, used, units)
        if self.counts(used):
            self._counts[kind].forgotten[age_bucket(now - used)] += units

    def request(self, now: float) -> None:
        """A request is about to be served: learn from what has happened, when that is due."""
        if self._start is None:
            self._start = now
        self._requests += 1
        is_due = self._requests % self.tuning.learn_requests == 0 or now >= self._due
        if self._requests in _FIRST_REQUESTS or (is_due and self._requests > max(_FIRST_REQUESTS)):
            self._learn(now)

    def index(self, kind: int, age: float) -> float:
        """Uses a second of residence to be expected of blocks of this kind and age; before there is data, of age."""
        return self._index[kind][age_bucket(age)] if self._index else 1 / (1 + max(0.0, age))

    def index_in(self, kind: int, bucket: int) -> float:
        """The same by bucket of age, once there is data."""
        return self._index[kind][bucket]

    @property
    def has_learnt(self) -> bool:
        return bool(self._index)

    def counts(self, used: float) -> bool:
        """What was used then is counted while it waits; of earlier uses nothing is known."""
        return self._start is not None and used >= self._start

    # ---- learning

    def _learn(self, now: float) -> None:
        self._due = now + self.tuning.learn_seconds
        self.version += 1
        self._fold_ancient(now)
        fade = self._fade()
        for kind, counts in enumerate(self._counts):
            counts.learn(self._waiting_by_age(kind, now), fade)
        self._index = self._index_of([c.uses for c in self._counts], [c.reached for c in self._counts])

    def _fade(self) -> float:
        """What is left of what was known, after what has happened since."""
        requests, self._learnt_at = self._requests - self._learnt_at, self._requests
        units = sum(counts.new_uses() for counts in self._counts)
        return exp(-min(requests / self.tuning.memory_requests, units / self.tuning.memory_units))

    def _index_of(self, used: list[list[float]], reached: list[list[float]]) -> list[list[float]]:
        """Of uses and exposures by kind and bucket; empty where next to nothing is used again.

        Neighbouring buckets are pooled first. A prompt brings all its blocks at once, so that thousands of units are a
        few dozen events, and the index goes for the best of all times to give up: for whichever bucket was lucky."""
        tuning = self.tuning
        used, reached = [_pooled(row) for row in used], [_pooled(row) for row in reached]
        used_all, reached_all = _sum(used), _sum(reached)
        uses = sum(used_all)
        if uses <= tuning.least_share * max(uses, reached_all[0]):
            return []
        p_all = [(e + 0.001) / (max(r, e) + 1) for e, r in zip(used_all, reached_all, strict=True)]
        all_index = _best_rates(p_all)
        index = []
        own_share, m = tuning.own_share, tuning.shrinkage_units
        for first in range(0, NUM_KINDS, KINDS_OF_A_GROUP):
            kinds = range(first, first + KINDS_OF_A_GROUP)
            p_group = _shrunk(_sum([used[k] for k in kinds]), _sum([reached[k] for k in kinds]), p_all, m)
            for kind in kinds:
                own = _best_rates(_shrunk(used[kind], reached[kind], p_group, m))
                index.append([o**own_share * a ** (1 - own_share) for o, a in zip(own, all_index, strict=True)])
        return index

    def _fold_ancient(self, now: float) -> None:
        """What has come to the last bucket stays there: no slot is needed for it any more."""
        seconds = _SLOT_SECONDS[-1]
        until = int(now - _EDGES[NUM_BUCKETS - 1]) // seconds
        if until <= self._ancient_until:
            return
        self._ancient_until = until
        for kind, waiting in enumerate(self._waiting):
            slots = waiting[-1]
            for slot in [slot for slot in slots if slot < until]:
                self._ancient[kind] += slots.pop(slot)

    def _waiting_by_age(self, kind: int, now: float) -> list[float]:
        """What waits and began since the start. Slots too fine for the age of what is in them are given up."""
        by_age = [0.0] * NUM_BUCKETS
        by_age[-1] = max(0.0, self._ancient[kind])
        begin = int(self._start or 0.0)
        until = int(now) + 1  # of times before that the finer slots have told
        for seconds, coarser, slots in zip(_SLOT_SECONDS, (*_SLOT_SECONDS[1:], 0), self._waiting[kind], strict=True):
            since = begin // seconds * seconds
            if coarser:  # up to where a slot of the next size ends
                since = max(since, (int(now) - seconds * _SLOTS_OF_A_SIZE) // coarser * coarser)
            for slot in [slot for slot in slots if slot * seconds < since]:
                del slots[slot]
            for slot, units in slots.items():
                if slot * seconds < until and units > 0:
                    by_age[age_bucket(now - (slot + 0.5) * seconds)] += units
            if seconds == 1:
                self._kept_since = max(self._kept_since, since)
            until = since
        return by_age

    # ---- for the audit

    def waiting_by_second(self, kind: int) -> dict[int, float]:
        """Units by second of last use, as far back as these are kept."""
        since = max(self._kept_since, int(self._start) + 1 if self._start is not None else 0)
        return {second: units for second, units in self._waiting[kind][0].items() if second >= since}


def _sum(rows: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _add(one: list[float], other: list[float]) -> list[float]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _reached(used: list[float], open_ended: list[float]) -> list[float]:
    reached = []
    behind = 0.0
    for uses, open_ones in zip(reversed(used), reversed(open_ended), strict=True):
        reached.append(behind + uses + open_ones / 2)
        behind += uses + open_ones
    reached.reverse()
    return reached


def _pooled(row: list[float]) -> list[float]:
    """Each with a quarter of either neighbour; at the ends its own stands for the one that isn't there."""
    return [
        (below + 2 * own + above) / 4
        for below, own, above in zip(row[:1] + row[:-1], row, row[1:] + row[-1:], strict=True)
    ]


def _faded(known: list[float], fade: float, now: list[float], before: list[float]) -> list[float]:
    return [fade * k + n - b for k, n, b in zip(known, now, before, strict=True)]


def _shrunk(used: list[float], reached: list[float], towards: list[float], m: float) -> list[float]:
    """`m` units of `towards` beside what was seen."""
    return [(e + m * p) / (max(r, e) + m) for e, r, p in zip(used, reached, towards, strict=True)]


def _best_rates(hazards: list[float]) -> list[float]:
    """For each bucket a: max over e >= a of  sum S_b p_b / sum S_b w_b (1 - p_b / 2)  for b in a..e, where S_b is the
    chance to come from a to b unused.

    From the last bucket to the first, stretches of buckets are joined while the next one has the better rate: the first
    stretch then ends where giving up is best. Each is joined once, so that it is linear.
    """
    stretches: list[tuple[float, float, float]] = []  # uses, seconds, chance to come through; the first is on top
    rates = [0.0] * len(hazards)
    for bucket in range(len(hazards) - 1, -1, -1):
        p = min(hazards[bucket], 1.0)
        uses, seconds, through = p, _WIDTHS[bucket] * (1 - p / 2), 1 - p
        while stretches and stretches[-1][0] * seconds > uses * stretches[-1][1]:
            next_uses, next_seconds, next_through = stretches.pop()
            uses += through * next_uses
            seconds += through * next_seconds
            through *= next_through
        stretches.append((uses, seconds, through))
        rates[bucket] = uses / seconds
    return rates
