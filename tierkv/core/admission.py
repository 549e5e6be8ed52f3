"""Admission to NVMe: what is worth wearing the drive for.

    budget left      everything is written through, as soon as it is sealed
    budget spent     only what was hit, or computed a second time (ghosts count); the dearest first, as the budget comes
                     back; what waits stays in host memory and may be evicted from it
    tier full        nothing that is worth less than what would have to go for it

The budget is a bucket that fills evenly over the day and holds a day's worth; it starts with an hour's, so that a node
that restarts again and again does not wear out what a steady one would not.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from tierkv.core.extent import Extent
from tierkv.core.ledger import Ledger
from tierkv.core.residency import FileState

DAY_SECONDS = 86_400.0
STARTS_WITH = 1 / 24
"""Share of a day's budget that is there at the start."""

MOST_WAITING = 4_096
"""Extents that wait for the budget; of more, the cheapest are given up."""

_AND_A_BIT_SECONDS = 0.01  # sums of fractions must not fall short by one

_ON_THE_WAY = (FileState.QUEUED, FileState.WRITING, FileState.PRESENT)


class WriteBudget:
    """Bytes; `per_day` 0: no limit. It may be overdrawn by one write, whose size the file system decides."""

    def __init__(self, per_day: int) -> None:
        self.per_day = per_day
        self.left = per_day * STARTS_WITH
        self._since: float | None = None
        self._day = 0
        self._written = 0  # on that day

    def fill(self, now: float) -> None:
        if self._since is not None and now > self._since:
            self.left = min(float(self.per_day), self.left + (now - self._since) * self.per_day / DAY_SECONDS)
        if self._since is None or now > self._since:
            self._since = now

    def has(self, num_bytes: int) -> bool:
        """Whether so much may be written; of a budget that is full, one write more than it ever holds."""
        return not self.per_day or self.left >= min(num_bytes, self.per_day)

    def when(self, num_bytes: int) -> float:
        """When there is so much in it, if nothing else is written."""
        missing = max(0.0, min(num_bytes, self.per_day) - self.left)
        return (self._since or 0.0) + missing * DAY_SECONDS / self.per_day + _AND_A_BIT_SECONDS

    def note_written(self, num_bytes: int, now: float) -> None:
        self._written = self.written_today(now) + num_bytes
        self._day = int(now // DAY_SECONDS)

    def written_today(self, now: float) -> int:
        """Bytes written since midnight UTC, or since this core began."""
        return self._written if int(now // DAY_SECONDS) == self._day else 0


_Entry = tuple[float, int, Extent]  # value, negated; number


class Admission:
    """Which sealed extents are written, and when."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.budget = WriteBudget(ledger.limits.nvme_write_bytes_per_day)
        self._waiting: list[_Entry] = []  # a heap, the dearest first
        self._known: dict[Extent, int] = {}  # those in there -> number of their entry that is right
        self._numbers = count()
        self._due: float | None = None

    def may_write(self, extent: Extent, now: float) -> bool:
        """Now, and taken from the budget. What hangs on an extent that is not on its way to NVMe waits for it; what is
        pinned waits for nothing."""
        if not self.budget.per_day:
            return True
        self.budget.fill(now)
        if self._ledger.pins.concerns(extent):
            self.budget.left -= self._bytes_of(extent)
            return True
        if not self.budget.has(self._bytes_of(extent)) or self._absent_above(extent) is not None:
            return False
        self.budget.left -= self._bytes_of(extent)
        return True

    def is_worth_room(self, extent: Extent, now: float) -> bool:
        """Whether it is worth what would have to leave NVMe for it, or pinned."""
        if self._ledger.pins.concerns(extent):
            return True
        order = self._ledger.nvme_order
        rank = order.rank_of_new(extent.kind, self._ledger.seconds_per_byte(extent))
        cheapest = order.cheapest(now)
        return rank is None or cheapest is None or rank >= cheapest

    def give_back(self, extent: Extent) -> None:
        """It was not written after all."""
        if self.budget.per_day:
            self.budget.left += self._bytes_of(extent)

    def wait(self, extent: Extent, now: float) -> list[Extent]:
        """Have it written when the budget has room. Returns what is given up for it, or it itself: what was used once
        is worth none of a budget that is spent."""
        if not extent.uses:
            return [extent]
        value = self._ledger.nvme_order.value(extent, 0, now) or self._ledger.seconds_per_byte(extent) * extent.uses
        number = self._known[extent] = next(self._numbers)  # replaces what it was worth before
        heapq.heappush(self._waiting, (-value, number, extent))
        self._due = self._due or self.budget.when(self._bytes_of(extent))
        if len(self._known) <= MOST_WAITING:
            return []
        ranked = sorted(entry for entry in self._waiting if self._is_right(entry))
        self._waiting, given_up = ranked[: MOST_WAITING // 2], ranked[MOST_WAITING // 2 :]
        for *_, one in given_up:
            del self._known[one]
        return [one for *_, one in given_up]

    def _is_right(self, entry: _Entry) -> bool:
        return self._known.get(entry[-1]) == entry[1]

    def next_due(self, is_worth_writing: Callable[[Extent], bool], now: float) -> Extent | None:
        """The dearest of those that wait, or the first of its ancestors that is not on its way, if the budget has room
        for it; then it is taken from the budget. Those of which nothing could be written are let go."""
        self.budget.fill(now)
        while self._waiting:
            if not self._is_right(self._waiting[0]):
                heapq.heappop(self._waiting)
                continue
            extent = self._waiting[0][-1]
            first = self._first_to_write(extent) if is_worth_writing(extent) else None
            if first is None or not is_worth_writing(first):
                self._let_go()
                continue
            if not self.budget.has(self._bytes_of(first)):
                self._due = self.budget.when(self._bytes_of(first))
                return None
            if first is extent:
                self._let_go()
            self.budget.left -= self._bytes_of(first)
            return first
        self._due = None
        return None

    @property
    def num_waiting(self) -> int:
        return len(self._known)

    def next_wakeup(self) -> float | None:
        """When `next_due` has something, if nothing else is written."""
        return self._due

    def _let_go(self) -> None:
        del self._known[heapq.heappop(self._waiting)[-1]]

    def _first_to_write(self, extent: Extent) -> Extent:
        while (above := self._absent_above(extent)) is not None:
            extent = above
        return extent

    @staticmethod
    def _absent_above(extent: Extent) -> Extent | None:
        above = extent.above.owner if extent.above is not None else None
        if above is None or above.nvme in _ON_THE_WAY or above.has_file:
            return None
        return above

    def _bytes_of(self, extent: Extent) -> int:
        group = self._ledger.group_of(extent)
        return group.ranks * group.file_bytes(extent.num_blocks)
