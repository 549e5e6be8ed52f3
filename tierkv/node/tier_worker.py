"""The front's side of a worker: its channel, the watch for its silence, and how much its tier may hold."""

from __future__ import annotations

import socket
import time

from tierkv.core.instructions import AnyReport
from tierkv.errors import WireError
from tierkv.node.control import WorkerDied, WorkerStarted
from tierkv.node.mover import Mover
from tierkv.node.tier_room import TierRoom
from tierkv.node.watchdog import Verdict, Watchdog


class TierWorker:
    """`hang_seconds` of silence, and it is hung; 0: never."""

    def __init__(self, mover: Mover, room: TierRoom, hang_seconds: float) -> None:
        self.mover = mover
        self.room = room
        self.watchdog = Watchdog(hang_seconds)

    def started(self, message: WorkerStarted, channel: socket.socket, now: float) -> None:
        self.mover.attach(channel, pid=message.pid, restarts=message.restarts, now=now, sends_rows=message.sends_rows)
        self.watchdog.begin(time.monotonic())
        self.room.begin_again()

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
        return reports

    def why_hung(self) -> str:
        """To be called at `next_look`. Not empty once, when it has been silent for too long: it is to be replaced."""
        if self.watchdog.look(time.monotonic()) is not Verdict.HUNG:
            return ""
        return f"it has given no sign of life for {self.watchdog.silence_seconds:.0f} s (hang_seconds)"

    def next_look(self) -> float | None:
        """In seconds of the monotonic clock; None while there is nobody to watch."""
        return self.watchdog.next_due()
