"""Whether extents may be written, and why not.

Each of these closes the gate by itself, and each opens it again by itself:

    fault    a write that failed; opens when a probe, a small file written and flushed, succeeds
    stuck    an operation on a file has not come back for long; opens when all have
    room     less free space (or inodes) than the reserve, what is being written counted as gone already;
             opens when a twentieth of the reserve is free on top of it
    sealed   the node was started to read only; never opens

Reads that fail close nothing: what can be read is read. They are told as a problem until one succeeds, and the file
that could not be read is tried again once in a while.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from tierkv.core.reasons import Reason
from tierkv.storage.directory import Space
from tierkv.storage.names import ExtentName
from tierkv.storage.system_calls import Failure

_TOLD_AS_THEY_ARE = (Reason.DISK_FULL, Reason.NO_INODES, Reason.READ_ONLY, Reason.TOO_MANY_FILES, Reason.NO_ACCESS)


@dataclass(frozen=True, slots=True)
class Closed:
    reason: Reason
    problem: str


class TierGate:
    """Safe to use from several threads. Does no I/O: it is told what the file system says."""

    def __init__(self, reserve_bytes: int, *, read_only: bool = False) -> None:
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._wanted_bytes = 0  # what must be free before the gate opens for want of room
        self._is_short_of_inodes = False
        self._room: Closed | None = None
        self._fault: Closed | None = None
        self._stuck: Closed | None = None
        self._is_read_stuck = False
        self._sealed = Closed(Reason.READ_ONLY, "started with read_only: files are read, none is written")
        self._read_only = read_only
        self._errors: Counter[str] = Counter()
        self._last_error = ""
        self._read_problem = ""
        self._unreadable: ExtentName | None = None
        self._writing_bytes = 0

    @property
    def closed(self) -> Closed | None:
        """Why nothing may be written; None while it may. A fault says more than a lack of room."""
        with self._lock:
            return self._closed()

    def _closed(self) -> Closed | None:
        if self._read_only:
            return self._sealed
        return self._stuck or self._fault or self._room

    @property
    def has_fault(self) -> bool:
        with self._lock:
            return self._fault is not None

    @property
    def is_stuck(self) -> bool:
        with self._lock:
            return self._stuck is not None

    @property
    def is_read_stuck(self) -> bool:
        with self._lock:
            return self._is_read_stuck

    @property
    def writing_bytes(self) -> int:
        with self._lock:
            return self._writing_bytes

    @property
    def errors(self) -> dict[str, int]:
        """Failures since start by "operation errno-name"."""
        with self._lock:
            return dict(self._errors)

    @property
    def last_error(self) -> str:
        """The failure that was counted last: "operation errno-name: problem". Empty before any."""
        with self._lock:
            return self._last_error

    @property
    def read_problem(self) -> str:
        """Why files can't be read, as far as is known; empty when the last read went well."""
        with self._lock:
            return self._read_problem

    @property
    def unreadable(self) -> ExtentName | None:
        """The file whose reading failed last, until one succeeds."""
        with self._lock:
            return self._unreadable

    def admit(self, num_bytes: int, space: Space) -> Closed | None:
        """Whether a file of `num_bytes` may be written now: None, and it counts until `finish`; or why not."""
        with self._lock:
            if self._read_only or self._stuck or self._fault:
                return self._closed()
            self._look(space, num_bytes)
            if self._room is None:
                self._writing_bytes += num_bytes
            return self._room

    def finish(self, num_bytes: int) -> None:
        with self._lock:
            self._writing_bytes -= num_bytes

    def look(self, space: Space) -> None:
        """What the file system says by now."""
        with self._lock:
            self._look(space, 0)

    def count(self, failure: Failure) -> None:
        """A failure that says nothing about whether writing works."""
        with self._lock:
            self._count(failure)

    def read_failed(self, failure: Failure, name: ExtentName) -> None:
        """Reading a file failed for a cause that is not the file's own."""
        with self._lock:
            self._count(failure)
            self._read_problem = f"{failure.operation} failed with {failure.errno_name}: {failure.problem}"
            self._unreadable = name

    def read_succeeded(self) -> None:
        if self._read_problem:  # looked at without the lock: one more failure at the same time is told by its next
            with self._lock:
                self._read_problem, self._unreadable = "", None

    def write_failed(self, failure: Failure, num_bytes: int) -> None:
        """A write of `num_bytes` failed. After a full disk a probe proves little: that much must be free as well."""
        with self._lock:
            self._count(failure)
            reason = failure.reason if failure.reason in _TOLD_AS_THEY_ARE else Reason.IO_ERROR
            if reason == Reason.DISK_FULL and self._is_short_of_inodes:
                reason = Reason.NO_INODES  # the system has one errno for both
            problem = f"{failure.operation} failed with {failure.errno_name}: {failure.problem}"
            self._fault = Closed(reason, problem)
            if reason == Reason.DISK_FULL:
                self._want_room(num_bytes, problem)

    def close(self, reason: Reason, problem: str) -> None:
        """A fault that was found otherwise than by a write."""
        with self._lock:
            self._fault = Closed(reason, problem)

    def probe_succeeded(self) -> None:
        with self._lock:
            self._fault = None

    def note_stuck(self, problem: str, *, reading: bool) -> bool:
        """What has not come back for long; empty when nothing is. `reading`: a read is among it. True when that has
        changed."""
        with self._lock:
            before = (self._stuck is not None, self._is_read_stuck)
            self._stuck = Closed(Reason.IO_STUCK, problem) if problem else None
            self._is_read_stuck = reading
            return before != (bool(problem), reading)

    def _count(self, failure: Failure) -> None:
        self._errors[f"{failure.operation} {failure.errno_name}"] += 1
        self._last_error = f"{failure.operation} {failure.errno_name}: {failure.problem}"

    def _look(self, space: Space, num_bytes: int) -> None:
        """The file to come must fit as well; one that does not sets how much must be free before the gate opens."""
        free = space.free_bytes - self._writing_bytes
        inodes_wanted = reserved_inodes(space.total_inodes)
        self._is_short_of_inodes = space.free_inodes < inodes_wanted
        if self._is_short_of_inodes:
            self._room = Closed(Reason.NO_INODES, f"{space.free_inodes} inodes are free, {inodes_wanted} are kept")
        elif free < self._reserve_bytes + num_bytes:
            self._want_room(num_bytes, f"{max(0, free)} bytes are free, {self._reserve_bytes} of them are the reserve")
        elif self._room is not None and free >= self._wanted_bytes:
            self._room = None

    def _want_room(self, num_bytes: int, problem: str) -> None:
        self._wanted_bytes = self._reserve_bytes + num_bytes + self._reserve_bytes // 20
        self._room = Closed(Reason.DISK_FULL, problem)


def reserved_inodes(total_inodes: int) -> int:
    """One in a hundred, at least 8 (folders, a temp file), at most a thousand; none where the file system counts none
    (it says 0 of 0)."""
    return min(1_000, max(8, total_inodes // 100)) if total_inodes else 0
