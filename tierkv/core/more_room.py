"""How much more room a tier would have needed to have kept what it evicted: told from what else went and is not back.

    ghosts, by when they went     a b c d e f g      (d and f were stored again, and are none any more)
    b is asked for                  ^ . . . . .      b, c, e and g had to fit as well: so much more room

With the order of least recent use that is exact; of the policy in force it is what that makes of more room, as long as
its order changes little by it. What went is summed up by stretches of ten seconds, for a day.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from tierkv.core.ghosts import Ghost
from tierkv.core.reasons import Reason

ROOM_REASONS = frozenset({Reason.EVICTED, Reason.WORTH_LESS, Reason.NO_ROOM, Reason.NVME_FULL, Reason.DISK_BEHIND})
"""More room helps against these."""

STRETCH_SECONDS = 10.0
MAX_STRETCHES = 12_000  # of a day and nine hours; of a day at least
FRESH_SECONDS = 5.0
"""The sums of what went earlier, which hardly change, are made anew no more often."""


class MoreRoom:
    """`num_bytes(ghost)`: what its blocks take in the tier that it went from."""

    def __init__(self, num_bytes: Callable[[Ghost], int]) -> None:
        self._num_bytes = num_bytes
        self._tiers: dict[str, _Gone] = {}

    def changed(self, ghost: Ghost, sign: int) -> None:
        """Blocks are a ghost from now on (+1), or none any more (-1)."""
        if ghost.reason in ROOM_REASONS:
            gone = self._tiers.get(ghost.tier)
            if gone is None:
                gone = self._tiers[ghost.tier] = _Gone(ghost.evicted_at)
            gone.add(ghost.evicted_at, sign * self._num_bytes(ghost))

    def needed(self, ghost: Ghost, now: float) -> int | None:
        """Bytes that its tier would have needed beyond what it has. None: more room does not help, or it went too long
        ago."""
        gone = self._tiers.get(ghost.tier)
        if ghost.reason not in ROOM_REASONS or gone is None:
            return None
        return gone.since(ghost.evicted_at, now)


class _Gone:
    """Bytes of one tier's ghosts, by when they went."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._bytes = [0]
        self._total = 0
        self._before: list[int] = []  # what went before each stretch
        self._made_at = float("-inf")

    def add(self, at: float, num_bytes: int) -> None:
        if at < self._origin:
            return  # so long ago that it is not counted any more
        place = int((at - self._origin) / STRETCH_SECONDS)
        if place >= len(self._bytes):
            place = self._reach(place)
        self._bytes[place] += num_bytes
        self._total += num_bytes

    def since(self, at: float, now: float) -> int | None:
        if at < self._origin:
            return None
        if now - self._made_at >= FRESH_SECONDS:
            self._before = list(accumulate(self._bytes, initial=0))
            self._made_at = now
        place, part = divmod((at - self._origin) / STRETCH_SECONDS, 1.0)
        index = int(place)
        if index >= len(self._bytes):
            return 0
        before = self._before[index] if index < len(self._before) else self._before[-1]
        return max(0, self._total - before - int(part * self._bytes[index]))

    def _reach(self, place: int) -> int:
        """Have a stretch of this number, and return what its number is then."""
        if place >= MAX_STRETCHES:
            excess = place + 1 - MAX_STRETCHES * 3 // 4  # not again with the next one
            self._total -= sum(self._bytes[:excess])
            del self._bytes[:excess]
            self._origin += excess * STRETCH_SECONDS
            self._made_at = float("-inf")
            place -= excess
        self._bytes += [0] * (place + 1 - len(self._bytes))
        return place
