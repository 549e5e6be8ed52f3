"""The worker's part of the journal: rows are taken from any thread, written in batches, and flushed in groups.

    rows of the front -> queue, bounded -> journal thread -> segment        flushed once a second
    files that come and go -> written down where that happens, before and after

Reading and counting run on a thread of their own, one after the other, behind everything else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from tierkv.core.eviction_report import EvictionReport, summarize
from tierkv.core.instructions import (
    BalanceTier,
    CountFiles,
    Difference,
    FilesCounted,
    JournalRead,
    JournalRows,
    PurgeScope,
    ReadJournal,
    Reckon,
    Reckoned,
    Report,
)
from tierkv.core.journal import AnyRow
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.books import Books
from tierkv.storage.directory import DataDirectory
from tierkv.storage.journal_segment import Scan
from tierkv.storage.purge_record import read_records
from tierkv.storage.recount import recount
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.roll import Roll

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.1
FLUSH_SECONDS = 1.0
BOUNDS_SECONDS = 60.0
MAX_WAITING = 50_000
ROWS_OF_A_BATCH = 2_000
DRAIN_SECONDS = 30.0
PROGRESS_SECONDS = 0.2

T = TypeVar("T")


class Bookkeeper:
    def __init__(
        self,
        books: Books,
        directory: DataDirectory,
        report: Callable[[Sequence[Report]], None],
        now: Callable[[], float],
        *,
        grown: Callable[[], None] = lambda: None,
        on_death: OnDeath = end_process,
        roll: Roll | None = None,
    ) -> None:
        """`grown` is called after a batch: the journal takes more room."""
        self.books = books
        self._directory = directory
        self._report = report
        self._now = now
        self._grown = grown
        self._on_death = on_death
        self._post = (roll or Roll()).post("journal")
        self._waiting: list[AnyRow | BalanceTier] = []
        self._is_busy = False
        self._is_hurried = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._one_at_a_time = threading.Lock()
        self._audits: list[threading.Thread] = []
        self._num_audits = 0
        self._thread = start_thread("journal", self._run, on_death=on_death)

    # ---------------------------------------------------------------- rows

    def add(self, rows: JournalRows) -> None:
        """Waits for nothing: what finds no room is dropped, and counted."""
        self._put(rows.rows)

    def balance(self, balance: BalanceTier) -> None:
        """Carried out behind the rows that were added before."""
        self._put([balance])

    def _put(self, rows: Sequence[AnyRow | BalanceTier]) -> None:
        with self._lock:
            if len(self._waiting) + len(rows) > MAX_WAITING:
                self.books.count_dropped(Reason.NO_ROOM, len(rows))
                return
            self._waiting += rows
            self._changed.notify_all()

    def drain(self, timeout_seconds: float) -> bool:
        """Whether everything added was written, or dropped, in time."""
        with self._lock:
            self._is_hurried = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._waiting and not self._is_busy, timeout_seconds)
            self._is_hurried = False
        self.books.flush()
        return done

    def close(self, timeout_seconds: float) -> bool:
        """Write what waits, and end. The books stay open."""
        deadline = time.monotonic() + timeout_seconds
        done = self.drain(timeout_seconds)
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        for thread in [self._thread, *self._audits]:
            thread.join(max(0.0, deadline - time.monotonic()))
        return done and not self._thread.is_alive()

    def _run(self) -> None:
        flushed = bounded = time.monotonic()
        while True:
            with self._lock:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._is_closed, FLUSH_SECONDS)
                if self._is_closed:
                    return
                if self._waiting:
                    self._changed.wait_for(self._has_gathered, GATHER_SECONDS)
                batch, self._waiting = self._waiting, []
                self._is_busy = True
            with self._post.at("journal"):
                self._write(batch)
                now = time.monotonic()
                if now - flushed >= FLUSH_SECONDS:
                    self.books.flush()
                    flushed = now
                if now - bounded >= BOUNDS_SECONDS:
                    self.books.keep_bounds()
                    bounded = now

    def _has_gathered(self) -> bool:
        return len(self._waiting) >= ROWS_OF_A_BATCH or self._is_hurried or self._is_closed

    def _write(self, batch: list[AnyRow | BalanceTier]) -> None:
        rows: list[AnyRow] = []
        for item in batch:
            if isinstance(item, BalanceTier):
                self.books.append(rows)
                rows = []
                self.books.balance(item.groups, item.reason, item.account)
            else:
                rows.append(item)
        self.books.append(rows)
        if batch:
            self._grown()

    # ---------------------------------------------------------------- purging

    def purged(self, scope: PurgeScope, removed: Mapping[bytes, int]) -> None:
        """Raises StorageError: then the purge is not through."""
        if not self.drain(DRAIN_SECONDS):
            raise StorageError("journal", "", Reason.IO_ERROR, "the journal is not written to")
        self.books.purged(scope, removed)

    # ---------------------------------------------------------------- reading and counting

    def count_at_start(self) -> None:
        """Hold what is there against what was booked when the last worker ended."""
        if self.books.journal is not None and not self._directory.read_only:
            self._begin(partial(self._count, None))
            self._begin(self.books.check)

    def read(self, order: ReadJournal) -> None:
        self._begin(partial(self._read, order))

    def count(self, order: CountFiles) -> None:
        self._begin(partial(self._count, order))

    def reckon(self, order: Reckon) -> None:
        self._begin(partial(self._reckon, order))

    def _begin(self, work: Callable[[], None]) -> None:
        def alone() -> None:
            with self._one_at_a_time:
                if not self._is_closed:
                    work()

        self._audits = [thread for thread in self._audits if thread.is_alive()]
        self._num_audits += 1
        self._audits.append(start_thread(f"audit-{self._num_audits}", alone, on_death=self._on_death))

    def _read(self, order: ReadJournal) -> None:
        journal = self.books.journal
        if journal is None:
            self._report([JournalRead(order.op, None, self.books.problem)])
            return
        self.drain(DRAIN_SECONDS)
        try:
            report = self._summed(order)
        except StorageError as error:
            self._report([JournalRead(order.op, None, str(error))])
        else:
            self._report([JournalRead(order.op, report)])

    def _summed(self, order: ReadJournal) -> EvictionReport:
        journal, scan = self.books.journal, Scan()
        assert journal is not None
        since = max(order.since, journal.begins() or order.until)  # of nothing that is kept nothing is told
        report = summarize(journal.rows(since, scan), since, order.until, by_prefix=order.by_prefix)
        lacks = dict.fromkeys(words for words in (*journal.losses, *scan.problems, journal.problem) if words)
        return msgspec.structs.replace(
            report, damaged=scan.damaged, not_written=dict(self.books.dropped), lacks=tuple(lacks)
        )

    def _count(self, order: CountFiles | None) -> None:
        told = time.monotonic()

        def progress(done: int, total: int) -> bool:
            nonlocal told
            if order is not None and time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                self._report([FilesCounted(order.op, done, total, finished=False)])
            return not self._is_closed

        if self.books.journal is None:
            if order is not None:
                self._report([FilesCounted(order.op, 0, 0, finished=True, problem=self.books.problem)])
            return
        try:
            purging = self._purging()
            found_by = "audit" if order is not None else "start"
            count = recount(
                self._directory, self.books, self._now(), found_by=found_by, purging=purging, progress=progress
            )
        except (StorageError, DataDirectoryError) as error:
            log.warning("the files could not be counted: %s", error)
            if order is not None:
                self._report([FilesCounted(order.op, 0, 0, finished=True, problem=str(error))])
            return
        if order is not None:
            total = len(count.groups)
            self._report(
                [
                    FilesCounted(
                        order.op,
                        total,
                        total,
                        finished=True,
                        groups=count.groups,
                        table=self._table(),
                        problem="; ".join(count.problems),
                    )
                ]
            )

    def _purging(self) -> frozenset[bytes]:
        scopes = [record.scope for record in read_records(self._directory)]
        groups = {one.group for scope in scopes for one in scope.groups}
        return frozenset(groups | {one.group for scope in scopes for one in scope.extents})

    def _reckon(self, order: Reckon) -> None:
        known, problem = True, ""
        try:
            self.books.tell(order.found)
            if order.resolve:
                known = self.books.resolve(order.resolve, order.resolution)
        except StorageError as error:
            problem = str(error)
        self._report([Reckoned(order.op, self._table(), known, problem)])

    def _table(self) -> list[Difference]:
        return list(self.books.table)
