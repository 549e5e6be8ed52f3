"""The storage worker's part of purges: writes down what is to go, removes it, and zeroes memory.

RecordPurge   by the main thread, so that nothing that was said later overtakes it
SweepPurge    by a thread of its own; see sweeper.py
Zero          by the queue, like a removal
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tierkv.core.instructions import PurgeRecorded, PurgeScope, RecordPurge, Report, SweepPurge, Zero, Zeroed
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import DataDirectory
from tierkv.storage.purge_record import PurgeRecord, PurgeRecords, write_record
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.system_calls import Failure
from tierkv.workers.bookkeeper import Bookkeeper
from tierkv.workers.files import Files
from tierkv.workers.groups import Groups
from tierkv.workers.index_writer import IndexWriter
from tierkv.workers.lifeline import OnDeath, end_process
from tierkv.workers.sweeper import Removed, Sweeper
from tierkv.workers.tier_gate import TierGate

log = logging.getLogger(__name__)

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
        self._groups = groups
        self._files = files
        self._gate = gate
        self._bookkeeper = bookkeeper
        self._report = report
        self._on_disk = PurgeRecords(directory)
        self._records: dict[bytes, PurgeRecord] = {}
        self._unrecorded: dict[bytes, bool | None] = {}  # -> `disk` of its RecordPurge
        self._sweeper = Sweeper(
            directory=directory,
            catalog=catalog,
            quarantine=quarantine,
            groups=groups,
            index=index,
            files=files,
            gate=gate,
            report=report,
            find=self._find,
            booked=self._booked,
            cross_out=self._cross_out,
            on_death=on_death,
        )

    def record(self, order: RecordPurge) -> None:
        """Reports at once. A full disk does not keep a purge from going on: what it removes makes room."""
        record = PurgeRecord(order.purge, order.scope, order.about)
        if order.nvme:
            self._records[order.purge] = record
            self._groups.forget(order.scope)
        try:
            write_record(self._directory, record, nvme=order.nvme, disk=order.disk)
        except StorageError as error:
            if order.nvme:
                self._unrecorded[order.purge] = order.disk
            self._gate.count(Failure.of(error))
            log.warning("purge %s is not written down: %s", order.purge.hex(), error)
            self._report([PurgeRecorded(order.purge, Reason(error.reason), str(error))])
            return
        self._files.purge_reached("recorded", order.purge)
        self._report([PurgeRecorded(order.purge)])

    def sweep(self, order: SweepPurge) -> None:
        self._sweeper.sweep(order)

    def zero(self, order: Zero) -> None:
        for offset, num_bytes in order.ranges:
            view = self._arena[offset : offset + num_bytes]
            for start in range(0, num_bytes, len(_ZEROS)):
                piece = view[start : start + len(_ZEROS)]
                piece[:] = _ZEROS[: len(piece)]
        self._report([Zeroed(order.op)])

    def close(self, timeout_seconds: float) -> bool:
        """Whether no sweep runs any more. One that does may be cut off at any point."""
        return self._sweeper.close(timeout_seconds)

    # ---------------------------------------------------------------- for the sweep

    def _find(self, purge: bytes) -> PurgeRecord | None:
        """As it was told, or as recovery left it; written down by now, if that is possible. Raises StorageError."""
        record = self._records.get(purge)
        if record is None:
            return next((one for one in self._on_disk.read() if one.purge == purge), None)
        if purge in self._unrecorded:
            try:
                write_record(self._directory, record, disk=self._unrecorded[purge])
            except StorageError as error:
                if error.reason != Reason.DISK_FULL:  # for want of room it goes without: that makes room
                    raise
            else:
                del self._unrecorded[purge]
        return record

    @contextmanager
    def _booked(self, scope: PurgeScope) -> Iterator[Removed]:
        removed: Counter[bytes] = Counter()
        with self._bookkeeper.books.sweeping():
            yield lambda group, num_bytes: removed.update({group: num_bytes})
            self._bookkeeper.purged(scope, removed)

    def _cross_out(self, record: PurgeRecord) -> None:
        if record.purge in self._unrecorded:  # there is room by now: the disk directory is swept by its record
            write_record(self._directory, record, nvme=False, disk=self._unrecorded[record.purge])
        self._on_disk.remove(record.purge)
        self._records.pop(record.purge, None)
        self._unrecorded.pop(record.purge, None)
