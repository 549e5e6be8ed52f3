"""What other nodes have put into a directory that is shared, replaced or removed there, found by looking.

Once in a while the rows of the index are held against the folders, one folder at a time, behind everything else that
the queue has to do:

    a file without a row               its header is read, and its row told
    a row without a file               looked at once more in its extent's turn, and told as lost
    a file of another size or inode    replaced: its header is read; with other blocks it is told as lost, then anew
    a file with another time           used by another node: the row gets the time

What can't be read says nothing: neither that a file is lost nor that it is there. So does an index that can't be read,
for then nobody knows what is new. A file that this worker is writing is not news; the folder is listed before it is
asked what is being written, and that before the index is read, so that none is taken for another node's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from tierkv.core.instructions import DamageFound, ExtentRow, FileLost, GroupFound, PurgeScope, Report, Rows
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.catalog import Catalog, Change, DropRow, IndexFailed, PutRow, Restamp, TouchedRow
from tierkv.storage.directory import DataDirectory
from tierkv.storage.header_reader import HeaderJob, Outcome, Unusable, read_headers
from tierkv.storage.index_row import IndexedFile, Namespace
from tierkv.storage.names import ExtentName
from tierkv.storage.namespace import IdentityFile, read_identity
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.sweep import covers, hidden_heads
from tierkv.storage.system_calls import Failure, call
from tierkv.storage.walk import Strays, find_groups, find_namespaces, find_shelves, key_of, list_extents
from tierkv.workers.index_writer import IndexWriter
from tierkv.workers.key_queue import KeyQueue, Operation, Urgency
from tierkv.workers.operations import Operations
from tierkv.workers.tier_gate import TierGate

log = logging.getLogger(__name__)

FILES_OF_A_STEP = 64
INDEX_SECONDS = 5.0

_KEY = "rescanner"

Shelf = tuple[Namespace, str]


@dataclass(slots=True)
class _Round:
    """Where a round is: folders that are still to be looked into, and news of the one that it has looked into last."""

    shelves: Iterator[Shelf]
    strays: Strays = field(default_factory=Strays)
    news: list[tuple[Namespace, bytes, IndexedFile | None]] = field(default_factory=list)


class Rescanner:
    """`poke` it now and then, from one thread; a round begins when one is due, and goes on in the queue's threads."""

    def __init__(
        self,
        directory: DataDirectory,
        catalog: Catalog,
        index: IndexWriter,
        quarantine: Quarantine,
        operations: Operations,
        queue: KeyQueue,
        gate: TierGate,
        report: Callable[[Sequence[Report]], None],
        now: Callable[[], float],
        *,
        seconds: float,
        purging: Callable[[], list[PurgeScope]] = lambda: [],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`purging` is what is to go, and is not told of; it may raise StorageError and DataDirectoryError."""
        self._directory = directory
        self._catalog = catalog
        self._index = index
        self._quarantine = quarantine
        self._operations = operations
        self._queue = queue
        self._gate = gate
        self._report = report
        self._now = now
        self._seconds = seconds
        self._purging = purging
        self._telling = threading.Lock()
        self._clock = clock
        self._due = clock() + seconds
        self._looking: set[ExtentName] = set()
        self._stuck: set[ExtentName] = set()  # damaged, told, and not to be moved
        self._is_running = False
        self._is_ended = False
        self.rounds = 0

    def hurry(self) -> None:
        """A round is due now."""
        self._due = self._clock()

    def poke(self) -> None:
        if self._is_running or self._is_ended or self._clock() < self._due:
            return
        self._due = self._clock() + self._seconds
        try:
            if self._directory.find_loss():
                return  # nothing that is found or missing now says anything about what was stored
        except StorageError:
            return
        self._is_running = True
        strays = Strays()
        self._go_on(_Round(self._find_shelves(strays), strays))

    def alone(self) -> AbstractContextManager[object]:
        """While it lasts, no file is told of: what a sweep removes meanwhile is not told after it."""
        return self._telling

    def end(self) -> None:
        """The round that is going on stops at its next folder."""
        self._is_ended = True

    # ---------------------------------------------------------------- a round

    def _find_shelves(self, strays: Strays) -> Iterator[Shelf]:
        """Those that are there, and those that the index has files in."""
        told: set[Namespace] = set()
        for group in find_groups(self._directory, strays):
            for namespace in find_namespaces(self._directory, group, strays):
                told.add(namespace)
                unreadable = strays.unreadable
                shelves = set(find_shelves(self._directory, namespace, strays))
                if strays.unreadable > unreadable:
                    continue
                yield from ((namespace, shelf) for shelf in sorted(shelves | self._indexed_shelves(namespace)))
        indexed = self._catalog.namespaces()
        if isinstance(indexed, IndexFailed) or strays.unreadable:
            return
        for namespace in indexed:
            if namespace not in told:
                yield from ((namespace, shelf) for shelf in sorted(self._indexed_shelves(namespace)))

    def _indexed_shelves(self, namespace: Namespace) -> set[str]:
        found = self._catalog.next_bytes(namespace.pack())
        return set() if isinstance(found, IndexFailed) else {f"{number:02x}" for number in found}

    def _go_on(self, scan: _Round) -> None:
        """The next step, when the queue comes to it. Without room there the round ends: the next one begins anew."""
        operation = Operation(_KEY, Urgency.SCRUB, partial(self._step, scan))
        if self._is_ended or not self._queue.submit(operation, timeout_seconds=0.0):
            self._is_running = False

    def _step(self, scan: _Round) -> None:
        try:
            goes_on = self._take_news(scan) if scan.news else self._look_into_next(scan)
        except Exception:  # a bug met by one folder must not end the queue's thread, and all others' operations with it
            log.exception("the folders could not be held against the index")
            goes_on = False
        if goes_on:
            self._go_on(scan)
            return
        for problem in scan.strays.problems:
            log.warning("skipped while looking for files of other nodes: %s", problem)
        self.rounds += 1
        self._is_running = False

    def _look_into_next(self, scan: _Round) -> bool:
        found = next(scan.shelves, None)
        if found is None:
            return False
        namespace, shelf = found
        try:
            there = self._list(namespace, shelf)
        except StorageError as error:
            scan.strays.note(error, (*namespace.parts, shelf))
            return True
        ours = {name for key in there if self._operations.is_arriving(name := namespace.extent(key))}
        ours |= frozenset(self._looking)  # before the index, which has no row of a file whose look is over
        if not self._index.drain(INDEX_SECONDS):
            return True
        rows = self._catalog.read(namespace.pack() + bytes.fromhex(shelf))
        if isinstance(rows, IndexFailed):
            return True
        self._compare(scan, namespace, there, rows, ours)
        return True

    def _list(self, namespace: Namespace, shelf: str) -> dict[bytes, os.stat_result]:
        """Nothing where there is no such folder. Raises StorageError for one that can't be read whole."""
        found: dict[bytes, os.stat_result] = {}
        try:
            with self._directory.folder((*namespace.parts, shelf)) as folder_fd:
                for entry in list_extents(folder_fd, shelf, Strays()):
                    try:
                        found[key_of(entry)] = call("stat", entry.stat, follow_symlinks=False)
                    except StorageError as error:
                        if error.errno_name != "ENOENT":
                            raise
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
        return found

    def _compare(
        self,
        scan: _Round,
        namespace: Namespace,
        there: dict[bytes, os.stat_result],
        rows: dict[bytes, IndexedFile | None],
        ours: set[ExtentName],
    ) -> None:
        """`ours` are being written, or looked at already."""
        prefix = namespace.pack()
        changes: list[Change] = []
        for key, status in there.items():
            row_name = prefix + key
            indexed = rows.pop(row_name, None)
            name = namespace.extent(key)
            if name in ours:
                continue
            if indexed is None or (indexed.inode, indexed.row.file_bytes) != (status.st_ino, status.st_size):
                scan.news.append((namespace, key, indexed))
            elif indexed.changed_ns != status.st_ctime_ns:
                used = max(indexed.row.last_used, min(status.st_mtime, self._now()))
                restamp = Restamp(indexed.changed_ns, status.st_ctime_ns)
                changes.append(TouchedRow(row_name, used, indexed.row.hits, restamp))
        self._index.add(*changes)
        for row_name in rows:
            name = namespace.extent(row_name[len(prefix) :])
            if name not in ours:
                self._look_for(name)

    def _look_for(self, name: ExtentName) -> None:
        self._looking.add(name)
        if not self._queue.submit(Operation(name, Urgency.SCRUB, partial(self._look, name)), timeout_seconds=0.0):
            self._looking.discard(name)

    def _look(self, name: ExtentName) -> None:
        try:
            self._operations.look_for(name)
        finally:
            self._looking.discard(name)

    # ---------------------------------------------------------------- what is new

    def _take_news(self, scan: _Round) -> bool:
        """Some of them: those of one folder are of one namespace."""
        namespace = scan.news[0][0]
        before = {key: indexed for _, key, indexed in scan.news[:FILES_OF_A_STEP]}
        del scan.news[:FILES_OF_A_STEP]
        with self._telling:
            try:
                words = read_identity(self._directory, namespace.fingerprint, namespace.group)
                hidden = self._purging()
            except (StorageError, DataDirectoryError) as error:
                scan.strays.skip(f"{'/'.join(namespace.parts)}: {error}")
                return True
            if words is None or any(covers(scope, namespace.fingerprint, namespace.group) for scope in hidden):
                return True  # nobody says whose they are: left alone; or they are to go
            heads = {head for scope in hidden for head in hidden_heads(scope, namespace.group)}
            self._tell(namespace, words, {key: known for key, known in before.items() if key not in heads})
        return True

    def _tell(self, namespace: Namespace, words: IdentityFile, before: dict[bytes, IndexedFile | None]) -> None:
        reports: list[Report] = []
        rows: list[ExtentRow] = []
        packed = b"".join(before)
        job = HeaderJob(namespace.fingerprint, namespace.group, namespace.rank, packed, self._now())
        for key, finding in zip(before, read_headers(self._directory, job), strict=True):
            name, known = namespace.extent(key), before[key]
            if self._operations.is_arriving(name):
                continue
            if isinstance(finding, Unusable):
                reports += self._refuse(name, finding, was_known=known is not None)
                continue
            row = finding.file.row
            self._index.add(PutRow(namespace.row_name(key), finding.file))
            if known is None or known.row.keys != row.keys:
                reports += [] if known is None else [FileLost(name.group, name.rank, key)]
                rows.append(row)
        if rows:
            reports.append(GroupFound(namespace.group, words.identity, words.model_name))
            reports.append(Rows(namespace.fingerprint, namespace.group, namespace.rank, rows))
        if reports:
            self._report(reports)

    def _refuse(self, name: ExtentName, finding: Unusable, *, was_known: bool) -> list[Report]:
        """A damaged file is set aside; what can't be read now is left for the next round."""
        if finding.outcome is Outcome.UNREADABLE:
            log.warning("%s is not read: %s", name, finding.problem)
            return []
        reports: list[Report] = [FileLost(name.group, name.rank, name.key)] if was_known else []
        if finding.outcome is Outcome.DAMAGED and name not in self._stuck:
            log.warning("%s is damaged (%s): %s", name, finding.reason, finding.problem)
            reports.append(DamageFound(finding.reason))
        if finding.outcome is Outcome.DAMAGED:
            self._set_aside(name, finding.reason)
        self._index.add(DropRow(Namespace.of(name).row_name(name.key)))
        return reports

    def _set_aside(self, name: ExtentName, reason: Reason) -> None:
        """One that has to stay where it is, is found again in each round, and told once."""
        try:
            self._quarantine.set_aside(name, reason, self._now())
        except StorageError as error:
            if name not in self._stuck:
                self._gate.count(Failure.of(error))
            self._stuck.add(name)
        else:
            self._stuck.discard(name)
