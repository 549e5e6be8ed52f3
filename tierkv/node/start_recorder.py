"""Keeps the record of this start: in windows that close as time goes by, from counts that the front has anyway.

    found     records of earlier starts come from the storage worker
    ready     the first window begins
    look      at `next_due`: a window ends, and the record is given away to be kept
    end       the node stops in order, and the record says so

It does no I/O; `keep` is called with what is to be written down. A window that is cut off by a crash is missing, the
ones before it are not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from tierkv.core.counters import Counters
from tierkv.core.starts import (
    LATE_SECONDS,
    MAX_LATE,
    WINDOW_ENDS,
    LastEnd,
    Start,
    StartKind,
    Window,
    difference,
    predecessor,
    usual,
)
from tierkv.metrics import Latency

MAX_ENGINES = 16
"""Engines whose first ten minutes are recorded at one time; a crash loop needs no more."""

MAX_TOLD = 128

_DIGITS_OF_GROUP = 12
_NEVER = math.inf


def taken(counts: Counters, acquires: Latency | None) -> Window:
    """All that has happened until now, as one window."""
    return Window(
        asked_tokens=counts.asked_tokens,
        hit_tokens=dict(counts.hit_tokens),
        stored_tokens=counts.stored_tokens,
        waits=list(acquires.counts) if acquires is not None else list(Latency().counts),
        wait_seconds=acquires.total_seconds if acquires is not None else 0.0,
        asked_prefill_seconds=counts.asked_prefill_seconds,
        missed_prefill_seconds=counts.missed_prefill_seconds,
    )


@dataclass(slots=True)
class _Open:
    """A record that still gets windows; `ready` is when its first began, `before` what had happened when its current
    one did."""

    start: Start
    ready: float = 0.0
    since: float = 0.0
    before: Window = field(default_factory=Window)

    def due(self) -> float:
        if not self.start.is_ready:
            return _NEVER
        index = bisect_right(WINDOW_ENDS, self.since)
        if index < len(WINDOW_ENDS):
            return self.ready + WINDOW_ENDS[index]
        return _NEVER if self.start.kind is StartKind.ENGINE else self.ready + self.since + LATE_SECONDS

    def begin(self, now: float, so_far: Window) -> None:
        self.start = msgspec.structs.replace(self.start, is_ready=True, ready_seconds=now - self.start.began)
        self.ready, self.since, self.before = now, 0.0, so_far

    def close_window(self, now: float, so_far: Window) -> None:
        """One that lasted longer than it should, as nobody looked, says so by its seconds."""
        self.start = self.with_open_window(now, so_far)
        self.since, self.before = now - self.ready, so_far

    def with_open_window(self, now: float, so_far: Window) -> Start:
        """The record as it were if its window ended now."""
        start, at = self.start, now - self.ready
        if not start.is_ready or at <= self.since:
            return start
        window = difference(so_far, self.before, self.since, at - self.since)
        if self.since < WINDOW_ENDS[-1]:
            return msgspec.structs.replace(start, windows=(*start.windows, window), heard=now)
        return msgspec.structs.replace(start, late=(*start.late, window)[-MAX_LATE:], heard=now)


class StartRecorder:
    """`keep(start)` has the record written down. `last_end` and `problem` say how the front before this one ended,
    where there was one under the same supervisor; `boot` tells whether the machine was started since."""

    def __init__(
        self,
        *,
        number: int,
        began: float,
        rate: float,
        keep: Callable[[Start], None],
        boot: str = "",
        last_end: LastEnd | None = None,
        problem: str = "",
    ) -> None:
        self._keep = keep
        self._knows_last_end = last_end is not None
        kind = StartKind.NODE if last_end is None else StartKind.FRONT
        start = Start(
            number=number,
            kind=kind,
            began=began,
            last_end=last_end or LastEnd.FIRST,
            problem=problem,
            boot=boot,
            rate=rate,
            heard=began,
        )
        self._own = _Open(start)
        self._engines: list[_Open] = []
        self._earlier: dict[tuple[int, str], Start] = {}
        self._pids: dict[bytes, set[int]] = {}
        self.next_due = _NEVER
        """When `look` has something to do next, in node time."""

    # ---- earlier starts

    def found(self, starts: Iterable[Start]) -> None:
        """What the data directory has kept. May come late, and again."""
        mine = self._own.start
        self._earlier |= {(start.number, start.kind): start for start in starts if start.number != mine.number}
        last = predecessor(list(self._earlier.values()), mine.began)
        if last is None:
            return
        last_end = mine.last_end if self._knows_last_end else _how_it_ended(last, mine.boot)
        self._own.start = msgspec.structs.replace(mine, last_end=last_end, last_heard=last.heard, before=usual(last))

    def all(self, now: float, so_far: Window) -> tuple[Start, ...]:
        """The oldest first, this one's own among them. Records that still get windows end with the one that is open,
        as long as it is by now."""
        known = [*self._earlier.values(), *(one.with_open_window(now, so_far) for one in self._open())]
        return tuple(sorted(known, key=lambda start: (start.began, start.number))[-MAX_TOLD:])

    # ---- this one

    def ready(self, now: float, so_far: Window) -> None:
        if self._own.start.is_ready:
            return  # another storage worker; nothing that was known was lost
        self._own.begin(now, so_far)
        self._tell(self._own, now)
        self._set_due()

    def opened(self, group: bytes, pid: int, *, is_used: bool, now: float, so_far: Window) -> None:
        """A session of process `pid` works with `group` from now on; `is_used`: another that lives does too. If those
        that did before are all gone, an engine has started."""
        known = self._pids.setdefault(group, set())
        if known and pid not in known and not is_used:
            known.clear()
            self._begin_engine(group, now, so_far)
        known.add(pid)

    def look(self, now: float, so_far: Window) -> None:
        """To be called at `next_due`."""
        for one in self._open():
            if one.due() <= now:
                one.close_window(now, so_far)
                self._tell(one, now)
        for one in [one for one in self._engines if one.due() == _NEVER]:
            self._engines.remove(one)
            self._earlier[one.start.number, one.start.kind] = one.start
        self._set_due()

    def end(self, now: float, so_far: Window) -> None:
        """The node stops in order. What the current window has had is kept too."""
        for one in self._open():
            if one.start.is_ready and now > one.ready + one.since:
                one.close_window(now, so_far)
        self._own.start = msgspec.structs.replace(self._own.start, ended=True)
        for one in self._open():
            self._tell(one, now)

    def _set_due(self) -> None:
        self.next_due = min(one.due() for one in self._open())

    def _open(self) -> list[_Open]:
        return [self._own, *self._engines]

    def _begin_engine(self, group: bytes, now: float, so_far: Window) -> None:
        if len(self._engines) >= MAX_ENGINES:
            return
        taken_numbers = {number for number, _kind in self._earlier} | {one.start.number for one in self._open()}
        number = int(now * 1_000)
        while number in taken_numbers:
            number += 1
        own = self._own.start
        start = Start(
            number=number,
            kind=StartKind.ENGINE,
            began=now,
            last_end=LastEnd.UNKNOWN,
            boot=own.boot,
            group=group.hex()[:_DIGITS_OF_GROUP],
            rate=own.rate,
            before=usual(own),
        )
        opened = _Open(start)
        opened.begin(now, so_far)
        self._engines.append(opened)
        self._tell(opened, now)
        self._set_due()

    def _tell(self, one: _Open, now: float) -> None:
        one.start = msgspec.structs.replace(one.start, heard=now)
        self._keep(one.start)


def _how_it_ended(last: Start, boot: str) -> LastEnd:
    if last.ended:
        return LastEnd.CLEAN
    return LastEnd.MACHINE if boot and last.boot and boot != last.boot else LastEnd.KILLED
