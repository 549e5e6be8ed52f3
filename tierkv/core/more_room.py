"""How much more room a tier would have needed to have kept what it evicted: told from what it has evicted since.

    evicted, summed up     0 ....... 40 GiB ....... 55 GiB
                                     ^ a ghost      ^ it is asked for: 15 GiB more, and it had still been there

That is what the policy in force makes of more room, as long as its order changes little by that. Sums are kept by the
minute, for a day; between two of them evictions are taken to be even.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from tierkv.core.ghosts import Ghost
from tierkv.core.reasons import Reason

ROOM_REASONS = frozenset({Reason.EVICTED, Reason.WORTH_LESS, Reason.NO_ROOM, Reason.NVME_FULL})
"""More room helps against these."""

MARK_SECONDS = 60.0
MAX_MARKS = 1_500


class MoreRoom:
    """`evicted_bytes(tier)`: what was evicted from it for want of room, or refused, so far."""

    def __init__(self, evicted_bytes: Callable[[str], int]) -> None:
        self._evicted_bytes = evicted_bytes
        self._times: dict[str, list[float]] = {}
        self._sums: dict[str, list[int]] = {}
        self._due = float("-inf")

    def mark(self, tiers: tuple[str, ...], now: float) -> None:
        """To be called now and then: remember how much was evicted so far."""
        if now < self._due:
            return
        self._due = now + MARK_SECONDS
        for tier in tiers:
            times, sums = self._times.setdefault(tier, []), self._sums.setdefault(tier, [])
            times.append(now)
            sums.append(self._evicted_bytes(tier))
            if len(times) > MAX_MARKS:
                del times[: MAX_MARKS // 4], sums[: MAX_MARKS // 4]

    def needed(self, ghost: Ghost) -> int | None:
        """Bytes that its tier would have needed beyond what it has. None: more room does not help, or it went before
        anybody counted."""
        times = self._times.get(ghost.tier)
        if ghost.reason not in ROOM_REASONS or not times or ghost.evicted_at < times[0]:
            return None
        return max(0, self._evicted_bytes(ghost.tier) - self._at(ghost.tier, ghost.evicted_at))

    def _at(self, tier: str, then: float) -> int:
        times, sums = self._times[tier], self._sums[tier]
        place = bisect_right(times, then) - 1
        if place + 1 == len(times):
            return sums[place]
        part = (then - times[place]) / (times[place + 1] - times[place])
        return int(sums[place] + part * (sums[place + 1] - sums[place]))
