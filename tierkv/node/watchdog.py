"""Whether a process that is alive still does anything: asked now and then, given up after long silence.

Time counts only while the one who asks runs itself, and in small steps: whoever was stopped together with its ward (a
suspended machine, SIGSTOP of all), or slept through a jump of a clock, has seen one step, not an hour of silence.
"""

from __future__ import annotations

from enum import Enum, auto

STEPS = 6
"""How many times within the deadline there is a look; the silence is known that exactly."""

SHORTEST_STEP_SECONDS = 1.0
FEWEST_QUESTIONS = 3
"""Nobody is given up who was asked less often without an answer, however short the deadline."""


class Verdict(Enum):
    ASK = auto()  # for a sign of life
    HUNG = auto()


class Watchdog:
    """`deadline_seconds` 0: watches nothing, ever. Times are of a clock that does not jump."""

    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self.step_seconds = max(SHORTEST_STEP_SECONDS, deadline_seconds / STEPS)
        self._patience = 1.0
        self._due: float | None = None
        self._last = 0.0
        self._silence_seconds = 0.0
        self._asked = 0  # times since the last sign of life

    @property
    def silence_seconds(self) -> float:
        """How long nothing was heard, as far as it counts."""
        return self._silence_seconds

    def next_due(self) -> float | None:
        """When to `look` next; None while nobody is watched."""
        return self._due

    def begin(self, now: float, *, patience: float = 1.0) -> None:
        """A new process, or a new part of its life: `patience` times the deadline is what it gets."""
        self._patience = patience
        if self._deadline_seconds:
            self._due = now + self.step_seconds
        self._last = now
        self.heard()

    def end(self) -> None:
        self._due = None

    def heard(self) -> None:
        """A sign of life."""
        self._silence_seconds = 0.0
        self._asked = 0

    def look(self, now: float) -> Verdict | None:
        """None before the next look is due. HUNG once; then `begin` again."""
        if self._due is None or now < self._due:
            return None
        if self._asked:
            self._silence_seconds += min(now - self._last, 2 * self.step_seconds)
        self._last = now
        self._due = now + self.step_seconds
        if self._asked >= FEWEST_QUESTIONS and self._silence_seconds > self._patience * self._deadline_seconds:
            self._due = None
            return Verdict.HUNG
        self._asked += 1
        return Verdict.ASK
