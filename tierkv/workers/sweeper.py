"""Removing what is purged from a tier of files: on a thread of its own, for it may take long, and nothing waits for it.

find the record -> none of its groups' folders is made any more -> index written -> sweep -> booked -> crossed out
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Thread

from tierkv.core.instructions import PurgeScope, PurgeSwept, Report, SweepPurge, Swept
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import DataDirectory
from tierkv.storage.purge_record import PurgeRecord
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.sweep import sweep
from tierkv.storage.system_calls import Failure
from tierkv.workers.files import Files
from tierkv.workers.groups import Groups
from tierkv.workers.index_writer import IndexWriter
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.tier_gate import TierGate

log = logging.getLogger(__name__)

INDEX_SECONDS = 30.0
"""How long changes to the index that were made before a sweep may take to get there, before it is begun anew."""

Removed = Callable[[bytes, int], None]
"""Told of each file that was removed: its group and its length."""


class Sweeper:
    def __init__(
        self,
        *,
        directory: DataDirectory,
        catalog: Catalog,
        quarantine: Quarantine,
        groups: Groups,
        index: IndexWriter,
        files: Files,
        gate: TierGate,
        report: Callable[[Sequence[Report]], None],
        find: Callable[[bytes], PurgeRecord | None],
        booked: Callable[[PurgeScope], AbstractContextManager[Removed]],
        cross_out: Callable[[PurgeRecord], None],
        on_death: OnDeath = end_process,
    ) -> None:
        """`find` knows what a purge is to remove, a sweep runs inside of `booked`, and `cross_out` is called when it is
        through. Each may raise StorageError, `find` DataDirectoryError as well: then it is to be asked for again."""
        self._directory = directory
        self._catalog = catalog
        self._quarantine = quarantine
        self._groups = groups
        self._index = index
        self._files = files
        self._gate = gate
        self._report = report
        self._find = find
        self._booked = booked
        self._cross_out = cross_out
        self._on_death = on_death
        self._threads: list[Thread] = []
        self._num_sweeps = 0

    def sweep(self, order: SweepPurge) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._num_sweeps += 1
        work = partial(self._sweep, order.purge)
        self._threads.append(start_thread(f"purge-{self._num_sweeps}", work, on_death=self._on_death))

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
        if record is None:
            raise StorageError("purge", "", Reason.NOT_FOUND, f"nobody has said what purge {purge.hex()} is to remove")
        self._groups.forget(record.scope)
        if not self._index.drain(INDEX_SECONDS):
            raise StorageError("index", "", Reason.IO_ERROR, "the index is not written to")
        with self._booked(record.scope) as removed:
            swept = sweep(
                self._directory,
                self._catalog,
                self._quarantine,
                record.scope,
                alone=self._groups.alone,
                reached=lambda stage: self._files.purge_reached(stage, purge),
                removed=removed,
            )
        self._cross_out(record)
        self._files.purge_reached("crossed out", purge)
        return swept
