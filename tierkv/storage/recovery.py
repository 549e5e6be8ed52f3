"""The start: what is on disk, told to the core as rows, with as few headers read as the index allows.

    clear tmp/ -> tell the pins -> remove what is recorded as being purged
    -> for each group whose identity.json is right: for each folder of its extents:
        a row whose stamp is the file's                 sent as it is
        a file without one                              its header is read, by several processes where there are many
        a row without a file                            dropped
    -> damaged files to quarantine -> folders flushed -> the index put right

The lock is held. Times in the future are taken for now. When an extent was used last is known from its row even where
the file was touched or copied since; a file without one is as old as its mtime says. What is not ours is left and
counted; an entry that can't be read is skipped and counted, its row kept; a file that vanishes meanwhile is no error.
Payload is not verified here.

A writer that was killed may have renamed files and not flushed their folders. What is told here counts as flushed, so
all folders are flushed first, by several threads: one after the other each would wait for the disk.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tierkv.core.instructions import (
    ExtentRow,
    GroupFound,
    PinFound,
    PurgeResumed,
    PurgeScope,
    Recovered,
    RecoveryProgress,
    Report,
    Rows,
    Swept,
)
from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.catalog import Catalog, Change, DropRow, IndexFailed, PutRow
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import ALIGN_BYTES, MAX_BLOCKS, MAX_HEADER_BYTES, MAX_POSITION, stored_bytes
from tierkv.storage.header_pool import FILES_OF_A_JOB, HeaderPool
from tierkv.storage.header_reader import Finding, HeaderJob, Outcome, Unusable, Usable
from tierkv.storage.index_row import IndexedFile, Namespace
from tierkv.storage.names import PURGES, Parts
from tierkv.storage.namespace import read_identity
from tierkv.storage.pin_record import read_pins
from tierkv.storage.purge_record import PurgeRecords
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.sweep import covers, hidden_heads, sweep
from tierkv.storage.system_calls import call
from tierkv.storage.walk import (
    GroupFolder,
    Strays,
    count_foreign_in_root,
    find_groups,
    find_namespaces,
    find_shelves,
    key_of,
    list_extents,
)

log = logging.getLogger(__name__)

ROWS_OF_A_REPORT = 2_000
KEY_BYTES_OF_A_REPORT = 2**20  # what bounds a report of long extents
CHANGES_OF_A_COMMIT = 5_000
PROGRESS_SECONDS = 0.25
FLUSH_THREADS = 8
MAX_HITS = 2**48

Emit = Callable[[Report], None]


@dataclass(slots=True)
class _Batch:
    """Rows of one namespace that are still to be sent."""

    rows: list[ExtentRow] = field(default_factory=list)
    key_bytes: int = 0


def recover(
    directory: DataDirectory,
    catalog: Catalog,
    quarantine: Quarantine,
    *,
    emit: Emit,
    now: float,
    clock: Callable[[], float] = time.monotonic,
    purged: Callable[[PurgeScope, Mapping[bytes, int]], None] = lambda scope, removed: None,
    records: PurgeRecords | None = None,
) -> Recovered:
    """Walk the directory. `emit` gets GroupFound before a group's Rows, Rows in batches, and RecoveryProgress
    every quarter of a second; the result is for the caller to send when it is ready to serve. `now` is in seconds since
    1970. `purged` is told what was swept, and how many bytes of which group: it may raise StorageError, and then that
    purge is not through. `records` are those of purges under way; the directory's own where they are not given."""
    recovery = _Recovery(directory, catalog, quarantine, emit, now, clock, purged, records or PurgeRecords(directory))
    return recovery.run()


def clear_temp(directory: DataDirectory) -> Recovered:
    """The start of a worker whose front knows the extents already: only what a dead writer left is removed."""
    started = time.monotonic()
    counts = _Counts()
    _clear_temp(directory, counts, Strays())
    return counts.report(time.monotonic() - started, index_rebuilt=False)


@dataclass(slots=True)
class _Removed:
    by_group: Counter[bytes] = field(default_factory=Counter)

    def note(self, group: bytes, num_bytes: int) -> None:
        self.by_group[group] += num_bytes


