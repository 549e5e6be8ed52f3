"""How much room each use of a block needed: told from a few of all blocks, in memory that does not grow.

A block is found again by a cache that drops what was used longest ago, if its capacity holds the block and all that was
used since. To know that of all blocks one would have to remember all of them. Here only those are remembered whose keys
lie below a threshold: keys are digests, so that these are a part of all blocks that nobody has chosen, `rate` of them.
What they add up to is divided by the rate.

    keys     |#####|                                     |     all that lie below the threshold
    blocks   many were seen: the threshold sinks, and what does not lie below it any more is forgotten
             few were seen:  rate 1, and everything is exact

That is SHARDS with a fixed size: Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS",
FAST '15. Two things differ. Blocks are used in paths, the deepest as the oldest; so what an earlier step used last is a
stretch of the path (see tierkv/replay/reuse.py), and where in its path a block lies is known and not estimated. And the
threshold sinks by a fifth at a time, so that no heap is needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tierkv.core.keys import KEY_BYTES
from tierkv.core.prefix_sums import PrefixSums

if TYPE_CHECKING:
    from tierkv.core.ledger import Group

MAX_SAMPLES = 8_192
"""Blocks that are remembered: about 2 MiB."""

_SINKS_TO = 0.8
_DIGIT_BYTES = 8
_ALL = b"\xff" * (KEY_BYTES + 1)  # every key lies below it


class Seen(NamedTuple):
    """A sampled block, by its index in a path. `need`: bytes of room with which it would have been there; None: it is
    used for the first time."""

    block: int
    need: int | None


@dataclass(slots=True, eq=False)
class _Step:
    """One path. `blocks` of the sample were last used by it."""

    number: int
    at: float
    group: Group
    blocks: int = 0

    @property
    def num_bytes(self) -> int:
        return self.blocks * block_bytes(self.group)


def block_bytes(group: Group) -> int:
    """What a block takes in host memory: a slot of each rank."""
    return group.slot_bytes * group.ranks


class ReuseSample:
    """`rate`: the part of all blocks that it begins with."""

    def __init__(self, most: int = MAX_SAMPLES, rate: float = 1.0) -> None:
        self._most = most
        self._last: dict[bytes, _Step] = {}  # of each block, who used it last
        self._places = 2 * most
        self._sums = PrefixSums(self._places)  # bytes of blocks by the step that used them last
        self._next = 0
        self._set_rate(rate)

    def __len__(self) -> int:
        return len(self._last)

    def use(self, group: Group, keys: bytes, now: float) -> list[Seen]:
        """A path is asked for, from token 0 on, and what is missing of it is stored. What is seen of it, in order."""
        sampled = self._below(keys)
        if not sampled:
            return []
        before = [self._last.get(key) for key in sampled]
        seen = list(self._needs(list(sampled.values()), before, block_bytes(group)))
        self._move(list(sampled), before, self._begin(group, now))
        return seen

    def store(self, group: Group, keys: bytes, now: float) -> None:
        """Blocks are stored. Those that nobody has asked for yet (they were generated) are there from now on."""
        new = [key for key in self._below(keys) if key not in self._last]
        if new:
            self._move(new, [None] * len(new), self._begin(group, now))

    def forget(self, groups: frozenset[bytes]) -> None:
        """Nothing of these groups is remembered from here on."""
        self._keep(lambda step: step.group.spec.group not in groups)

    def forget_unused(self, since: float) -> None:
        """Blocks that nobody has used since then were never seen."""
        self._keep(lambda step: step.at >= since)

    @property
    def seen_bytes(self) -> int:
        """What all blocks together take that were seen so far, not only the sampled ones."""
        return int(self._sums.total / self.rate)

    def blocks_by_group(self) -> Counter[Group]:
        """How many blocks of the sample are whose."""
        blocks: Counter[Group] = Counter()
        for step in set(self._last.values()):
            blocks[step.group] += step.blocks
        return blocks

    # ---- which blocks

    def _set_rate(self, rate: float) -> None:
        self.rate = rate
        if rate >= 1.0:
            self._threshold, self._first_byte = _ALL, None
            return
        digits = int(rate * 2 ** (8 * _DIGIT_BYTES))
        self._threshold = digits.to_bytes(_DIGIT_BYTES, "big")
        self._first_byte = re.compile(b"[\\x00-\\x%02x]" % self._threshold[0])

    def _below(self, keys: bytes) -> dict[bytes, int]:
        """The keys below the threshold, with their indexes. The first bytes of all are looked at at once."""
        if self._first_byte is None:
            indexes = iter(range(len(keys) // KEY_BYTES))
        else:
            indexes = (match.start() for match in self._first_byte.finditer(keys[::KEY_BYTES]))
        below: dict[bytes, int] = {}
        for index in indexes:
            key = keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            if key < self._threshold:
                below.setdefault(key, index)  # no prompt has a block twice, but a client may say so
        return below

    # ---- how much room

    def _needs(self, indexes: list[int], before: list[_Step | None], num_bytes: int) -> Iterator[Seen]:
        """Of a stretch that one step used last, the first block is the newest: a block needs what was used since that
        step, and the stretch up to itself. It begins behind the last sampled block of the stretch before, or halfway
        between the two: between them lie blocks that are not sampled."""
        step: _Step | None = None
        newer = start = 0
        for place, (index, found) in enumerate(zip(indexes, before, strict=True)):
            if found is None:
                yield Seen(index, None)
            else:
                if found is not step:
                    behind = indexes[place - 1] + 1 if place else 0
                    start = (behind + index) // 2
                    newer = int(self._sums.after(found.number) / self.rate)
                yield Seen(index, newer + (index - start + 1) * num_bytes)
            step = found

    def _begin(self, group: Group, now: float) -> _Step:
        if self._next == self._places:
            self._keep(lambda _step: True)  # there are more places than blocks
        step = _Step(self._next, now, group)
        self._next += 1
        return step

    def _move(self, block_keys: list[bytes], before: list[_Step | None], step: _Step) -> None:
        """`step` has used these blocks, which were used by those `before`."""
        for earlier, blocks in Counter(one for one in before if one is not None).items():
            earlier.blocks -= blocks
            self._sums.add(earlier.number, -blocks * block_bytes(earlier.group))
        for key in block_keys:
            self._last[key] = step
        step.blocks = len(block_keys)
        self._sums.add(step.number, step.num_bytes)
        while len(self._last) > self._most:
            self._sink()

    def _sink(self) -> None:
        self._set_rate(min(self.rate, 1.0) * _SINKS_TO)
        threshold = self._threshold
        for key in [key for key in self._last if key >= threshold]:
            self._last.pop(key).blocks -= 1
        self._keep(lambda _step: True)

    def _keep(self, wanted: Callable[[_Step], bool]) -> None:
        """Forget what steps used that are not wanted, and number the others anew."""
        self._last = {key: step for key, step in self._last.items() if wanted(step)}
        steps = sorted(set(self._last.values()), key=lambda step: step.number)
        for number, step in enumerate(steps):
            step.number = number
        self._next = len(steps)
        self._sums = PrefixSums(self._places, [step.num_bytes for step in steps])
