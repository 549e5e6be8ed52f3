"""The storage worker: the one process of a node that reads and writes files.

    python -m tierkv.workers.storage CONFIG        started by the supervisor; see worker_config.py

    channel -> main thread -> queue, one extent's operations in order -> io threads -> files
                                                                       -> flusher: directories, then WriteDone
                                                                       -> index writer: rows, in groups
                      -> bookkeeper: the journal
    health: TierHealth;  pulse: a sign of life, what is stuck;  scrub, purge: while there is one
    supervisor-watch: the end

At the start it recovers what is on disk and tells the front, before it reads the first instruction. It ends by Stop,
when the front or the supervisor is gone, or as a whole when one of its threads dies.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from tierkv.core.instructions import (
    AnyInstruction,
    BalanceTier,
    CancelScrub,
    CountFiles,
    ForgetPin,
    JournalRows,
    KeepStart,
    OpenNamespace,
    OpFailed,
    Read,
    ReadDone,
    ReadJournal,
    Reckon,
    RecordPin,
    RecordPurge,
    Remove,
    Report,
    Scrub,
    SetAside,
    StartsFound,
    Stop,
    Stopped,
    SweepPurge,
    Touch,
    Write,
    Zero,
)
from tierkv.core.journal import Account
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError, TierkvError
from tierkv.storage.books import Books
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import LOCK, DataDirectory
from tierkv.storage.names import INDEX, ExtentName
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.recovery import clear_temp, recover
from tierkv.storage.system_calls import Failure
from tierkv.workers.bookkeeper import Bookkeeper
from tierkv.workers.channel import BlockingChannel, worker_end
from tierkv.workers.coarse_times import CoarseTimes
from tierkv.workers.files import Files, load_files
from tierkv.workers.flusher import Flusher
from tierkv.workers.groups import Groups
from tierkv.workers.index_writer import IndexWriter
from tierkv.workers.key_queue import KeyQueue, Operation, Urgency
from tierkv.workers.lifeline import EXIT_THREAD_DIED, OnDeath, end_process, end_with_parent, end_with_pipe
from tierkv.workers.operations import Operations
from tierkv.workers.pin_keeper import PinKeeper
from tierkv.workers.pulse import RECEIVER, Pulse
from tierkv.workers.purger import Purger
from tierkv.workers.quiet_log import QuietLog
from tierkv.workers.reconciler import Reconciler
from tierkv.workers.roll import Roll
from tierkv.workers.scrubber import Scrubber
from tierkv.workers.start_keeper import StartKeeper
from tierkv.workers.tier_gate import TierGate
from tierkv.workers.tier_health import PERIOD_SECONDS, HealthWatch
from tierkv.workers.worker_config import WorkerConfig

log = logging.getLogger(__name__)

SEND_SECONDS = 60.0  # a front that does not read for so long is stuck: this process ends, and both are replaced
RECEIVE_SECONDS = 1.0
QUEUE_SECONDS = 30.0  # an operation that finds no room in the queue for so long is refused
CLOSE_SECONDS = 5.0

Channel = BlockingChannel[Report, AnyInstruction]


class StorageWorker:
    """Everything of a worker but its process: tests run it on a thread. `run` returns when it was stopped, or when the
    front is gone; then `close` it."""

    def __init__(
        self,
        config: WorkerConfig,
        channel: Channel,
        arena: memoryview,
        *,
        files: Files | None = None,
        health_seconds: float = PERIOD_SECONDS,
        on_death: OnDeath = end_process,
    ) -> None:
        """Raises DataDirectoryError."""
        self._config = config
        self._channel = channel
        self._files = files or Files()
        self._stack = ExitStack()
        self._now = _node_clock(config)
        self._spoke = False
        self._roll = Roll()
        self._post = self._roll.post(RECEIVER)
        self._gate = TierGate(config.reserve_bytes, read_only=config.read_only)
        self._health: HealthWatch | None = None
        self._pulse = Pulse(  # before anything is asked of the disk, which may take long to answer, or never do
            self._roll,
            self._gate,
            self._report,
            has_spoken=self._has_spoken,
            tell=self._tell_health,
            period_seconds=health_seconds,
            stuck_seconds=config.stuck_seconds,
            on_death=on_death,
        )
        self._stack.callback(self._pulse.close, CLOSE_SECONDS)
        self._quiet = QuietLog(log)
        self._index_problem = ""
        try:
            self._open(config, arena, health_seconds, on_death)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, config: WorkerConfig, arena: memoryview, health_seconds: float, on_death: OnDeath) -> None:
        self._directory = directory = self._stack.enter_context(self._open_directory(config))
        index_fd = self._open_index_folder(directory)
        self._books = Books(
            directory,
            max_bytes=config.journal_bytes,
            max_age_seconds=config.journal_seconds,
            now=self._now,
            failed=self._gate.count,
        )
        self._stack.callback(self._books.close)
        self._quarantine = Quarantine(
            directory,
            max_bytes=config.quarantine_bytes,
            max_age_seconds=config.quarantine_seconds,
            moving=self._books.removing,
            left=self._books.left_quarantine,
        )
        self._books.balance(list(self._quarantine.lengths().items()), Reason.NOT_FOUND, Account.QUARANTINE)
        discard = "the process that opened it last died of it" if config.discard_index else ""
        self._catalog = self._stack.enter_context(
            Catalog(
                index_fd,
                store_id=directory.store_id,
                map_bytes=config.index_map_bytes,
                discard=discard,
                read_only=directory.read_only,
                reopen=partial(directory.open_folder, (INDEX,), create=True),
            )
        )
        self._times = CoarseTimes()
        self._groups = Groups(directory)
        self._health = health = HealthWatch(
            directory,
            self._catalog,
            self._quarantine,
            self._gate,
            self._report,
            self._now,
            lock_fd=config.lock_fd,
            period_seconds=health_seconds,
            on_death=on_death,
            roll=self._roll,
            quiet=self._quiet,
            index_problem=lambda: self._index_problem,
            also=self._reconcile,
            journal=self._books.health,
        )
        self._index = IndexWriter(
            self._catalog,
            failed=self._index_failed,
            worked=self._index_worked,
            committed=health.index_committed,
            on_death=on_death,
            roll=self._roll,
        )
        self._stack.callback(self._index.close, CLOSE_SECONDS)
        self._bookkeeper = Bookkeeper(
            self._books,
            directory,
            self._report,
            self._now,
            grown=health.journal_grown,
            on_death=on_death,
            roll=self._roll,
        )
        self._stack.callback(self._bookkeeper.close, CLOSE_SECONDS)
        self._flusher = Flusher(partial(self._files.flush, directory), self._report, on_death=on_death, roll=self._roll)
        self._stack.callback(self._flusher.close, CLOSE_SECONDS)
        self._queue = KeyQueue(num_threads=config.io_threads, on_death=on_death, roll=self._roll)
        self._stack.callback(self._queue.close, CLOSE_SECONDS)
        self._operations = Operations(
            directory=directory,
            arena=arena,
            files=self._files,
            quarantine=self._quarantine,
            groups=self._groups,
            index=self._index,
            flusher=self._flusher,
            gate=self._gate,
            times=self._times,
            books=self._books,
            report=self._report,
            now=self._now,
            quiet=self._quiet,
        )
        self._purger = Purger(
            directory=directory,
            arena=arena,
            catalog=self._catalog,
            quarantine=self._quarantine,
            groups=self._groups,
            index=self._index,
            files=self._files,
            gate=self._gate,
            bookkeeper=self._bookkeeper,
            report=self._report,
            on_death=on_death,
        )
        self._stack.callback(self._purger.close, CLOSE_SECONDS)
        self._pin_keeper = PinKeeper(directory, self._gate, self._report)
        self._starts = StartKeeper(directory, self._gate, self._quiet)
        self._reconciler = Reconciler(
            directory, self._catalog, self._operations, self._queue, seconds=config.reconcile_seconds
        )
        self._scrubber = Scrubber(directory, self._operations, self._queue, self._report, on_death=on_death)
        self._stack.callback(self._scrubber.end)
        self._stack.callback(health.close, CLOSE_SECONDS)
        self._watch = health

    def _open_directory(self, config: WorkerConfig) -> DataDirectory:
        """Made where it is new, for the lock is held. One that has become read-only is still read."""
        _check_lock(config)
        if config.read_only:
            return DataDirectory.open(config.data_dir, direct_io=config.direct_io, read_only=True)
        try:
            return DataDirectory.open(config.data_dir, direct_io=config.direct_io)
        except DataDirectoryError as error:
            cause = error.__cause__
            if not isinstance(cause, StorageError) or cause.reason != Reason.READ_ONLY:
                raise
            self._gate.write_failed(Failure.of(cause), 0)
            return DataDirectory.open(config.data_dir, create=False, writable=False, direct_io=config.direct_io)

    def _open_index_folder(self, directory: DataDirectory) -> int:
        """-1 where there is none and none may be made: then there is no index."""
        try:
            return self._stack.enter_context(directory.folder((INDEX,), create=True))
        except StorageError:
            if not directory.read_only:
                raise
            return -1

    def close(self) -> None:
        """End the threads and let go of directory and index. What was taken on is finished where that is quick."""
        self._stack.close()

    def run(self) -> None:
        self._recover()
        while not self._channel.ended:
            for instruction in self._channel.receive(RECEIVE_SECONDS):
                if isinstance(instruction, Stop):
                    self._stop(instruction)
                    return
                with self._post.at(type(instruction).__name__):
                    self._take(instruction)
        log.info("the front is gone")

    # ---------------------------------------------------------------- start

    def _recover(self) -> None:
        if self._config.sends_rows:
            self._report([StartsFound(self._starts.find())])
            recovered = recover(
                self._directory,
                self._catalog,
                self._quarantine,
                emit=lambda report: self._report([report]),
                now=self._now(),
                purged=self._books.purged,
            )
            log.info(
                "%d extents in %.2f s: %d known to the index, %d headers read; set aside %d, foreign %d, of an unknown"
                " format %d, unreadable %d, temp files removed %d (%d bytes)",
                recovered.extents,
                recovered.seconds,
                recovered.index_rows,
                recovered.headers_read,
                recovered.quarantined,
                recovered.foreign,
                recovered.unknown_format,
                recovered.unreadable,
                recovered.temp_removed,
                recovered.temp_bytes,
            )
        else:
            recovered = clear_temp(self._directory)
            self._catalog.finish_opening()
        self._watch.start()  # before Recovered, so that the core knows what takes room when it evicts down to capacity
        self._bookkeeper.count_at_start()
        self._report([recovered])

    # ---------------------------------------------------------------- instructions

    def _take(self, instruction: AnyInstruction) -> None:
        operations = self._operations
        match instruction:
            case OpenNamespace():
                self._groups.open(instruction)
                self._submit(instruction.group, Urgency.WRITE, partial(operations.open_namespace, instruction))
            case Write():
                self._run_or_refuse(instruction, Urgency.WRITE, partial(operations.write, instruction))
            case Read():
                self._run_or_refuse(instruction, Urgency.READ, partial(operations.read, instruction))
            case Remove():
                self._run_or_refuse(instruction, Urgency.REMOVE, partial(operations.remove, instruction))
            case SetAside():
                self._run_or_refuse(instruction, Urgency.REMOVE, partial(operations.set_aside, instruction))
            case Touch():
                self._touch(instruction)
            case Scrub():
                self._scrubber.start(instruction)
            case CancelScrub():
                self._scrubber.cancel(instruction.op)
            case RecordPurge():
                self._purger.record(instruction)
            case SweepPurge():
                self._purger.sweep(instruction)
            case Zero():
                self._zero(instruction)
            case RecordPin():
                self._pin_keeper.record(instruction)
            case ForgetPin():
                self._pin_keeper.forget(instruction)
            case JournalRows():
                self._bookkeeper.add(instruction)
            case BalanceTier():
                self._bookkeeper.balance(instruction)
            case ReadJournal():
                self._bookkeeper.read(instruction)
            case CountFiles():
                self._bookkeeper.count(instruction)
            case Reckon():
                self._bookkeeper.reckon(instruction)
            case KeepStart():
                run = partial(self._starts.keep, instruction.start)
                self._submit("starts", Urgency.WRITE, run, timeout_seconds=0)  # busy: with its next window
            case Stop():
                pass  # `run` has seen to it

    def _run_or_refuse(
        self, instruction: Write | Read | Remove | SetAside, urgency: Urgency, run: Callable[[], None]
    ) -> None:
        """One extent's operations share a key, whichever they are. Every instruction is answered."""
        try:
            key = ExtentName.of(instruction)
        except ValueError as error:
            self._report([_refusal(instruction, str(error))])
            return
        if not self._submit(key, urgency, run):
            self._report([_refusal(instruction, f"no room in the queue for {QUEUE_SECONDS:.0f} s")])

    def _submit(
        self, key: object, urgency: Urgency, run: Callable[[], None], *, timeout_seconds: float = QUEUE_SECONDS
    ) -> bool:
        return self._queue.submit(Operation(key, urgency, run), timeout_seconds=timeout_seconds)

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
                self._operations.touch_row(row)
            elif not self._submit(name, Urgency.SCRUB, partial(self._operations.touch_file, row), timeout_seconds=0):
                self._operations.touch_row(row)  # busy: the file's turn comes with a later touch

    def _zero(self, zero: Zero) -> None:
        run = partial(self._purger.zero, zero)
        if not self._submit(("zero", zero.op), Urgency.REMOVE, run):
            run()  # no room in the queue: it is memory only, and must not be left out

    def _stop(self, stop: Stop) -> None:
        """Each step gets what is left of the budget."""
        deadline = time.monotonic() + stop.budget_seconds

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        self._scrubber.end(min(left(), 1.0))
        all_done = self._queue.wait_idle(left()) and self._flusher.wait_idle(left())
        indexed = self._index.drain(left())
        all_done = self._bookkeeper.close(left()) and all_done
        self._books.close(in_order=all_done)
        if not all_done or not indexed:
            log.warning("stopped with work left: the budget of %.1f s is over", stop.budget_seconds)
        self._watch.close(left())
        self._report([Stopped()])

    # ---------------------------------------------------------------- reports

    def _report(self, reports: Sequence[Report]) -> None:
        self._spoke = True
        send = partial(self._channel.send, reports, timeout_seconds=SEND_SECONDS)
        if any(isinstance(report, OpFailed) for report in reports):
            self._watch.before_health(send)
            self._watch.wake()
        else:
            send()

    def _reconcile(self) -> None:
        self._reconciler.poke()

    def _tell_health(self) -> None:
        if self._health is not None:
            self._health.tell()

    def _has_spoken(self) -> bool:
        spoke, self._spoke = self._spoke, False
        return spoke

    def _index_failed(self, problem: str) -> None:
        self._index_problem = problem
        self._gate.count(Failure(Reason.IO_ERROR, "index", "", problem))

    def _index_worked(self) -> None:
        self._index_problem = ""