@dataclass(slots=True)
class _Counts:
    extents: int = 0
    index_rows: int = 0
    headers_read: int = 0
    quarantined: int = 0
    foreign: int = 0
    unknown_format: int = 0
    unreadable: int = 0
    temp_removed: int = 0
    temp_bytes: int = 0
    hidden_bytes: int = 0
    unreadable_pins: int = 0

    def report(self, seconds: float, *, index_rebuilt: bool) -> Recovered:
        return Recovered(
            seconds=seconds,
            extents=self.extents,
            index_rows=self.index_rows,
            headers_read=self.headers_read,
            quarantined=self.quarantined,
            foreign=self.foreign,
            unknown_format=self.unknown_format,
            unreadable=self.unreadable,
            temp_removed=self.temp_removed,
            temp_bytes=self.temp_bytes,
            hidden_bytes=self.hidden_bytes,
            unreadable_pins=self.unreadable_pins,
            index_rebuilt=index_rebuilt,
        )


def _clear_temp(directory: DataDirectory, counts: _Counts, strays: Strays) -> None:
    try:
        cleared = directory.clear_temp()
    except StorageError as error:  # room that stays taken is no reason not to serve what is there
        strays.note(error, ("tmp",))
        return
    counts.temp_removed += cleared.files
    counts.temp_bytes += cleared.num_bytes
    counts.foreign += cleared.foreign


