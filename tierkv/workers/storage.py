"""The storage worker: the one process of a node that reads and writes files of its data directory.

    python -m tierkv.workers.storage CONFIG        started by the supervisor; see worker_config.py

    channel -> main thread -> the tier: see file_tier.py
                           -> bookkeeper: the journal;  purger;  pins;  records of starts
    supervisor-watch: the end

At the start it recovers what is on disk and tells the front, before it reads the first instruction.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import partial

from tierkv.core.instructions import (
    AnyInstruction,
    BalanceTier,
    CountFiles,
    ForgetPin,
    JournalRows,
    KeepStart,
    ReadJournal,
    Reckon,
    RecordPin,
    RecordPurge,
    StartsFound,
    Stop,
    Stopped,
    SweepPurge,
    Zero,
)
from tierkv.core.journal import Account
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError, TierkvError
from tierkv.storage.books import Books
from tierkv.storage.directory import LOCK, DataDirectory
from tierkv.storage.names import INDEX
from tierkv.storage.recovery import clear_temp, recover
from tierkv.storage.system_calls import Failure
from tierkv.workers.bookkeeper import Bookkeeper
from tierkv.workers.file_tier import CLOSE_SECONDS, Channel, FileTier
from tierkv.workers.files import Files, load_files
from tierkv.workers.key_queue import Urgency
from tierkv.workers.lifeline import OnDeath, end_process
from tierkv.workers.pin_keeper import PinKeeper
from tierkv.workers.process import begin_process, run_process
from tierkv.workers.purger import Purger
from tierkv.workers.reconciler import Reconciler
from tierkv.workers.start_keeper import StartKeeper
from tierkv.workers.tier_health import PERIOD_SECONDS
from tierkv.workers.worker_config import WorkerConfig

log = logging.getLogger(__name__)

RECEIVE_SECONDS = 1.0


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
        self._reconciler: Reconciler | None = None
        self._tier = FileTier(
            config, channel, arena, files or Files(), health_seconds=health_seconds, on_death=on_death
        )
        try:
            self._open(config, arena, on_death)
        except BaseException:
            self._tier.close()
            raise

    def _open(self, config: WorkerConfig, arena: memoryview, on_death: OnDeath) -> None:
        tier = self._tier
        self._directory = directory = tier.stack.enter_context(self._open_directory(config))
        index_fd = self._open_index_folder(directory)
        self._books = Books(
            directory,
            max_bytes=config.journal_bytes,
            max_age_seconds=config.journal_seconds,
            now=tier.now,
            failed=tier.gate.count,
        )
        tier.stack.callback(self._books.close)
        tier.open(
            directory,
            index_fd,
            partial(directory.open_folder, (INDEX,), create=True),
            books=self._books,
            lock_fd=config.lock_fd,
            looked=self._reconcile,
            journal=self._books.health,
        )
        self._books.balance(list(tier.quarantine.lengths().items()), Reason.NOT_FOUND, Account.QUARANTINE)
        self._bookkeeper = Bookkeeper(
            self._books,
            directory,
            tier.report,
            tier.now,
            grown=tier.health.journal_grown,
            on_death=on_death,
            roll=tier.roll,
        )
        tier.stack.callback(self._bookkeeper.close, CLOSE_SECONDS)
        self._purger = Purger(
            directory=directory,
            arena=arena,
            catalog=tier.catalog,
            quarantine=tier.quarantine,
            groups=tier.groups,
            index=tier.index,
            files=tier.files,
            gate=tier.gate,
            bookkeeper=self._bookkeeper,
            report=tier.report,
            on_death=on_death,
        )
        tier.stack.callback(self._purger.close, CLOSE_SECONDS)
        self._pin_keeper = PinKeeper(directory, tier.gate, tier.report)
        self._starts = StartKeeper(directory, tier.gate, tier.quiet)
        self._reconciler = Reconciler(
            directory, tier.catalog, tier.operations, tier.queue, seconds=config.reconcile_seconds
        )

    def _open_directory(self, config: WorkerConfig) -> DataDirectory:
        """Made where it is new, for the lock is held. One that has become read-only is still read."""
        _check_lock(config)
        if config.read_only:
            return DataDirectory.open(config.data_dir, direct_io=config.direct_io, read_only=True)
        try:
            return DataDirectory.open(config.data_dir, direct_io=config.direct_io, codec=config.codec)
        except DataDirectoryError as error:
            cause = error.__cause__
            if not isinstance(cause, StorageError) or cause.reason != Reason.READ_ONLY:
                raise
            self._tier.gate.write_failed(Failure.of(cause), 0)
            return DataDirectory.open(
                config.data_dir, create=False, writable=False, direct_io=config.direct_io, codec=config.codec
            )

    def _open_index_folder(self, directory: DataDirectory) -> int:
        """-1 where there is none and none may be made: then there is no index."""
        try:
            return self._tier.stack.enter_context(directory.folder((INDEX,), create=True))
        except StorageError:
            if not directory.read_only:
                raise
            return -1

    def close(self) -> None:
        """End the threads and let go of directory and index. What was taken on is finished where that is quick."""
        self._tier.close()

    def run(self) -> None:
        self._recover()
        while not self._channel.ended:
            for instruction in self._channel.receive(RECEIVE_SECONDS):
                if isinstance(instruction, Stop):
                    self._stop(instruction)
                    return
                with self._tier.receiver.at(type(instruction).__name__):
                    self._take(instruction)
        log.info("the front is gone")

    # ---------------------------------------------------------------- start

    def _recover(self) -> None:
        if self._config.sends_rows:
            self._tier.report([StartsFound(self._starts.find())])
            recovered = recover(
                self._directory,
                self._tier.catalog,
                self._tier.quarantine,
                emit=lambda report: self._tier.report([report]),
                now=self._tier.now(),
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
            self._tier.catalog.finish_opening()
        # Before Recovered, so that the core knows what takes room when it evicts down to capacity.
        self._tier.health.start()
        self._bookkeeper.count_at_start()
        self._tier.report([recovered])

    # ---------------------------------------------------------------- instructions

    def _take(self, instruction: AnyInstruction) -> None:
        match instruction:
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
                self._tier.submit("starts", Urgency.WRITE, run, timeout_seconds=0)  # busy: with its next window
            case _:
                self._tier.take(instruction)

    def _zero(self, zero: Zero) -> None:
        run = partial(self._purger.zero, zero)
        if not self._tier.submit(("zero", zero.op), Urgency.REMOVE, run):
            run()  # no room in the queue: it is memory only, and must not be left out

    def _stop(self, stop: Stop) -> None:
        """Each step gets what is left of the budget."""
        deadline = time.monotonic() + stop.budget_seconds

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        finished = self._tier.finish(left)
        finished = self._bookkeeper.close(left()) and finished
        self._books.close(in_order=finished)
        if not finished:
            log.warning("stopped with work left: the budget of %.1f s is over", stop.budget_seconds)
        self._tier.health.close(left())
        self._tier.report([Stopped()])

    def _reconcile(self) -> None:
        if self._reconciler is not None:
            self._reconciler.poke()


def _check_lock(config: WorkerConfig) -> None:
    """The lock that was inherited must be the one in the directory: that was not removed, or made anew, meanwhile."""
    try:
        held = os.fstat(config.lock_fd)
        there = os.stat(os.path.join(config.data_dir, LOCK), follow_symlinks=False)
    except OSError as error:
        raise DataDirectoryError(f"{config.data_dir} is no longer what was locked: {error.strerror}") from error
    if (held.st_dev, held.st_ino) != (there.st_dev, there.st_ino):
        raise DataDirectoryError(f"{config.data_dir} has another {LOCK} than the one that this node holds")


def main(arguments: Sequence[str]) -> int:
    """The process; see worker_config.py for its argument, and for what it returns."""
    config = WorkerConfig.decode(arguments[0])
    channel, arena = begin_process(config, "storage")
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
    run_process(partial(main, sys.argv[1:]), "storage")
