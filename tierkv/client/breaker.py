"""The circuit breaker: while the node is away, a call costs nothing but the look at a clock.

    CLOSED   --failure-->               OPEN       for 0.25 s
    OPEN     --time is up, one caller--> HALF_OPEN  that caller probes, the others go on missing
    HALF_OPEN --failure-->              OPEN       for twice as long as before, at most 2 s
    any      --answer from the node-->  CLOSED

Not thread-safe: the client's lock is held around it.
"""

from __future__ import annotations

from enum import Enum

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 2.0
PROBE_SECONDS = 1.0
"""A probe that hasn't reported by then is taken for lost (its thread was interrupted), and another may go."""


class Permit(Enum):
    GO = "go"
    PROBE = "probe"
    REFUSED = "refused"


class _State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    def __init__(self) -> None:
        self._state = _State.CLOSED
        self._pause = FIRST_PAUSE_SECONDS
        self._until = 0.0

    @property
    def is_closed(self) -> bool:
        return self._state is _State.CLOSED

    def ask(self, now: float) -> Permit:
        """May a call go to the node? Whoever gets PROBE owes `failed` or `answered`."""
        if self._state is _State.CLOSED:
            return Permit.GO
        if now < self._until:
            return Permit.REFUSED
        self._state = _State.HALF_OPEN
        self._until = now + PROBE_SECONDS
        return Permit.PROBE

    def failed(self, now: float) -> None:
        """No answer from the node. While open nothing changes: those are calls that were under way already."""
        if self._state is _State.OPEN:
            return
        doubled = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._pause = FIRST_PAUSE_SECONDS if self._state is _State.CLOSED else doubled
        self._state = _State.OPEN
        self._until = now + self._pause

    def answered(self) -> None:
        self._state = _State.CLOSED
