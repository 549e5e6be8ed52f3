"""The worker's part of purges: writes down what is to go, removes it, and zeroes memory.

RecordPurge   by the main thread, so that nothing that was said later overtakes it
SweepPurge    by a thread of its own: it may take long, and no extent waits for it
Zero          by the queue, like a removal
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread

from tierkv.core.instructions import (
    PurgeRecorded,
    PurgeSwept,
    RecordPurge,
    Report,
    SweepPurge,
    Swept,
    Zero,
    Zeroed,
)
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import DataDirectory
from tierkv.storage.purge_record import PurgeRecord, read_records, remove_record, write_record
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.sweep import sweep
from tierkv.storage.system_calls import Failure
from tierkv.workers.bookkeeper import Bookkeeper
from tierkv.workers.files import Files
from tierkv.workers.groups import Groups
from tierkv.workers.index_writer import IndexWriter
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.tier_gate import TierGate

log = logging.getLogger(__name__)

INDEX_SECONDS = 30.0
"""How long changes to the index that were made before a sweep may take to get there, before it is begun anew."""

_ZEROS = memoryview(bytes(2**20))


class Purger:
    def __init__(
        self,
        *,
        directory: DataDirectory,
        arena: memoryview,
        catalog: Catalog,
        quarantine: Quarantine,
        groups: Groups,
        index: IndexWriter,
        files: Files,
        gate: TierGate,
        bookkeeper: Bookkeeper,
        report: Callable[[Sequence[Report]], None],
        on_death: OnDeath = end_process,
    ) -> None:
        self._directory = directory
        self._arena = arena
        self._catalog = catalog
        self._quarantine = quarantine
        self._groups = groups
        self._index = index
        self._files = files
        self._gate = gate
        self._bookkeeper = bookkeeper
        self._report = report
        self._on_death = on_death
        self._records: dict[bytes, PurgeRecord] = {}
        self._unrecorded: set[bytes] = set()
        self._threads: list[Thread] = []
        self._num_sweeps = 0

    def record(self, order: RecordPurge) -> None:
        """Reports at once. A full disk does not keep a purge from going on: what it removes makes room."""
        record = PurgeRecord(order.purge, order.scope, order.about)
        self._records[order.purge] = record
        self._groups.forget(order.scope)
        try:
            write_record(self._directory, record)
        except StorageError as error:
            self._unrecorded.add(order.purge)
            self._gate.count(Failure.of(error))
            log.warning("purge %s is not written down: %s", order.purge.hex(), error)
            self._report([PurgeRecorded(order.purge, Reason(error.reason), str(error))])
            return
        self._files.purge_reached("recorded", order.purge)
        self._report([PurgeRecorded(order.purge)])

    def sweep(self, order: SweepPurge) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._num_sweeps += 1
        work = partial(self._sweep, order.purge)
        self._threads.append(start_thread(f"purge-{self._num_sweeps}", work, on_death=self._on_death))

    def zero(self, order: Zero) -> None:
        for offset, num_bytes in order.ranges:
            view = self._arena[offset : offset + num_bytes]
            for start in range(0, num_bytes, len(_ZEROS)):
                piece = view[start : start + len(_ZEROS)]
                piece[:] = _ZEROS[: len(piece)]
        self._report([Zeroed(order.op)])

    def close(self, timeout_seconds: float) -> bool:
        """Whether no sweep runs any more. One that does may be cut off at any point."""
        for thread in self._threads:
            thread.join(timeout_seconds)
        return not any(thread.is_alive() for thread in self._threads)

    # ---------------------------------------------------------------- the thread

    def _sweep(self, purge: bytes) -> None:
        try:
            swept = self._remove(purge)
        except (StorageError, DataDirectoryError) as error:
            reason = Reason(error.reason) if isinstance(error, StorageError) else Reason.IO_ERROR
            if isinstance(error, StorageError):
                self._gate.count(Failure.of(error))
            log.warning("purge %s does not get on: %s", purge.hex(), error)
            self._report([PurgeSwept(purge, Swept(), reason, str(error))])
        else:
            self._report([PurgeSwept(purge, swept)])

    def _remove(self, purge: bytes) -> Swept:
        record = self._find(purge)
        self._groups.forget(record.scope)
        if purge in self._unrecorded:
            self._record_again(record)
        if not self._index.drain(INDEX_SECONDS):
            raise StorageError("index", "", Reason.IO_ERROR, "the index is not written to")
        removed: Counter[bytes] = Counter()
        with self._bookkeeper.books.sweeping():
            swept = sweep(
                self._directory,
                self._catalog,
                self._quarantine,
                record.scope,
                alone=self._groups.alone,
                reached=lambda stage: self._files.purge_reached(stage, purge),
                removed=lambda group, num_bytes: removed.update({group: num_bytes}),
            )
            self._bookkeeper.purged(record.scope, removed)
        remove_record(self._directory, purge)
        self._records.pop(purge, None)
        self._unrecorded.discard(purge)
        self._files.purge_reached("crossed out", purge)
        return swept

    def _record_again(self, record: PurgeRecord) -> None:
        """What could not be written down for want of room goes without: that makes room. Raises StorageError."""
        try:
            write_record(self._directory, record)
        except StorageError as error:
            if error.reason != Reason.DISK_FULL:
                raise
        else:
            self._unrecorded.discard(record.purge)

    def _find(self, purge: bytes) -> PurgeRecord:
        """As it was told, or as recovery left it. Raises StorageError when neither knows it."""
        record = self._records.get(purge)
        if record is None:
            record = next((one for one in read_records(self._directory) if one.purge == purge), None)
        if record is None:
            raise StorageError("purge", "", Reason.NOT_FOUND, f"nobody has said what purge {purge.hex()} is to remove")
        return record
