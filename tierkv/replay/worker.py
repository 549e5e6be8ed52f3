"""A storage worker that does what it is told and touches nothing: each instruction is answered with the report of its
success, at once or, for writes, when a drive of a given speed would be through."""

from __future__ import annotations

from collections import deque

from tierkv.core.instructions import (
    AnyReport,
    Read,
    ReadDone,
    Remove,
    RemoveDone,
    SetAside,
    Write,
    WriteDone,
    Zero,
    Zeroed,
)
from tierkv.core.keys import TOKEN_BYTES, count_keys
from tierkv.core.ledger import Effect

_HEADER_BYTES = 4096


class ObedientWorker:
    """`write_bytes_per_second` None: a write is done as soon as it is asked for."""

    def __init__(self, write_bytes_per_second: float | None) -> None:
        self._rate = write_bytes_per_second
        self._busy_until = 0.0
        self._writes: deque[tuple[float, WriteDone]] = deque()

    def take(self, effect: Effect, now: float) -> AnyReport | None:
        """The report, if it is due now; None also for what is not reported at all."""
        match effect:
            case Write():
                return self._write(effect, now)
            case Read():
                # A file's header gives back its tokens; here it matters only that they are there.
                tokens = bytes(TOKEN_BYTES * effect.block_tokens * count_keys(effect.keys))
                return ReadDone(op=effect.op, valid=len(effect.slots), seconds=0.0, tokens=tokens)
            case Remove() | SetAside():
                return RemoveDone(op=effect.op)
            case Zero():
                return Zeroed(op=effect.op)
            case _:
                return None

    def next_due(self) -> float | None:
        return self._writes[0][0] if self._writes else None

    def take_due(self, now: float) -> AnyReport | None:
        """A report that has become due by `now`."""
        return self._writes.popleft()[1] if self._writes and self._writes[0][0] <= now else None

    def _write(self, op: Write, now: float) -> WriteDone | None:
        num_bytes = _HEADER_BYTES + len(op.slots) * op.block_bytes
        seconds = num_bytes / self._rate if self._rate else 0.0
        done = WriteDone(op=op.op, file_bytes=num_bytes, seconds=seconds)
        if not self._rate:
            return done
        self._busy_until = max(self._busy_until, now) + seconds
        self._writes.append((self._busy_until, done))
        return None
