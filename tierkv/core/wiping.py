"""Memory that held what was purged is zeroed by who maps the arena, and free only when that is reported.

ledger.wipes -> Zero -> (the worker, or on a node without one the supervisor) -> Zeroed -> free
"""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.core.instructions import Zero, Zeroed
from tierkv.core.ledger import Ledger
from tierkv.core.wipes import Wipe

MAX_ASKED = 64
"""Pieces that are being zeroed at one time: what is told must not fill the way there."""


class Wiping:
    """A worker that dies is no reason to take memory for zeroed: the next one is asked again."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._asked: dict[int, Wipe] = {}
        self._next_op = 1
        self._is_somebody_there = not ledger.has_nvme

    def ask(self) -> None:
        """Pass on what has become due."""
        ledger = self._ledger
        while ledger.wipes and self._is_somebody_there and len(self._asked) < MAX_ASKED:
            op, self._next_op = self._next_op, self._next_op + 1
            wipe = self._asked[op] = ledger.wipes.popleft()
            ledger.effects.append(Zero(op, wipe.ranges))

    def zeroed(self, report: Zeroed) -> None:
        wipe = self._asked.pop(report.op, None)
        if wipe is None:
            return  # of a worker that died before its report was read: it was asked for again
        ledger = self._ledger
        ledger.wiping_bytes -= wipe.num_bytes
        ledger.counts.wiped_bytes += wipe.num_bytes
        ledger.pool.release(wipe.slots)
        ledger.pool.unpin_tails(wipe.tails)
        ledger.has_let_go = True

    def worker_died(self) -> None:
        """What it was asked for may or may not have been done."""
        self._is_somebody_there = not self._ledger.has_nvme
        if not self._is_somebody_there:
            self._ledger.wipes.extendleft(reversed(self._asked.values()))
            self._asked.clear()

    def worker_started(self) -> None:
        self._is_somebody_there = True
        self.ask()

    def all(self) -> Iterator[Wipe]:
        """For the audit."""
        yield from self._asked.values()
        yield from self._ledger.wipes
