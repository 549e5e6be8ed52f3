"""What is told about the tier once a second, and at once when it changes: writable or not, room, errors."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from tierkv.core.instructions import JournalHealth, Report, TierHealth
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, ForeignFile, StorageError
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import PAGE_BYTES, DataDirectory, Space
from tierkv.storage.extent_header import open_regular
from tierkv.storage.names import DIGESTS, DISK_INDEX, DISK_PURGES, JOURNAL, STARTS, TEMP, VERDICTS, ExtentName, Parts
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.system_calls import Failure, call
from tierkv.storage.temp_file import TempFile
from tierkv.storage.transfer import BlockFile, mapped_pages
from tierkv.storage.walk import Strays, find_groups
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.quiet_log import QuietLog
from tierkv.workers.roll import Roll
from tierkv.workers.tier_gate import Closed, TierGate, reserved_inodes

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
PRUNE_PERIODS = 60  # quarantine is bounded in age too, so somebody must look

GROWTH_BYTES = 128 * 1024
"""Room that is kept beside what is there, with an eighth of the index: it, and the files that describe a new group,
grow between two looks, and the tier must not be over its capacity meanwhile."""

_PAGES_OF_ROOT = 2  # FORMAT and LOCK
_PAGES_OF_GROUP = 2  # identity.json, and at most one model.json


class HealthWatch:
    """One thread that looks, probes where writing has failed, and reports."""

    def __init__(
        self,
        directory: DataDirectory,
        catalog: Catalog,
        quarantine: Quarantine,
        gate: TierGate,
        report: Callable[[Sequence[Report]], None],
        now: Callable[[], float],
        *,
        lock_fd: int = -1,
        period_seconds: float = PERIOD_SECONDS,
        on_death: OnDeath = end_process,
        roll: Roll | None = None,
        quiet: QuietLog | None = None,
        index_problem: Callable[[], str] = lambda: "",
        also: Callable[[], None] = lambda: None,
        journal: Callable[[], JournalHealth] = JournalHealth,
    ) -> None:
        """`lock_fd` is the lock that this node holds, to be found in the directory; -1 where nobody looks. `quiet` is
        told each period to say what it has counted; `also` is called after each look, and `journal` says how the
        journal is."""
        self._also = also
        self._journal = journal
        self._lock_fd = lock_fd
        self._post = (roll or Roll()).post("health")
        self._quiet = quiet
        self._index_problem = index_problem
        self._last: TierHealth | None = None
        self._directory = directory
        self._tier = "disk" if directory.is_shared else "NVMe"
        self._catalog = catalog
        self._quarantine = quarantine
        self._gate = gate
        self._report = report
        self._now = now
        self._period_seconds = period_seconds
        self._on_death = on_death
        self._space = Space(0, 0, 0, 0)
        self._bytes_of: dict[Parts, int] = {}
        self._telling = threading.Lock()
        self._seeing = threading.Lock()  # from a look at the gate until it is told
        self._was_closed: Closed | None = None
        self._periods = 0
        self._described_bytes = described_bytes(directory)
        self._probe_at: float | None = None
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Report now, and from now on every period."""
        self.look()
        self._thread = start_thread("health", self._run, on_death=self._on_death)

    @property
    def has_looked(self) -> bool:
        """Whether there is anything to `tell`."""
        return self._last is not None

    def index_committed(self) -> None:
        """The index may have grown: look before it has used up what is kept for that."""
        last = self._last
        if last is not None and self._catalog.file_bytes() - last.index_bytes > last.growth_bytes // 2:
            self.wake()

    def journal_grown(self) -> None:
        """The same for the journal."""
        last = self._last
        if last is not None and self._journal().num_bytes - last.journal.num_bytes > last.growth_bytes // 2:
            self.wake()

    def wake(self) -> None:
        """Something changed: look now."""
        self._wake.set()

    def close(self, timeout_seconds: float) -> bool:
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait(self._period_seconds)
            self._wake.clear()
            if not self._is_closed:
                self.look()

    def look(self) -> None:
        """One look, and one report."""
        with self._post.at("look"):
            self._last = self._look()
        self.tell()
        self._also()
        if self._quiet is not None:
            self._quiet.tell_counted()

    def tell(self) -> None:
        """Report what was seen last, with the gate as it is now: also while a look does not come back. From any
        thread; nothing before the first look."""
        with self._seeing:
            last, closed = self._last, self._gate.closed
            if last is None:
                return
            self._log(closed)
            health = msgspec.structs.replace(
                last,
                writable=closed is None,
                reason=None if closed is None else closed.reason,
                problem="" if closed is None else closed.problem,
                errors=self._gate.errors,
                last_error=self._gate.last_error,
                readable=not self._gate.is_read_stuck,
                read_problem=self._gate.read_problem,
                index_problem=self._index_problem(),
            )
            self._report([health])

    def before_health(self, send: Callable[[], None]) -> None:
        """Send that something failed. What is told of the tier after it was seen after it: or one that was seen before
        would say that all is well, and be taken for news."""
        with self._seeing:
            send()

    def _look(self) -> TierHealth:
        temp_bytes = self._folder_bytes((TEMP,))  # before the free space: what is written in between is then missing
        space = self._look_at_room()  # in both, and not counted twice
        self._look_at_faults()
        self._look_at_reading()
        self._prune()
        usage = self._quarantine.usage()
        index_bytes = self._catalog.file_bytes()
        writing_bytes = self._gate.writing_bytes
        journal = self._journal()
        indexes = self._index_bytes(index_bytes)
        beside = max(0, temp_bytes - writing_bytes) + self._own_bytes()
        growth = GROWTH_BYTES + indexes // 8
        return TierHealth(
            writable=True,
            overhead_bytes=indexes + usage.num_bytes + beside + self._described_bytes + growth,
            free_bytes=space.free_bytes + min(temp_bytes, writing_bytes),
            quarantined_files=usage.files,
            quarantined_bytes=usage.num_bytes,
            index_bytes=index_bytes,
            spare_inodes=_spare_inodes(space),
            direct_problem=self._directory.direct_problem,
            growth_bytes=growth,
            journal=journal,
        )

    def _index_bytes(self, num_bytes: int) -> int:
        """What indexes take of this tier: that of a disk directory lies in the node's own, as a guest."""
        if self._directory.is_shared:
            return 0
        return num_bytes + self._folder_bytes((DISK_INDEX,), may_lack=True)

    def _own_bytes(self) -> int:
        if self._directory.is_shared:
            return 0
        own = sum(self._folder_bytes((name,)) for name in (DIGESTS, JOURNAL, STARTS, VERDICTS))
        return own + self._folder_bytes((DISK_PURGES,), may_lack=True)

    def _look_at_room(self) -> Space:
        """What was seen last where it can't be looked at now."""
        try:
            self._space = self._directory.space()
        except StorageError as error:
            self._gate.count(Failure.of(error))
            return self._space
        self._gate.look(self._space)
        return self._space

    def _look_at_faults(self) -> None:
        if loss := self._loss():
            self._gate.close(Reason.DATA_DIR_GONE, loss)
            self._probe_at = None
        elif not self._gate.has_fault:
            self._probe_at = None
        elif self._gate.is_stuck:
            pass  # a probe would go the same way
        elif self._probe_at is None:  # told first, and probed at the next look
            self._probe_at = time.monotonic() + self._period_seconds / 2
        elif time.monotonic() >= self._probe_at:
            self._probe()

    def _loss(self) -> str:
        try:
            return self._directory.find_loss(self._lock_fd)
        except StorageError as error:  # it can't be said; what is open goes on until it fails itself
            self._gate.count(Failure.of(error))
            return ""

    def _look_at_reading(self) -> None:
        """Somebody could not read: can it be done now? Nobody else may ask for long."""
        name = self._gate.unreadable
        if name is None or self._gate.is_stuck:
            return
        failure = probe_reading(self._directory, name)
        if failure is None:
            self._gate.read_succeeded()
        else:
            self._gate.read_failed(failure, name)

    def _probe(self) -> None:
        failure = probe(self._directory)
        if failure is None:
            self._gate.probe_succeeded()
            self._probe_at = None
        else:
            self._gate.write_failed(failure, PAGE_BYTES)
            self._probe_at = time.monotonic() + self._period_seconds / 2

    def _prune(self) -> None:
        self._periods += 1
        if self._periods % PRUNE_PERIODS == 0:
            self._described_bytes = described_bytes(self._directory)
            try:
                self._quarantine.prune(self._now())
            except StorageError as error:
                self._gate.count(Failure.of(error))

    def _folder_bytes(self, parts: Parts, *, may_lack: bool = False) -> int:
        """What the files of a folder take; where it can't be looked at, what they took the last time, lest the tier be
        thought to have room that it has not."""
        try:
            with self._directory.folder(parts) as folder_fd:
                self._bytes_of[parts] = call("listdir", _sum_of_blocks, folder_fd)
        except StorageError as error:
            is_absent = error.reason == Reason.NOT_FOUND
            if is_absent:
                self._bytes_of[parts] = 0
            if not (is_absent and may_lack):
                self._gate.count(Failure.of(error))
        return self._bytes_of.get(parts, 0)

    def _log(self, closed: Closed | None) -> None:
        with self._telling:
            before, self._was_closed = self._was_closed, closed
        if closed is not None and (before is None or before.reason != closed.reason):
            log.warning("the %s tier is not written to: %s (%s)", self._tier, closed.problem, closed.reason)
        elif closed is None and before is not None:
            log.info("the %s tier is written to again", self._tier)


