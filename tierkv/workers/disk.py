"""The worker of the disk tier: the one process of a node that reads and writes files of the disk directory.

    python -m tierkv.workers.disk CONFIG        started by the supervisor; see disk_config.py

    channel -> main thread -> the tier: see file_tier.py        Demote copies files of the data directory
                           -> sweeper: purges
    recovery: opens the directory, and finds what is in it; then the rescanner: what other nodes do there
    supervisor-watch: the end

A slow disk or a file server that hangs keeps nobody else waiting: this process is there for nothing but that disk, and
its main thread asks nothing of it. Instructions that come before the directory is open wait for that. When the
directory turns out to be gone, or another one, this process ends; the next one looks what is there then.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event

import msgspec

from tierkv.core.instructions import (
    AnyInstruction,
    CountFiles,
    PurgeScope,
    Recovered,
    Report,
    Rows,
    Stop,
    Stopped,
    SweepPurge,
    TierHealth,
    Touch,
)
from tierkv.core.keys import key_at
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError, TierkvError
from tierkv.storage.directory import FORMAT, DataDirectory
from tierkv.storage.disk_directory import hold_disk_index, open_disk_directory
from tierkv.storage.names import DISK_INDEX, DISK_PURGES
from tierkv.storage.purge_record import PurgeRecord, PurgeRecords
from tierkv.storage.recovery import clear_temp, recover
from tierkv.storage.sweep import covers, hidden_heads
from tierkv.workers.disk_config import DiskWorkerConfig
from tierkv.workers.file_counter import FileCounter
from tierkv.workers.file_tier import CLOSE_SECONDS, Channel, FileTier
from tierkv.workers.files import Files, load_files
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.operations import Unbooked
from tierkv.workers.process import begin_process, run_process
from tierkv.workers.rescanner import Rescanner
from tierkv.workers.sweeper import Removed, Sweeper
from tierkv.workers.tier_health import PERIOD_SECONDS

log = logging.getLogger(__name__)

RECEIVE_SECONDS = 0.5
DATA_SECONDS = 10.0
"""How long the data directory may not be there yet: at a first start the storage worker is making it."""


class _Ended(Exception):
    """The worker ends in the middle of its recovery."""


class DiskWorker:
    """Everything of a worker but its process: tests run it on a thread. `run` returns when it was stopped, when the
    front is gone, or with a `failure`: the directory can't be used, or not any more. Then `close` it."""

    def __init__(
        self,
        config: DiskWorkerConfig,
        channel: Channel,
        arena: memoryview,
        *,
        files: Files | None = None,
        health_seconds: float = PERIOD_SECONDS,
        on_death: OnDeath = end_process,
    ) -> None:
        self.failure: TierkvError | None = None
        self._config = config
        self._channel = channel
        self._on_death = on_death
        self._tier = FileTier(
            config,
            channel,
            arena,
            files or Files(),
            health_seconds=health_seconds,
            on_death=on_death,
            tell_unopened=self._tell_unopened,
        )
        self._is_open = Event()
        self._is_recovered = Event()
        self._is_ending = Event()
        self._waiting: list[AnyInstruction] = []  # for the directory to be open
        self._sweeps: list[SweepPurge] = []  # for it to be recovered: what is found is told before it is removed
        self._post = self._tier.roll.post("recovery")
        self._recovery = start_thread("recovery", self._begin, on_death=on_death)

    def close(self) -> None:
        """End the threads and let go of directory and index. What was taken on is finished where that is quick."""
        self._is_ending.set()
        if self._is_recovered.is_set():
            self._rescanner.end()
        self._recovery.join(CLOSE_SECONDS)
        self._tier.close()

    def run(self) -> None:
        while not self._channel.ended:
            for instruction in self._channel.receive(RECEIVE_SECONDS):
                if isinstance(instruction, Stop):
                    self._stop(instruction)
                    return
                with self._tier.receiver.at(type(instruction).__name__):
                    self._take_waiting()
                    self._take(instruction)
            with self._tier.receiver.at("what waited"):
                self._take_waiting()
            if self.failure is not None:
                return
        log.info("the front is gone")

    # ---------------------------------------------------------------- start, on a thread of its own

    def _begin(self) -> None:
        try:
            with self._post.at("opening the disk directory"):
                self._open()
            self._is_open.set()
            self._tier.health.start()
            with self._post.at("recovery"):
                recovered = self._recover()
        except _Ended:
            return
        except (DataDirectoryError, StorageError) as error:
            self._fail(error if isinstance(error, DataDirectoryError) else DataDirectoryError(str(error)))
            return
        self._tier.report([recovered])
        self._is_recovered.set()

    def _open(self) -> None:
        config, tier = self._config, self._tier
        self._data = data = tier.stack.enter_context(self._open_data())
        index_fd = tier.stack.enter_context(hold_disk_index(data))
        with data.folder(() if config.read_only else (DISK_PURGES,), create=True):
            pass  # from now on purges are written down for this tier as well
        disk = open_disk_directory(
            config.disk_dir,
            data,
            direct_io=config.direct_io,
            read_only=config.read_only,
            codec=config.codec,
            failed=lambda failure: tier.gate.write_failed(failure, 0),
        )
        self._directory = tier.stack.enter_context(disk)
        self._records = PurgeRecords(data, DISK_PURGES)
        tier.open(
            disk,
            index_fd,
            partial(data.open_folder, (DISK_INDEX,), create=True),
            books=Unbooked(),
            source=data,
            looked=self._looked,
        )
        self._rescanner = Rescanner(
            disk,
            tier.catalog,
            tier.index,
            tier.quarantine,
            tier.operations,
            tier.queue,
            tier.gate,
            tier.report,
            tier.now,
            seconds=config.rescan_seconds,
            purging=self._purging,
        )
        self._sweeper = Sweeper(
            directory=disk,
            catalog=tier.catalog,
            quarantine=tier.quarantine,
            groups=tier.groups,
            index=tier.index,
            files=tier.files,
            gate=tier.gate,
            report=tier.report,
            find=self._find_record,
            booked=self._sweeping,
            cross_out=self._cross_out,
            on_death=self._on_death,
        )
        tier.stack.callback(self._sweeper.close, CLOSE_SECONDS)
        self._counter = FileCounter(disk, tier.report, on_death=self._on_death)
        tier.stack.callback(self._counter.close, CLOSE_SECONDS)

    def _open_data(self) -> DataDirectory:
        """The node's own directory, of which the index and the records of purges are changed, and no more."""
        path = Path(self._config.data_dir)
        deadline = time.monotonic() + DATA_SECONDS
        while not (path / FORMAT).exists() and time.monotonic() < deadline:
            if self._is_ending.wait(0.02):
                raise _Ended
        return DataDirectory.open(
            path,
            create=False,
            writable=False,
            direct_io=self._config.direct_io,
            read_only=self._config.read_only,
        )

    def _recover(self) -> Recovered:
        tier = self._tier
        if not self._config.sends_rows:
            recovered = clear_temp(self._directory)
            tier.catalog.finish_opening()
            self._rescanner.hurry()  # others may have gone on while no worker of this node was there
            return recovered
        recovered = recover(
            self._directory, tier.catalog, tier.quarantine, emit=self._emit, now=tier.now(), records=self._records
        )
        log.info(
            "%d extents in %.2f s: %d known to the index, %d headers read; set aside %d, foreign %d, unreadable %d",
            recovered.extents,
            recovered.seconds,
            recovered.index_rows,
            recovered.headers_read,
            recovered.quarantined,
            recovered.foreign,
            recovered.unreadable,
        )
        return recovered

    def _emit(self, report: Report) -> None:
        if self._is_ending.is_set() or self._channel.ended:
            raise _Ended
        self._post.goes_on()
        if isinstance(report, Rows):
            report = self._without_purged(report)
        self._tier.report([report])

    def _without_purged(self, told: Rows) -> Rows:
        """What was found before a purge was written down, and is told after it."""
        scopes = self._purging()
        if not scopes:
            return told
        if any(covers(scope, told.fingerprint, told.group) for scope in scopes):
            return msgspec.structs.replace(told, rows=[])
        heads = {head for scope in scopes for head in hidden_heads(scope, told.group)}
        return msgspec.structs.replace(told, rows=[row for row in told.rows if key_at(row.keys, 0) not in heads])

    # ---------------------------------------------------------------- instructions

    def _take(self, instruction: AnyInstruction) -> None:
        if not self._is_open.is_set():
            if not isinstance(instruction, Touch):  # a hit that is not remembered costs nothing
                self._waiting.append(instruction)
        elif isinstance(instruction, CountFiles):
            self._counter.count(instruction)
        elif not isinstance(instruction, SweepPurge):
            self._tier.take(instruction)
        elif self._is_recovered.is_set():
            self._sweeper.sweep(instruction)
        else:
            self._sweeps.append(instruction)

    def _take_waiting(self) -> None:
        if self._waiting and self._is_open.is_set():
            waiting, self._waiting = self._waiting, []
            for instruction in waiting:
                self._take(instruction)
        if self._sweeps and self._is_recovered.is_set():
            sweeps, self._sweeps = self._sweeps, []
            for order in sweeps:
                self._sweeper.sweep(order)

    def _stop(self, stop: Stop) -> None:
        """Each step gets what is left of the budget."""
        deadline = time.monotonic() + stop.budget_seconds

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        self._is_ending.set()
        self._recovery.join(left())
        if self._is_open.is_set():
            self._rescanner.end()
            if not self._tier.finish(left):
                log.warning("stopped with work left: the budget of %.1f s is over", stop.budget_seconds)
            self._tier.health.close(left())
        self._tier.report([Stopped()])

    # ---------------------------------------------------------------- purges

    def _purging(self) -> list[PurgeScope]:
        return [record.scope for record in self._records.read()]

    def _find_record(self, purge: bytes) -> PurgeRecord | None:
        return next((record for record in self._records.read() if record.purge == purge), None)

    @contextmanager
    def _sweeping(self, scope: PurgeScope) -> Iterator[Removed]:
        with self._rescanner.alone():
            yield lambda group, num_bytes: None

    def _cross_out(self, record: PurgeRecord) -> None:
        self._data.flush((DISK_INDEX,))
        self._records.remove(record.purge)

    # ---------------------------------------------------------------- health

    def _looked(self) -> None:
        closed = self._tier.gate.closed
        if closed is not None and closed.reason == Reason.DATA_DIR_GONE:
            self.failure = DataDirectoryError(closed.problem)
        elif self._is_recovered.is_set() and not self._is_ending.is_set():
            self._rescanner.poke()

    def _tell_unopened(self) -> None:
        closed = self._tier.gate.closed
        if closed is not None:
            self._tier.report([_unusable(closed.reason, closed.problem)])

    def _fail(self, error: DataDirectoryError) -> None:
        cause = error.__cause__
        reason = Reason(cause.reason) if isinstance(cause, StorageError) else Reason.DISK_DEGRADED
        self._tier.report([_unusable(reason, str(error))])
        self.failure = error


def _unusable(reason: Reason, problem: str) -> Report:
    return TierHealth(
        writable=False,
        overhead_bytes=0,
        free_bytes=0,
        reason=reason,
        problem=problem,
        readable=False,
        read_problem=problem,
    )


def main(arguments: Sequence[str]) -> int:
    """The process; see disk_config.py for its argument, and for what it returns."""
    config = DiskWorkerConfig.decode(arguments[0])
    channel, arena = begin_process(config, "disk")
    worker = DiskWorker(config, channel, arena, files=load_files(config.files))
    worker.run()
    if worker.failure is None:
        return 0
    log.error("%s", worker.failure)
    return worker.failure.exit_code


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]), "disk")
