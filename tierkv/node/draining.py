"""The orderly end of a front: write what is dirty within a budget, give up the rest, and say how much of each.

begin -> dirty extents are written -> none left, or the budget is spent -> workers finish -> Drained
"""

from __future__ import annotations

from tierkv.core.instructions import Stop
from tierkv.node.control import Drained
from tierkv.node.core_calls import CoreCalls
from tierkv.node.mover import Mover
from tierkv.node.service import Service

STOP_SECONDS = 2.0
"""What the workers get to finish what it has begun, beyond the budget."""


class Draining:
    def __init__(self, core: CoreCalls, service: Service, budget_seconds: float, now: float) -> None:
        self._core = core
        self._state = core.state
        self._service = service
        self._deadline = now + budget_seconds
        self._stop_deadline: float | None = None
        self._flushed_before = self._state.counts.flushed_extents
        self._written_before = self._state.counts.nvme_written_bytes
        self._dropped_before = (core.dropped_extents, core.dropped_bytes)
        service.begin_shutdown(now)

    def shorten(self, budget_seconds: float, now: float) -> None:
        self._deadline = min(self._deadline, now + budget_seconds)

    def step(self, now: float) -> Drained | None:
        """Call it after anything has happened, and at `next_wakeup`. None: not over yet."""
        if self._stop_deadline is None:
            if now < self._deadline and self._state.dirty().extents > 0:
                return None
            self._service.drop_dirty(now)
            self._core.journal.close(now)
            for mover in self._movers():
                self._core.instruct(Stop(budget_seconds=STOP_SECONDS), now, mover)
            self._stop_deadline = now + STOP_SECONDS
        if now < self._stop_deadline and any(map(_is_awaited, self._movers())):
            return None
        return self._sum_up()

    def _movers(self) -> tuple[Mover, ...]:
        return self._core.mover, self._core.disk, *self._core.devices

    def next_wakeup(self) -> float:
        return self._deadline if self._stop_deadline is None else self._stop_deadline

    def _sum_up(self) -> Drained:
        """What was still being written when the worker's time was up counts as dropped: nothing proves it."""
        unproven = self._state.dirty()
        extents, num_bytes = self._dropped_before
        return Drained(
            flushed_extents=self._state.counts.flushed_extents - self._flushed_before,
            flushed_bytes=self._state.counts.nvme_written_bytes - self._written_before,
            dropped_extents=self._core.dropped_extents - extents + unproven.extents,
            dropped_bytes=self._core.dropped_bytes - num_bytes + unproven.num_bytes,
        )


def _is_awaited(mover: Mover) -> bool:
    """A worker that still recovers has begun nothing that needs an end, and doesn't hear until it is through."""
    return mover.is_attached and mover.worker.is_recovered and not mover.worker.is_stopped
