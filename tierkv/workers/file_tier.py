"""What every worker of a tier of files runs on, put together: one thread for each duty, and who tells whom.

    instruction -> queue, one extent's operations in order -> io threads -> files
                                                           -> flusher: directories, then the answer
                                                           -> index writer: rows, in groups
    health: TierHealth;  pulse: a sign of life, what is stuck;  scrub: while there is one

It is made in two steps, because a disk may not answer: the pulse first, then what is asked of the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from tierkv.core.instructions import (
    AnyInstruction,
    CancelScrub,
    Demote,
    JournalHealth,
    OpenNamespace,
    OpFailed,
    Read,
    ReadDone,
    Remove,
    Report,
    Scrub,
    SetAside,
    Touch,
    Write,
)
from tierkv.core.reasons import Reason
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import DataDirectory
from tierkv.storage.names import ExtentName
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.system_calls import Failure
from tierkv.workers.channel import BlockingChannel
from tierkv.workers.coarse_times import CoarseTimes
from tierkv.workers.files import Files
from tierkv.workers.flusher import Flusher
from tierkv.workers.groups import Groups
from tierkv.workers.index_writer import IndexWriter
from tierkv.workers.key_queue import KeyQueue, Operation, Urgency
from tierkv.workers.lifeline import OnDeath
from tierkv.workers.operations import FileBooks, Operations
from tierkv.workers.pulse import RECEIVER, Pulse
from tierkv.workers.quiet_log import QuietLog
from tierkv.workers.roll import Roll
from tierkv.workers.scrubber import Scrubber
from tierkv.workers.tier_config import TierWorkerConfig
from tierkv.workers.tier_gate import TierGate
from tierkv.workers.tier_health import HealthWatch

log = logging.getLogger(__name__)

SEND_SECONDS = 60.0  # a front that does not read for so long is stuck: this process ends, and both are replaced
QUEUE_SECONDS = 30.0  # an operation that finds no room in the queue for so long is refused
CLOSE_SECONDS = 5.0

Channel = BlockingChannel[Report, AnyInstruction]


class FileTier:
    """`open` it, then have it `take` instructions; `finish` what was taken on, and `close`."""

    def __init__(
        self,
        config: TierWorkerConfig,
        channel: Channel,
        arena: memoryview,
        files: Files,
        *,
        health_seconds: float,
        on_death: OnDeath,
        tell_unopened: Callable[[], None] = lambda: None,
    ) -> None:
        """`tell_unopened` is called when something is stuck, or has come back, before there is anything to tell."""
        self.stack = ExitStack()
        """What ends with the tier, the last first."""

        self.files = files
        self.roll = Roll()
        self.gate = TierGate(config.reserve_bytes, read_only=config.read_only)
        self.quiet = QuietLog(log)
        self.receiver = self.roll.post(RECEIVER)
        self._config = config
        self._channel = channel
        self._arena = arena
        self._health_seconds = health_seconds
        self._on_death = on_death
        self._tell_unopened = tell_unopened
        self._spoke = False
        self._index_problem = ""
        self._health: HealthWatch | None = None
        self._pulse = Pulse(  # before anything is asked of the disk, which may take long to answer, or never do
            self.roll,
            self.gate,
            self.report,
            has_spoken=self._has_spoken,
            tell=self._tell_health,
            period_seconds=health_seconds,
            stuck_seconds=config.stuck_seconds,
            on_death=on_death,
        )
        self.stack.callback(self._pulse.close, CLOSE_SECONDS)

    def open(
        self,
        directory: DataDirectory,
        index_fd: int,
        reopen_index: Callable[[], int],
        *,
        books: FileBooks,
        lock_fd: int = -1,
        source: DataDirectory | None = None,
        looked: Callable[[], None] = lambda: None,
        journal: Callable[[], JournalHealth] = JournalHealth,
    ) -> None:
        """`index_fd` is the folder of the index, made and opened again by `reopen_index`. `looked` is called after each
        look at the tier's health. `source` and `lock_fd` as in Operations and HealthWatch. Raises StorageError."""
        config, on_death, roll = self._config, self._on_death, self.roll
        self.directory = directory
        self.quarantine = Quarantine(
            directory,
            max_bytes=config.quarantine_bytes,
            max_age_seconds=config.quarantine_seconds,
            moving=books.removing,
            left=books.left_quarantine,
        )
        self.catalog = self.stack.enter_context(
            Catalog(
                index_fd,
                store_id=directory.store_id,
                map_bytes=config.index_map_bytes,
                discard="the process that opened it last died of it" if config.discard_index else "",
                read_only=directory.read_only,
                reopen=reopen_index,
            )
        )
        self._times = CoarseTimes()
        self.groups = Groups(directory)
        self.health = health = HealthWatch(
            directory,
            self.catalog,
            self.quarantine,
            self.gate,
            self.report,
            self.now,
            lock_fd=lock_fd,
            period_seconds=self._health_seconds,
            on_death=on_death,
            roll=roll,
            quiet=self.quiet,
            index_problem=lambda: self._index_problem,
            also=looked,
            journal=journal,
        )
        self.index = IndexWriter(
            self.catalog,
            failed=self._index_failed,
            worked=self._index_worked,
            committed=health.index_committed,
            on_death=on_death,
            roll=roll,
        )
        self.stack.callback(self.index.close, CLOSE_SECONDS)
        self._flusher = Flusher(partial(self.files.flush, directory), self.report, on_death=on_death, roll=roll)
        self.stack.callback(self._flusher.close, CLOSE_SECONDS)
        self.queue = KeyQueue(num_threads=config.io_threads, on_death=on_death, roll=roll)
        self.stack.callback(self.queue.close, CLOSE_SECONDS)
        self.operations = Operations(
            directory=directory,
            arena=self._arena,
            files=self.files,
            quarantine=self.quarantine,
            groups=self.groups,
            index=self.index,
            flusher=self._flusher,
            gate=self.gate,
            times=self._times,
            books=books,
            report=self.report,
            now=self.now,
            quiet=self.quiet,
            source=source,
        )
        self.scrubber = Scrubber(directory, self.operations, self.queue, self.report, on_death=on_death)
        self.stack.callback(self.scrubber.end)
        self.stack.callback(health.close, CLOSE_SECONDS)
        self._health = health

    def now(self) -> float:
        """Node time."""
        return self._config.wall_zero + (time.monotonic() - self._config.monotonic_zero)

    def finish(self, left: Callable[[], float]) -> bool:
        """Whether all that was taken on is done. Each step gets the seconds that are `left` then."""
        self.scrubber.end(min(left(), 1.0))
        done = self.queue.wait_idle(left()) and self._flusher.wait_idle(left())
        if not self.index.drain(left()):
            log.warning("stopped with rows left that are not in the index")
        return done

    def close(self) -> None:
        """End the threads and let go of directory and index. What was taken on is finished where that is quick."""
        self.stack.close()

    # ---------------------------------------------------------------- instructions

    def take(self, instruction: AnyInstruction) -> bool:
        """False for one that is not every tier's."""
        operations = self.operations
        match instruction:
            case OpenNamespace():
                self.groups.open(instruction)
                self.submit(instruction.group, Urgency.WRITE, partial(operations.open_namespace, instruction))
            case Write():
                self._run_or_refuse(instruction, Urgency.WRITE, partial(operations.write, instruction))
            case Demote():
                self._run_or_refuse(instruction, Urgency.WRITE, partial(operations.demote, instruction))
            case Read():
                self._run_or_refuse(instruction, Urgency.READ, partial(operations.read, instruction))
            case Remove():
                self._run_or_refuse(instruction, Urgency.REMOVE, partial(operations.remove, instruction))
            case SetAside():
                self._run_or_refuse(instruction, Urgency.REMOVE, partial(operations.set_aside, instruction))
            case Touch():
                self._touch(instruction)
            case Scrub():
                self.scrubber.start(instruction)
            case CancelScrub():
                self.scrubber.cancel(instruction.op)
            case _:
                return False
        return True

    def _run_or_refuse(
        self, instruction: Write | Demote | Read | Remove | SetAside, urgency: Urgency, run: Callable[[], None]
    ) -> None:
        """One extent's operations share a key, whichever they are. Every instruction is answered."""
        try:
            key = ExtentName.of(instruction)
        except ValueError as error:
            self.report([_refusal(instruction, str(error))])
            return
        if not self.submit(key, urgency, run):
            self.report([_refusal(instruction, f"no room in the queue for {QUEUE_SECONDS:.0f} s")])

    def submit(
        self, key: object, urgency: Urgency, run: Callable[[], None], *, timeout_seconds: float = QUEUE_SECONDS
    ) -> bool:
        return self.queue.submit(Operation(key, urgency, run), timeout_seconds=timeout_seconds)

    def _touch(self, touch: Touch) -> None:
        if self._config.read_only:
            return
        now = time.monotonic()
        for row in touch.rows:
            try:
                name = ExtentName.of(row)
            except ValueError as error:
                log.error("a touch of what can't be an extent: %s", error)
                continue
            if not self._times.is_due(name, now):
                self.operations.touch_row(row)
            elif not self.submit(name, Urgency.SCRUB, partial(self.operations.touch_file, row), timeout_seconds=0):
                self.operations.touch_row(row)  # busy: the file's turn comes with a later touch

    # ---------------------------------------------------------------- reports

    def report(self, reports: Sequence[Report]) -> None:
        self._spoke = True
        send = partial(self._channel.send, reports, timeout_seconds=SEND_SECONDS)
        if self._health is not None and any(isinstance(report, OpFailed) for report in reports):
            self._health.before_health(send)
            self._health.wake()
        else:
            send()

    def _tell_health(self) -> None:
        if self._health is None or not self._health.has_looked:
            self._tell_unopened()
        else:
            self._health.tell()

    def _has_spoken(self) -> bool:
        spoke, self._spoke = self._spoke, False
        return spoke

    def _index_failed(self, problem: str) -> None:
        self._index_problem = problem
        self.gate.count(Failure(Reason.IO_ERROR, "index", "", problem))

    def _index_worked(self) -> None:
        self._index_problem = ""


def _refusal(instruction: Write | Demote | Read | Remove | SetAside, problem: str) -> Report:
    if isinstance(instruction, Read):
        return ReadDone(instruction.op, 0, 0.0, Reason.IO_ERROR)
    return OpFailed(instruction.op, Reason.IO_ERROR, problem)