def _spare_inodes(space: Space) -> int | None:
    """Twice the reserve is kept: who evicts at that stays clear of where the gate closes."""
    if not space.total_inodes:
        return None
    return space.free_inodes - 2 * reserved_inodes(space.total_inodes)


def described_bytes(directory: DataDirectory) -> int:
    """What the small files take that say what the directory and each group is."""
    groups = sum(1 for _ in find_groups(directory, Strays()))
    return (_PAGES_OF_ROOT + _PAGES_OF_GROUP * groups) * PAGE_BYTES


def probe(directory: DataDirectory) -> Failure | None:
    """Write a page as an extent would be, and flush it: None when that works."""
    try:
        with TempFile(directory, direct=False) as temp:
            call("write", os.write, temp.fd, bytes(PAGE_BYTES))
            temp.flush()
    except StorageError as error:
        return Failure.of(error)
    return None


def probe_reading(directory: DataDirectory, name: ExtentName) -> Failure | None:
    """Read the first page of a file as an extent is read: None when that works, or it is not there any more."""
    try:
        with directory.folder(name.folder) as folder_fd, open_regular(folder_fd, name.file) as (fd, _):
            BlockFile(directory, fd, 0).read([mapped_pages(PAGE_BYTES)])
    except StorageError as error:
        return None if error.reason == Reason.NOT_FOUND else Failure.of(error)
    except (DamagedFile, ForeignFile):
        return None  # it could be read; what is in it is for whoever reads it next
    return None


def _sum_of_blocks(folder_fd: int) -> int:
    total = 0
    with os.scandir(folder_fd) as entries:
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # a temp file that was finished meanwhile
    return total
