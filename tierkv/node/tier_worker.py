"""The front's side of a worker: its channel, the watch for its silence; of one that has files, how much they may take;
of one that has a pool, what that is."""

from __future__ import annotations

import socket
import time

from tierkv.core.instructions import AnyReport, DeviceHealth, PoolReady
from tierkv.errors import WireError
from tierkv.node.control import WorkerDied, WorkerName, WorkerStarted, device_worker_name
from tierkv.node.mover import Mover
from tierkv.node.tier_room import TierRoom
from tierkv.node.watchdog import Verdict, Watchdog


class WorkerLink:
    """`hang_seconds` of silence, and it is hung; 0: never."""

    def __init__(self, mover: Mover, hang_seconds: float) -> None:
        self.mover = mover
        self.watchdog = Watchdog(hang_seconds)

    def started(self, message: WorkerStarted, channel: socket.socket, now: float) -> None:
        self.mover.attach(channel, pid=message.pid, restarts=message.restarts, now=now, sends_rows=message.sends_rows)
        self.watchdog.begin(time.monotonic())

    def receive(self, now: float) -> list[AnyReport]:
        """What it has said since. Raises WireError when the two no longer agree where a message begins; then it is
        detached, and to be replaced."""
        try:
            reports = self.mover.receive(now)
        except WireError:
            self.mover.detach()
            raise
        if reports:
            self.watchdog.heard()
        return reports

    def died(self, message: WorkerDied, now: float) -> list[AnyReport]:
        """Its last words."""
        reports = self.mover.receive_rest(now)
        self.watchdog.end()
        self.mover.detach()
        self.mover.worker.problem = message.problem
        self.mover.worker.due = now + message.pause_seconds
        return reports

    def why_hung(self) -> str:
        """To be called at `next_look`. Not empty once, when it has been silent for too long: it is to be replaced."""
        if self.watchdog.look(time.monotonic()) is not Verdict.HUNG:
            return ""
        return f"it has given no sign of life for {self.watchdog.silence_seconds:.0f} s (hang_seconds)"

    def next_look(self) -> float | None:
        """In seconds of the monotonic clock; None while there is nobody to watch."""
        return self.watchdog.next_due()


class TierWorker(WorkerLink):
    """Of a tier of files."""

    def __init__(self, mover: Mover, room: TierRoom, hang_seconds: float) -> None:
        super().__init__(mover, hang_seconds)
        self.room = room

    def started(self, message: WorkerStarted, channel: socket.socket, now: float) -> None:
        super().started(message, channel, now)
        self.room.begin_again()


class DeviceWorker(WorkerLink):
    """Of the device at place `device` of gpu_devices, which is called `name` there."""

    def __init__(self, device: int, name: str, hang_seconds: float) -> None:
        super().__init__(Mover(WorkerName.DEVICE, device_worker_name(device)), hang_seconds)
        self.device = device
        self.name = name
        self.pool: PoolReady | None = None
        """What there is, while the worker lives."""
        self.health: DeviceHealth | None = None
        self.mapped: set[bytes] = set()
        """Sessions that were told how to map the pool that there is."""

    def note(self, report: AnyReport) -> None:
        if isinstance(report, PoolReady):
            self.pool = report
            self.mover.worker.is_recovered = True
            self.mover.worker.problem = ""
        elif isinstance(report, DeviceHealth):
            self.health = report

    def gone(self) -> None:
        """It is dead, its last words were noted, and there is nothing of what it had."""
        self.pool = self.health = None
        self.mapped.clear()
