"""How the device and its copies are, each second: the sign of life of a device worker as well.

a copy doesn't complete         the health names it; beyond HUNG_SECONDS the process ends, and another is started: only
                                its end frees what the copy holds
the receiver doesn't turn       the driver keeps it in a call, or it has a bug: the same
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.core.instructions import Alive, DeviceHealth, Report
from tierkv.device.backends import Pinning
from tierkv.workers.device.in_flight import InFlight
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.roll import Roll

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
STUCK_SECONDS = 20.0
HUNG_SECONDS = 90.0
"""Far above what any copy takes that a front asks for: it has bounds of its own for what is in flight."""

LARGE_BYTES = 16 * 2**20
"""From so many on, the time of a copy says how fast the way is, and not what a copy costs to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What doesn't change while a pool lives."""

    name: str
    kind: str
    numa_node: int
    arena_numa_node: int


class VitalSigns:
    """One thread, from `start` on."""

    def __init__(
        self,
        facts: DeviceFacts,
        in_flight: InFlight,
        roll: Roll,
        report: Callable[[Sequence[Report]], None],
        *,
        period_seconds: float = PERIOD_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
        hung_seconds: float = HUNG_SECONDS,
        on_death: OnDeath = end_process,
    ) -> None:
        self.pinning = Pinning(False, "the arena is not registered with the driver yet")
        self._facts = facts
        self._in_flight = in_flight
        self._roll = roll
        self._report = report
        self._period_seconds = period_seconds
        self._stuck_seconds = stuck_seconds
        self._hung_seconds = hung_seconds
        self._on_death = on_death
        self._rates = {"upload": 0.0, "download": 0.0}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = start_thread("device-pulse", self._run, on_death=self._on_death)

    def note_copy(self, way: str, num_bytes: int, seconds: float) -> None:
        """`way` is upload or download."""
        if num_bytes >= LARGE_BYTES and seconds > 0.0:
            self._rates[way] = num_bytes / seconds

    def close(self, timeout_seconds: float) -> bool:
        self._ended.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def look(self) -> None:
        """One look, and one report."""
        oldest = self._in_flight.oldest_seconds()
        busy = next(iter(self._roll.busy_for(self._stuck_seconds)), None)
        if max(oldest, busy.seconds if busy else 0.0) > self._hung_seconds:
            log.critical("%s: this process ends", self._problem(oldest, str(busy) if busy else ""))
            self._on_death("device-pulse")
        self._report([self.health(), Alive()])

    def health(self) -> DeviceHealth:
        oldest = self._in_flight.oldest_seconds()
        busy = next(iter(self._roll.busy_for(self._stuck_seconds)), None)
        return DeviceHealth(
            device_name=self._facts.name,
            kind=self._facts.kind,
            is_pinned=self.pinning.is_pinned,
            why_not_pinned=self.pinning.why_not,
            device_numa=self._facts.numa_node,
            arena_numa=self._facts.arena_numa_node,
            upload_bytes_per_second=self._rates["upload"],
            download_bytes_per_second=self._rates["download"],
            queued_copies=len(self._in_flight),
            problem=self._problem(oldest, str(busy) if busy else ""),
        )

    def _problem(self, oldest: float, busy: str) -> str:
        if oldest > self._stuck_seconds:
            return f"a copy has been in flight for {oldest:.0f} s"
        return busy

    def _run(self) -> None:
        while not self._ended.wait(self._period_seconds):
            self.look()
