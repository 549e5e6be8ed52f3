"""A sign of life each second that needs no file, and the difference between a sick disk and a sick process.

a thread sits in a call that the disk does not answer    the tier steps down (io_stuck) until it comes back; killing
                                                         the process would not end the call, only repeat it
the receiver does not turn, and no thread sits in one    this process has a bug; it ends, and another is started
no sign of life at all (stopped, out of processor)       the front sees it, and has the supervisor replace it
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from tierkv.core.instructions import Alive, Report
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.roll import Busy, Roll
from tierkv.workers.tier_gate import TierGate

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
STUCK_SECONDS = 20.0
HUNG_SECONDS = 90.0
"""Well above what the receiver may wait for: room in the queue, or a front that does not read."""

RECEIVER = "MainThread"
_READS = "read"


class Pulse:
    """One thread. `say` sends a report; `has_spoken` is whether anything was sent since it was asked last; `tell` is
    called in each period in which something is stuck, and when that is over."""

    def __init__(
        self,
        roll: Roll,
        gate: TierGate,
        say: Callable[[Sequence[Report]], None],
        *,
        has_spoken: Callable[[], bool],
        tell: Callable[[], None],
        period_seconds: float = PERIOD_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
        hung_seconds: float = HUNG_SECONDS,
        on_death: OnDeath = end_process,
    ) -> None:
        self._roll = roll
        self._gate = gate
        self._say = say
        self._has_spoken = has_spoken
        self._tell = tell
        self._period_seconds = period_seconds
        self._stuck_seconds = stuck_seconds
        self._hung_seconds = hung_seconds
        self._on_death = on_death
        self._ended = threading.Event()
        self._thread = start_thread("pulse", self._run, on_death=on_death)

    def close(self, timeout_seconds: float) -> bool:
        self._ended.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ended.wait(self._period_seconds):
            self.look()

    def look(self) -> None:
        """One look at all threads, and one sign of life."""
        stuck = [busy for busy in self._roll.busy_for(self._stuck_seconds) if busy.thread != RECEIVER]
        reading = any(busy.doing == _READS for busy in stuck)
        if self._gate.note_stuck(str(stuck[0]) if stuck else "", reading=reading) or stuck:
            self._tell()  # each time: the thread that tells of the tier's health may be the one that is stuck
        if not stuck and (hung := self._hung_receiver()) is not None:
            log.critical("%s, and no disk keeps it", hung)
            self._on_death(RECEIVER)
        if not self._has_spoken():
            self._say([Alive()])

    def _hung_receiver(self) -> Busy | None:
        return next((busy for busy in self._roll.busy_for(self._hung_seconds) if busy.thread == RECEIVER), None)