def _check_lock(config: WorkerConfig) -> None:
    """The lock that was inherited must be the one in the directory: that was not removed, or made anew, meanwhile."""
    try:
        held = os.fstat(config.lock_fd)
        there = os.stat(os.path.join(config.data_dir, LOCK), follow_symlinks=False)
    except OSError as error:
        raise DataDirectoryError(f"{config.data_dir} is no longer what was locked: {error.strerror}") from error
    if (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino):
        raise DataDirectoryError(f"{config.data_dir} has another {LOCK} than the one that this node holds")


def _refusal(instruction: Write | Read | Remove | SetAside, problem: str) -> Report:
    if isinstance(instruction, Read):
        return ReadDone(instruction.op, 0, 0.0, Reason.IO_ERROR)
    return OpFailed(instruction.op, Reason.IO_ERROR, problem)


def _node_clock(config: WorkerConfig) -> Callable[[], float]:
    return lambda: config.wall_zero + (time.monotonic() - config.monotonic_zero)


def main(arguments: Sequence[str]) -> int:
    """The process; see worker_config.py for its argument, and for what it returns."""
    config = WorkerConfig.decode(arguments[0])
    end_with_parent(config.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what a terminal sends to all: the supervisor says when to stop
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s storage: %(message)s")
    end_with_pipe(config.lifeline_fd)
    channel = worker_end(socket.socket(fileno=config.channel_fd))
    arena = memoryview(mmap.mmap(config.arena_fd, config.arena_bytes))  # mapped until the process ends
    os.close(config.arena_fd)
    try:
        worker = StorageWorker(config, channel, arena, files=load_files(config.files))
    except TierkvError as error:
        log.error("%s", error)
        return error.exit_code
    try:
        worker.run()
    except DataDirectoryError as error:  # what is to be purged can't be told
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except Exception:  # the main thread died, and the process with it, like for any other of its threads
        log.exception("the storage worker")
        status = EXIT_THREAD_DIED
    logging.shutdown()
    os._exit(status)  # a thread may sit in a system call of a sick disk; nothing of this process is waited for
