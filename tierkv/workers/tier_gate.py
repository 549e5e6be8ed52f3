"""Whether extents may be written, and why not.

Two things close the gate, each by itself, and both open it again by themselves:

    room     less free space (or inodes) than the reserve, what is being written counted as gone already;
             opens when a twentieth of the reserve is free on top of it
    fault    a write that failed; opens when a probe, a small file written and flushed, succeeds
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from tierkv.core.reasons import Reason
from tierkv.storage.directory import Space
from tierkv.storage.system_calls import Failure


@dataclass(frozen=True, slots=True)
class Closed:
    reason: Reason
    problem: str


class TierGate:
    """Safe to use from several threads. Does no I/O: it is told what the file system says."""

    def __init__(self, reserve_bytes: int) -> None:
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._wanted_bytes = 0  # what must be free before the gate opens for want of room
        self._room: Closed | None = None
        self._fault: Closed | None = None
        self._errors: Counter[str] = Counter()
        self._writing_bytes = 0

    @property
    def closed(self) -> Closed | None:
        """Why nothing may be written; None while it may. A fault says more than a lack of room."""
        with self._lock:
            return self._fault or self._room

    @property
    def has_fault(self) -> bool:
        with self._lock:
            return self._fault is not None

    @property
    def writing_bytes(self) -> int:
        with self._lock:
            return self._writing_bytes

    @property
    def errors(self) -> dict[str, int]:
        """Failures since start by "operation errno-name"."""
        with self._lock:
            return dict(self._errors)

    def admit(self, num_bytes: int, space: Space) -> Closed | None:
        """Whether a file of `num_bytes` may be written now: None, and it counts until `finish`; or why not."""
        with self._lock:
            if self._fault is not None:
                return self._fault
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
            self._errors[f"{failure.operation} {failure.errno_name}"] += 1

    def write_failed(self, failure: Failure, num_bytes: int) -> None:
        """A write of `num_bytes` failed. After a full disk a probe proves little: that much must be free as well."""
        self.count(failure)
        with self._lock:
            reason = failure.reason if failure.reason in (Reason.DISK_FULL, Reason.READ_ONLY) else Reason.IO_ERROR
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

    def _look(self, space: Space, num_bytes: int) -> None:
        """The file to come must fit as well; one that does not sets how much must be free before the gate opens."""
        free = space.free_bytes - self._writing_bytes
        inodes_wanted = _reserved_inodes(space)
        if space.free_inodes < inodes_wanted:
            self._room = Closed(Reason.DISK_FULL, f"{space.free_inodes} inodes are free, {inodes_wanted} are kept")
        elif free < self._reserve_bytes + num_bytes:
            self._want_room(num_bytes, f"{max(0, free)} bytes are free, {self._reserve_bytes} of them are the reserve")
        elif self._room is not None and free >= self._wanted_bytes:
            self._room = None

    def _want_room(self, num_bytes: int, problem: str) -> None:
        self._wanted_bytes = self._reserve_bytes + num_bytes + self._reserve_bytes // 20
        self._room = Closed(Reason.DISK_FULL, problem)


def _reserved_inodes(space: Space) -> int:
    """One in a hundred, at most a thousand; none where the file system counts none (it says 0 of 0)."""
    return min(1_000, space.total_inodes // 100)