class _Recovery:
    def __init__(
        self,
        directory: DataDirectory,
        catalog: Catalog,
        quarantine: Quarantine,
        emit: Emit,
        now: float,
        clock: Callable[[], float],
        purged: Callable[[PurgeScope, Mapping[bytes, int]], None],
        records: PurgeRecords,
    ) -> None:
        self._purged = purged
        self._records = records
        self._directory = directory
        self._catalog = catalog
        self._quarantine = quarantine
        self._emit = emit
        self._now = now
        self._clock = clock
        self._counts = _Counts()
        self._strays = Strays()
        self._batches: dict[Namespace, _Batch] = {}
        self._changes: list[Change] = []
        self._seen: set[Namespace] = set()
        self._unflushed: dict[Parts, None] = {}
        self._uses: dict[bytes, ExtentRow] = {}  # of rows whose file was touched or copied since
        self._hidden: list[PurgeScope] = []  # is to go and could not be removed
        self._hides_all = False
        self._headers_wanted = 0
        self._expected = 0
        self._told = clock()

    def run(self) -> Recovered:
        started = self._clock()
        _clear_temp(self._directory, self._counts, self._strays)
        self._tell_pins()
        self._finish_purges()
        count_foreign_in_root(self._directory, self._strays)
        indexed = self._catalog.count()
        self._expected = indexed if isinstance(indexed, int) else 0
        with HeaderPool(self._directory) as pool:
            for folder in find_groups(self._directory, self._strays):
                self._walk_group(folder, pool)
            self._drop_vanished_namespaces()
            self._catalog.finish_opening()
            while not pool.is_idle:
                self._take_findings(pool, PROGRESS_SECONDS)
        self._flush_folders()
        for namespace in list(self._batches):
            self._send_rows(namespace)
        self._commit()
        self._log_strays()
        return self._counts.report(self._clock() - started, index_rebuilt=self._catalog.is_rebuilt)

    def _tell_pins(self) -> None:
        """Before any row: what is pinned is not to be evicted by this start."""
        if self._directory.is_shared:
            return  # pins are a node's own
        records, self._counts.unreadable_pins = read_pins(self._directory)
        for record in records:
            self._emit(PinFound(record))

    # ---------------------------------------------------------------- purges under way

    def _finish_purges(self) -> None:
        """Before anything is told: what was to go, goes. Where that fails it is hidden, and the sweep asked for again
        later. Where the records can't be read now, everything is: any of it may be what is to go. Raises
        DataDirectoryError when a record is damaged."""
        try:
            records = self._records.read()
        except StorageError as error:
            self._strays.skip(f"{PURGES}: {error}: so nothing is looked for, as it may be what a purge is to remove")
            self._hides_all = True
            return
        for record in records:
            swept, failure = Swept(), None
            removed = _Removed()
            try:
                swept = sweep(self._directory, self._catalog, self._quarantine, record.scope, removed=removed.note)
                self._purged(record.scope, removed.by_group)
                self._records.remove(record.purge)
            except StorageError as error:
                failure = error
                self._hidden.append(record.scope)
                log.warning("purge %s does not get on: %s", record.purge.hex(), error)
            else:
                log.info("purge %s was taken up again: %d files removed", record.purge.hex(), swept.files)
            self._emit(
                PurgeResumed(
                    purge=record.purge,
                    scope=record.scope,
                    about=record.about,
                    swept=swept,
                    reason=None if failure is None else Reason(failure.reason),
                    problem="" if failure is None else str(failure),
                )
            )

    def _is_hidden(self, group: GroupFolder) -> bool:
        return self._hides_all or any(covers(scope, group.fingerprint, group.group) for scope in self._hidden)

    def _measure_hidden(self, folder: GroupFolder) -> None:
        """What it holds takes room until it is gone."""
        aside = Strays()  # what else lies there is counted when the sweep has come by
        for namespace in find_namespaces(self._directory, folder, aside):
            for shelf in find_shelves(self._directory, namespace, aside):
                parts = (*namespace.parts, shelf)
                try:
                    with self._directory.folder(parts) as folder_fd:
                        for entry in list_extents(folder_fd, shelf, aside):
                            self._count_hidden(entry, parts)
                except StorageError as error:
                    self._strays.note(error, parts)

    def _count_hidden(self, entry: os.DirEntry[str], parts: tuple[str, ...]) -> None:
        status = self._status(entry, parts)
        self._counts.hidden_bytes += 0 if status is None else status.st_size

    # ---------------------------------------------------------------- the walk

    def _walk_group(self, folder: GroupFolder, pool: HeaderPool) -> None:
        if self._is_hidden(folder):
            self._measure_hidden(folder)
            return
        namespaces = find_namespaces(self._directory, folder, self._strays)
        self._seen.update(namespaces)
        try:
            words = read_identity(self._directory, folder.fingerprint, folder.group)
        except StorageError as error:
            self._strays.note(error, namespaces[0].parts if namespaces else (folder.fingerprint, folder.group.hex()))
            return
        if words is None:
            self._counts.foreign += 1
            log.warning("group %s: no identity.json that belongs to it, so it is left alone", folder.group.hex())
            return
        self._emit(GroupFound(folder.group, words.identity, words.model_name))
        for namespace in namespaces:
            self._walk_namespace(namespace, words.identity.layout.total_block_bytes, pool)

    def _walk_namespace(self, namespace: Namespace, block_bytes: int, pool: HeaderPool) -> None:
        prefix = namespace.pack()
        unreadable = self._strays.unreadable
        shelves = set(find_shelves(self._directory, namespace, self._strays))
        if self._strays.unreadable > unreadable:
            return  # the files may well be there: what the index knows of them is kept
        indexed = self._catalog.next_bytes(prefix)
        numbers = {int(shelf, 16) for shelf in shelves} | set(() if isinstance(indexed, IndexFailed) else indexed)
        for number in sorted(numbers):
            shelf = f"{number:02x}"
            rows = self._catalog.read(prefix + bytes([number]))
            known = {} if isinstance(rows, IndexFailed) else rows
            if shelf in shelves:
                self._walk_shelf(namespace, block_bytes, shelf, known, pool)
            else:
                self._drop(known)
            self._take_findings(pool, 0.0)

    def _walk_shelf(
        self,
        namespace: Namespace,
        block_bytes: int,
        shelf: str,
        known: dict[bytes, IndexedFile | None],
        pool: HeaderPool,
    ) -> None:
        is_sound = partial(_is_sound, group=namespace.group, block_bytes=block_bytes)
        parts = (*namespace.parts, shelf)
        prefix = namespace.pack()
        whole: list[ExtentRow] = []
        wanted: list[bytes] = []
        hidden = {head for scope in self._hidden for head in hidden_heads(scope, namespace.group)}
        try:
            with self._directory.folder(parts) as folder_fd:
                self._unflushed.update(dict.fromkeys(self._directory.unflushed(parts)))
                for entry in list_extents(folder_fd, shelf, self._strays):
                    key = key_of(entry)
                    indexed = known.pop(prefix + key, None)
                    if key in hidden:
                        self._count_hidden(entry, parts)
                        continue
                    if indexed is None:
                        wanted.append(key)
                    elif (status := self._status(entry, parts)) is None:
                        continue
                    elif indexed.describes(status) and is_sound(indexed.row, key):
                        whole.append(indexed.row)
                    else:
                        wanted.append(key)
                        if is_sound(indexed.row, key):
                            self._uses[prefix + key] = indexed.row
        except StorageError as error:
            self._strays.note(error, parts)
            if error.reason != Reason.NOT_FOUND:
                return  # the files may well be there: what the index knows of them is kept
        self._counts.index_rows += len(whole)
        self._add_rows(namespace, whole)
        self._drop(known)
        self._want_headers(namespace, wanted, pool)

    def _status(self, entry: os.DirEntry[str], parts: tuple[str, ...]) -> os.stat_result | None:
        """None for a file that is not there any more, or can't be looked at."""
        try:
            return call("stat", entry.stat, follow_symlinks=False)
        except StorageError as error:
            self._strays.note(error, (*parts, entry.name))
            return None

    def _drop_vanished_namespaces(self) -> None:
        """Rows of folders that are not there any more, unless a folder above them could not be read."""
        indexed = self._catalog.namespaces()
        if isinstance(indexed, IndexFailed) or self._strays.unreadable:
            return
        for namespace in indexed:
            if namespace not in self._seen:
                rows = self._catalog.read(namespace.pack())
                self._drop({} if isinstance(rows, IndexFailed) else rows)

    def _flush_folders(self) -> None:
        with ThreadPoolExecutor(FLUSH_THREADS, thread_name_prefix="tierkv-flush") as threads:
            for parts, error in threads.map(self._try_flush, list(self._unflushed)):
                if error is not None:
                    self._strays.note(error, parts)

    def _try_flush(self, parts: Parts) -> tuple[Parts, StorageError | None]:
        try:
            self._directory.flush(parts)
        except StorageError as error:
            return parts, error
        return parts, None

    # ---------------------------------------------------------------- headers

    def _want_headers(self, namespace: Namespace, keys: list[bytes], pool: HeaderPool) -> None:
        self._headers_wanted += len(keys)
        for start in range(0, len(keys), FILES_OF_A_JOB):
            packed = b"".join(keys[start : start + FILES_OF_A_JOB])
            pool.submit(HeaderJob(namespace.fingerprint, namespace.group, namespace.rank, packed, self._now))

    def _take_findings(self, pool: HeaderPool, wait_seconds: float) -> None:
        for job, findings in pool.collect(wait_seconds):
            self._take(job.namespace, findings)
        self._tell_progress()

    def _take(self, namespace: Namespace, findings: list[Finding]) -> None:
        prefix = namespace.pack()
        rows: list[ExtentRow] = []
        for finding in findings:
            match finding:
                case Usable(indexed):
                    indexed = self._with_uses(prefix + indexed.row.key, indexed)
                    self._changes.append(PutRow(prefix + indexed.row.key, indexed))
                    rows.append(indexed.row)
                case Unusable():
                    self._refuse(namespace, finding)
        self._counts.headers_read += len(findings)
        self._add_rows(namespace, rows)
        self._commit_in_batches()

    def _with_uses(self, name: bytes, indexed: IndexedFile) -> IndexedFile:
        """When it was last used, and how often, is what we counted: a file's times are anybody's to change."""
        known = self._uses.pop(name, None)
        if known is None:
            return indexed
        row = msgspec.structs.replace(indexed.row, last_used=max(known.last_used, indexed.row.created), hits=known.hits)
        return msgspec.structs.replace(indexed, row=row)

    def _refuse(self, namespace: Namespace, finding: Unusable) -> None:
        name = namespace.extent(finding.key)
        match finding.outcome:
            case Outcome.DAMAGED:
                self._set_aside(namespace, finding)
            case Outcome.UNKNOWN_FORMAT:
                self._counts.unknown_format += 1
                log.warning("%s is left alone: %s", name, finding.problem)
            case Outcome.FOREIGN:
                self._strays.foreign += 1
            case Outcome.UNREADABLE:
                self._strays.skip(f"{name}: {finding.problem}")
                return
            case Outcome.GONE:
                log.debug("%s vanished", name)
        self._changes.append(DropRow(namespace.row_name(finding.key)))

    def _set_aside(self, namespace: Namespace, finding: Unusable) -> None:
        name = namespace.extent(finding.key)
        log.warning("%s is damaged (%s): %s", name, finding.reason, finding.problem)
        try:
            self._counts.quarantined += self._quarantine.set_aside(name, finding.reason, self._now)
        except StorageError as error:
            self._strays.note(error, name.parts)

    # ---------------------------------------------------------------- what comes of it

    def _add_rows(self, namespace: Namespace, rows: list[ExtentRow]) -> None:
        self._counts.extents += len(rows)
        batch = self._batches.setdefault(namespace, _Batch())
        for row in rows:
            batch.rows.append(row if row.last_used <= self._now >= row.created else self._clamp(row))
            batch.key_bytes += len(row.keys)
            if len(batch.rows) >= ROWS_OF_A_REPORT or batch.key_bytes >= KEY_BYTES_OF_A_REPORT:
                self._send_rows(namespace)
                batch = self._batches.setdefault(namespace, _Batch())

    def _clamp(self, row: ExtentRow) -> ExtentRow:
        return msgspec.structs.replace(
            row, last_used=min(row.last_used, self._now), created=min(row.created, self._now)
        )

    def _send_rows(self, namespace: Namespace) -> None:
        batch = self._batches.pop(namespace)
        if batch.rows:
            self._emit(Rows(namespace.fingerprint, namespace.group, namespace.rank, batch.rows))

    def _drop(self, rows: Iterable[bytes]) -> None:
        self._changes += map(DropRow, rows)
        self._commit_in_batches()

    def _commit_in_batches(self) -> None:
        if len(self._changes) >= CHANGES_OF_A_COMMIT:
            self._commit()

    def _commit(self) -> None:
        if self._changes:
            answer = self._catalog.apply(self._changes)
            if isinstance(answer, IndexFailed):
                log.warning("the index could not be put right: %s", answer.problem)
            self._changes = []

    def _tell_progress(self) -> None:
        now = self._clock()
        if now - self._told < PROGRESS_SECONDS:
            return
        self._told = now
        counts = self._counts
        if counts.headers_read < self._headers_wanted:
            self._emit(RecoveryProgress("reading headers", counts.headers_read, self._headers_wanted))
        else:
            self._emit(RecoveryProgress("reading folders", counts.extents, max(counts.extents, self._expected)))

    def _log_strays(self) -> None:
        self._counts.foreign += self._strays.foreign
        self._counts.unreadable += self._strays.unreadable
        for problem in self._strays.problems:
            log.warning("skipped: %s", problem)
        if self._strays.unreadable > len(self._strays.problems):
            log.warning("skipped: %d more", self._strays.unreadable - len(self._strays.problems))


def _is_sound(row: ExtentRow, key: bytes, *, group: bytes, block_bytes: int) -> bool:
    """Whether a row can be what it says: an index may decode and still not be one that we wrote. What a reader of the
    file's header would refuse is not believed here either."""
    blocks, rest = divmod(len(row.keys), KEY_BYTES)
    most = MAX_HEADER_BYTES + blocks * stored_bytes(row.block_bytes)
    return (
        row.key == key
        and row.keys[:KEY_BYTES] == key
        and rest == 0
        and blocks <= MAX_BLOCKS
        and row.block_bytes == block_bytes
        and (1 + blocks) * ALIGN_BYTES <= row.file_bytes <= most
        and row.file_bytes % ALIGN_BYTES == 0
        and len(row.parent) == KEY_BYTES
        and 0 <= row.first_token < MAX_POSITION
        and (row.first_token == 0) == (row.parent == group)
        and 0 <= row.created < math.inf
        and 0 <= row.last_used < math.inf
        and 0 <= row.hits < MAX_HITS
    )
