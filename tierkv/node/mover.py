"""The front's side of a worker's channel: instructions out, reports in, and how it is doing.

While no worker is attached instructions go nowhere: the core queues its work again when it is told of a worker's death,
and says all of it anew when it is told of the next one's start.
"""

from __future__ import annotations

import logging
import select
import socket
from dataclasses import dataclass, field

from tierkv.core.instructions import AnyInstruction, AnyReport, Recovered, RecoveryProgress, Stopped, TierHealth, Touch
from tierkv.errors import WireError
from tierkv.node.control import WorkerName
from tierkv.workers.channel import Channel, front_end

SILENT_SECONDS = 5.0
"""A worker gives a sign of life about once a second; after so long without a word it is called silent. Nothing is taken
from it then: it may be stopped, and go on writing to its slots later. After `hang_seconds` it is killed, and waitpid
says when its slots are free."""

MAX_BUFFERED_FOR_TOUCH = 8 * 2**20

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerState:
    """What `status` shows of a worker."""

    pid: int = 0
    restarts: int = 0
    is_up: bool = False
    is_recovered: bool = False
    is_stopped: bool = False
    sends_rows: bool = True
    heard: float = 0.0
    problem: str = ""
    due: float = 0.0  # when a dead one is followed by another
    stage: str = "starting"
    done: int = 0
    total: int = 0
    recovered: Recovered | None = None
    found: Recovered | None = None  # of the last start that looked at every file
    health: TierHealth | None = None
    errors: dict[str, int] = field(default_factory=dict)
    skipped_touches: int = 0

    def describe(self, now: float) -> str:
        if not self.is_up:
            return "restarting"
        if self.is_silent(now):
            return "silent"
        return "running" if self.is_recovered else "recovering"

    def why_away(self) -> str:
        """Why it can't be asked for anything, in words; empty where it can."""
        if self.is_up and self.is_recovered:
            return ""
        if self.health is not None and self.health.problem:
            return self.health.problem
        if self.is_up:
            return "its worker is still finding out what lies there"
        return f"its worker {self.problem or 'is not running'}"

    def is_silent(self, now: float) -> bool:
        return self.is_up and now - self.heard > SILENT_SECONDS


class Mover:
    def __init__(self, name: WorkerName = WorkerName.STORAGE, label: str = "") -> None:
        self.name = name
        self.label = label or name.value  # for people
        self.worker = WorkerState()
        self._channel: Channel[AnyInstruction, AnyReport] | None = None

    @property
    def is_attached(self) -> bool:
        return self._channel is not None

    def fileno(self) -> int:
        """Only while attached."""
        assert self._channel is not None
        return self._channel.fileno()

    @property
    def wants_write(self) -> bool:
        return self._channel is not None and self._channel.wants_write

    def attach(self, sock: socket.socket, *, pid: int, restarts: int, now: float, sends_rows: bool = True) -> None:
        self.detach()
        self._channel = front_end(sock)
        self.worker.pid, self.worker.restarts = pid, restarts
        self.worker.is_up, self.worker.is_recovered, self.worker.is_stopped = True, False, False
        self.worker.sends_rows = sends_rows
        self.worker.heard = now
        self.worker.stage, self.worker.done, self.worker.total = "starting", 0, 0

    def detach(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self.worker.is_up = False

    def send(self, instruction: AnyInstruction) -> None:
        """Queue it; `flush` sends. Raises WireError when the worker has left more unread than is kept for it."""
        if self._channel is None:
            return
        if isinstance(instruction, Touch) and self.is_choked:
            self.worker.skipped_touches += 1  # last use is worth less than what waits there
            return
        self._channel.send(instruction)

    @property
    def is_choked(self) -> bool:
        """The worker has left much unread: what can be done without is not sent."""
        return self._channel is not None and self._channel.buffered_bytes > MAX_BUFFERED_FOR_TOUCH

    def flush(self) -> None:
        if self._channel is not None:
            self._channel.flush()

    def receive(self, now: float) -> list[AnyReport]:
        """What the worker has said since; noted here, and for the core."""
        if self._channel is None:
            return []
        reports = self._channel.receive()
        if self._channel.ended:
            # Its end will be told by the supervisor, which waits for the process. What it said was all received.
            self.detach()
        if reports:
            self.worker.heard = now
        for report in reports:
            self._note(report)
        return reports

    def receive_rest(self, now: float) -> list[AnyReport]:
        """All that a dead worker has said, as far as it can be understood."""
        reports: list[AnyReport] = []
        try:
            while self._channel is not None and select.select([self._channel], [], [], 0)[0]:
                reports += self.receive(now)
        except WireError as error:
            log.error("the %s worker's last words: %s", self.label, error)
        return reports

    def _note(self, report: AnyReport) -> None:
        worker = self.worker
        if isinstance(report, RecoveryProgress):
            worker.stage, worker.done, worker.total = report.stage, report.done, report.total
        elif isinstance(report, Recovered):
            worker.is_recovered = True
            worker.problem = ""
            worker.recovered = report
            if worker.sends_rows:
                worker.found = report
        elif isinstance(report, TierHealth):
            worker.health = report
            worker.errors = report.errors
        elif isinstance(report, Stopped):
            worker.is_stopped = True
