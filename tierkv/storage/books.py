"""The books of a data directory: each file that comes or goes is written down before and after, so that what is booked
is what is there, also when the process is killed in between.

    begun -> the file is written, renamed or removed -> posting (it happened) or ended (it did not)

Which of the two it was is found by looking. Whoever opens the books looks after what was begun and has no end.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tierkv.core.instructions import Difference, JournalHealth, PurgeScope
from tierkv.core.journal import Account, Anonymizer, AnyRow, Begun, Ended, FileOf, Posting
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError, UnknownFormat
from tierkv.storage.boot import boot_id
from tierkv.storage.differences import Differences
from tierkv.storage.directory import DataDirectory
from tierkv.storage.journal import Journal
from tierkv.storage.names import ExtentName
from tierkv.storage.system_calls import Failure, call

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Watched:
    """What happens to the files of a group while they are counted."""

    group: bytes
    booked_bytes: int
    touched: dict[FileOf, int] = field(default_factory=dict)  # -> what was booked of it when the watch began
    sweeps: int = 0


class Books:
    """Journal and table of differences of one directory. Safe to use from several threads. `problem` says why there is
    no journal, if there is none: then nothing is written down, and nothing is compared. Close them."""

    def __init__(
        self,
        directory: DataDirectory,
        *,
        max_bytes: int,
        max_age_seconds: float,
        now: Callable[[], float],
        failed: Callable[[Failure], None] = lambda failure: None,
    ) -> None:
        self._directory = directory
        self._now = now
        self._failed = failed
        self._lock = threading.RLock()
        self._counting = threading.Lock()  # nobody writes in it: who counts must not wait for a disk
        self._watched: list[Watched] = []
        self._sweeps = 0
        self._is_sweeping = 0
        self.dropped: dict[str, int] = {}
        self.problem = ""
        self._journal: Journal | None = None
        self._differences = Differences(None)
        try:
            self._differences = Differences(directory)
            self._journal = Journal(
                directory, max_bytes=max_bytes, max_age_seconds=max_age_seconds, now=now(), boot=boot_id()
            )
        except (StorageError, UnknownFormat) as error:
            self.problem = f"the journal can't be used: {error}"
            log.warning("%s", self.problem)
        else:
            self._look_after_what_was_begun()

    # ---------------------------------------------------------------- rows

    @property
    def journal(self) -> Journal | None:
        return self._journal

    def append(self, rows: Sequence[AnyRow]) -> None:
        """What can't be written is counted by reason; it still counts in the balances."""
        if not rows:
            return
        if self._journal is None:
            self.count_dropped(Reason.IO_ERROR, len(rows))
            return
        with self._lock:
            for row in rows:
                self._note(row)
            try:
                self._journal.append(rows)
            except StorageError as error:
                self._could_not(error, len(rows))

    @property
    def is_closed(self) -> bool:
        """Whether the last who had these books stopped in order, and nothing was written since."""
        return self._journal is not None and self._journal.balances.is_closed

    def flush(self) -> None:
        if self._journal is not None:
            self._look(self._journal)
            try:
                self._journal.flush()
            except StorageError as error:
                self._failed(Failure.of(error))

    def _look(self, journal: Journal) -> None:
        told, problem = journal.losses, journal.problem
        try:
            lost = journal.look(self._now())
        except StorageError as error:
            self._failed(Failure.of(error))
            return
        if lost:
            self.count_dropped(Reason.NOT_FOUND, lost)
        for words in journal.losses:
            if words not in told:
                log.warning("%s; rows that went with it: %d; another segment is begun", words, lost)
        if journal.problem and journal.problem != problem:
            log.warning("%s", journal.problem)

    def check(self) -> None:
        """Read the whole journal, and warn of what it lacks."""
        if self._journal is not None:
            try:
                self._journal.check()
            except StorageError as error:
                self._failed(Failure.of(error))
            for words in self._journal.losses:
                log.warning("%s; sums of evictions are too low by what was there", words)

    def keep_bounds(self) -> None:
        if self._journal is not None:
            try:
                self._journal.keep_bounds(self._now())
            except StorageError as error:
                self._failed(Failure.of(error))

    def count_dropped(self, reason: Reason, rows: int) -> None:
        with self._counting:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def _could_not(self, error: StorageError, rows: int) -> None:
        self._failed(Failure.of(error))
        self.count_dropped(Reason(error.reason), rows)

    def close(self, *, in_order: bool = False) -> None:
        """`in_order`: nothing is begun any more, and that is written down."""
        if self._journal is not None:
            self._journal.close(self._now(), in_order=in_order)

    def health(self) -> JournalHealth:
        """Waits for nothing, whatever the journal's disk does."""
        journal = self._journal
        return JournalHealth(
            num_bytes=0 if journal is None else journal.num_bytes,
            dropped=dict(self.dropped),
            damaged=0 if journal is None else journal.damaged,
            torn_bytes=0 if journal is None else journal.torn_bytes,
            problem=self.problem or ("" if journal is None else journal.problem),
            lacks=() if journal is None else journal.losses,
            differences=self._differences.num_open,
        )

    # ---------------------------------------------------------------- files

    @contextmanager
    def writing(self, name: ExtentName) -> Iterator[None]:
        """A file is written under its name in here, or it is not."""
        begun = self._begin(name, Account.NVME, "")
        try:
            yield
        finally:
            self._settle(begun)

    @contextmanager
    def removing(self, name: ExtentName, target: str, reason: str) -> Iterator[None]:
        """A file goes in here, to an account; or it does not."""
        begun = self._begin(name, target, reason)
        try:
            yield
        finally:
            self._settle(begun)

    def _begin(self, name: ExtentName, target: str, reason: str) -> Begun | None:
        if self._journal is None:
            return None
        now, file = self._now(), FileOf(name.fingerprint, name.group, name.rank, name.key)
        try:
            num_bytes = self._size_of(file)
        except StorageError as error:
            self._failed(Failure.of(error))
            num_bytes = None
        if target != Account.NVME:
            if num_bytes is None:
                return None  # it is gone already: what is booked of it is for a recount
            begun = Begun(now, file, num_bytes, target, reason)
            self.append([begun])
            return begun
        begun = Begun(now, file, 0, target, reason)
        if num_bytes is None:
            self.append([begun])
        else:  # what a dead worker left there is replaced
            self.append([Posting(now, name.group, Account.NVME, Account.DROPPED, num_bytes, "stale", file), begun])
        return begun

    def _settle(self, begun: Begun | None) -> None:
        if begun is None:
            return
        try:
            num_bytes = self._size_of(begun.file)
        except StorageError as error:
            self._failed(Failure.of(error))
            return  # it stays begun, for the next start to look at
        self.append([_outcome(begun, num_bytes, self._now())])

    def _size_of(self, file: FileOf) -> int | None:
        """None where there is none. Raises StorageError when that can't be said."""
        name = ExtentName(file.fingerprint, file.group, file.rank, file.key)
        try:
            with self._directory.folder(name.folder) as folder_fd:
                found = call("stat", os.stat, name.file, dir_fd=folder_fd, follow_symlinks=False)
        except StorageError as error:
            if error.errno_name != "ENOENT":
                raise
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def _look_after_what_was_begun(self) -> None:
        assert self._journal is not None
        if self._directory.read_only:
            return
        for begun in list(self._journal.balances.begun.values()):
            if begun.file.key:
                self._settle(begun)
            else:  # a purge has taken its name, and the file
                self.append([Ended(self._now(), begun.file)])

    # ---------------------------------------------------------------- correcting

    def correct(self, group: bytes, num_bytes: int, account: str = Account.NVME, reason: str = "") -> None:
        """Book what a recount found beyond what was booked, or missing."""
        source, target = (Account.FOUND, account) if num_bytes > 0 else (account, Account.FOUND)
        self.append([Posting(self._now(), group, source, target, abs(num_bytes), reason)])

    def balance(self, groups: Sequence[tuple[bytes, int]], reason: str, account: str = Account.HOST) -> None:
        """This account, a tier or quarantine, holds this and nothing else. What is gone with an earlier front was
        dropped; on disk another node may have done that, in quarantine whoever has looked at a file."""
        if self._journal is None:
            return
        now, there = self._now(), dict(groups)
        booked = self._journal.balances.of_account(account)
        rows = []
        for group in sorted({*there, *booked}):
            change = there.get(group, 0) - booked.get(group, 0)
            if change > 0:
                rows.append(Posting(now, group, Account.FOUND, account, change, reason))
            elif change < 0:
                rows.append(Posting(now, group, account, Account.DROPPED, -change, reason))
        self.append(rows)

    def left_quarantine(self, group: bytes, num_bytes: int, target: str, reason: str) -> None:
        self.append([Posting(self._now(), group, Account.QUARANTINE, target, num_bytes, reason)])

    # ---------------------------------------------------------------- counting

    def watch(self, group: bytes) -> Watched:
        """From here on it is noted which files of the group come and go. End it with `unwatch`."""
        assert self._journal is not None
        with self._lock:
            balances = self._journal.balances
            watched = Watched(group, balances.of(Account.NVME, group))
            for file, begun in balances.begun.items():
                if file.group == group:
                    watched.touched[file] = begun.num_bytes if begun.target != Account.NVME else 0
            watched.sweeps = self._sweeps
            self._watched.append(watched)
            return watched

    def unwatch(self, watched: Watched) -> bool:
        """Whether what was noted is all: no purge has removed files in between, which are not written down one by
        one."""
        with self._lock:
            self._watched.remove(watched)
            return watched.sweeps == self._sweeps and not self._is_sweeping

    def _note(self, row: AnyRow) -> None:
        for watched in self._watched:
            if isinstance(row, Begun) and row.file.group == watched.group:
                watched.touched.setdefault(row.file, row.num_bytes if row.target != Account.NVME else 0)
            elif isinstance(row, Posting) and row.file is not None and row.group == watched.group:
                watched.touched.setdefault(row.file, row.num_bytes if row.source == Account.NVME else 0)

    def booked_groups(self) -> list[bytes]:
        assert self._journal is not None
        return sorted(self._journal.balances.of_account(Account.NVME))

    @property
    def excuse(self) -> str:
        """Why a recount may find something else than what is booked; empty where there is no reason for that."""
        return "" if self._journal is None else self._journal.balances.excuse

    def counted(self) -> None:
        """All groups were, and corrected."""
        if self._journal is not None:
            try:
                self._journal.counted(self._now())
            except StorageError as error:
                self._failed(Failure.of(error))

    # ---------------------------------------------------------------- the table

    @property
    def table(self) -> tuple[Difference, ...]:
        return self._differences.rows

    def tell(self, found: Sequence[Difference]) -> None:
        """Put them into the table."""
        with self._lock:
            try:
                self._differences.add(found)
            except StorageError as error:
                self._failed(Failure.of(error))

    def resolve(self, number: int, resolution: str) -> bool:
        """Raises StorageError when it could not be written."""
        with self._lock:
            return self._differences.resolve(number, resolution, self._now())

    # ---------------------------------------------------------------- purging

    @contextmanager
    def sweeping(self) -> Iterator[None]:
        """A purge removes files in here, and tells of them at the end."""
        with self._lock:
            self._sweeps += 1
            self._is_sweeping += 1
        try:
            yield
        finally:
            with self._lock:
                self._is_sweeping -= 1

    def purged(self, scope: PurgeScope, removed: Mapping[bytes, int]) -> None:
        """Book the files that a sweep has removed, by group, and have the journal forget whose all that was. Raises
        StorageError: then the purge is not through."""
        if self._journal is None:
            if self.problem and not self._directory.read_only:
                raise StorageError("journal", "", Reason.IO_ERROR, self.problem)
            return
        now = self._now()
        rows = [
            Posting(now, group, Account.NVME, Account.PURGED, num_bytes, Reason.PURGED)
            for group, num_bytes in removed.items()
            if num_bytes
        ]
        self.append(rows)
        extents = {one.group for one in scope.extents}
        groups = {one.group for one in scope.groups} | (set(removed) - extents)
        self._journal.rewrite(Anonymizer(groups, extents, scope.models), now)
        with self._lock:
            self._differences.forget_groups(groups, extents)


def _outcome(begun: Begun, num_bytes: int | None, now: float) -> AnyRow:
    group = begun.file.group
    if begun.target == Account.NVME:
        if num_bytes is None:
            return Ended(now, begun.file)
        return Posting(now, group, Account.COPIED, Account.NVME, num_bytes, begun.reason, begun.file)
    if num_bytes is None:
        return Posting(now, group, Account.NVME, begun.target, begun.num_bytes, begun.reason, begun.file)
    return Ended(now, begun.file)
