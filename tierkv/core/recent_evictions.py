"""The last evictions, for whoever looks on: those of one kind within some seconds are one row, for under pressure there
are thousands a second."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from tierkv.core.grants import Evicted

ROWS = 256
SAME_ROW_SECONDS = 10.0

_ROWS_LOOKED_AT = 8  # for one of the same kind


@dataclass(slots=True)
class Evictions:
    """`count` evictions like `last` between `since` and `at`."""

    last: Evicted
    since: float
    at: float
    count: int = 0
    tokens: int = 0
    num_bytes: int = 0


class RecentEvictions:
    def __init__(self, capacity: int = ROWS) -> None:
        self._rows: deque[Evictions] = deque(maxlen=capacity)

    def latest(self, most: int) -> list[Evictions]:
        """The latest first."""
        return sorted(self._rows, key=lambda row: -row.at)[:most]

    def note(self, evicted: Evicted, now: float) -> None:
        row = self._row(evicted, now)
        row.at = now
        row.count += 1
        row.tokens += evicted.tokens
        row.num_bytes += evicted.num_bytes

    def _row(self, evicted: Evicted, now: float) -> Evictions:
        kind = _kind(evicted)
        for row in islice(reversed(self._rows), _ROWS_LOOKED_AT):
            if now - row.since < SAME_ROW_SECONDS and _kind(row.last) == kind:
                return row
        self._rows.append(Evictions(evicted, now, now))
        return self._rows[-1]


def _kind(evicted: Evicted) -> tuple[bytes, str, str, str]:
    return evicted.group, evicted.tier, evicted.to, evicted.reason
