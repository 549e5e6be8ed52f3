"""What came of a torture: counts, and findings, of which there must be none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STEPS_SHOWN = 20
LEAKS = ("descriptors", "memory", "slots", "temp files", "processes", "sockets")


class Found(AssertionError):
    """A promise is broken. It is in the verdict already; whoever directs stops here, to keep the evidence as it is."""


@dataclass
class Verdict:
    """`operations` by kind; `kills` by victim, of which `held` came at a chosen point (a barrier, between two steps, in
    some state); `episodes` are troubles without a kill. Of the prefixes that were reported flushed, `absent` were
    evicted or damaged since, and `purged`, on purpose. Findings say in words what, whose and where; `broken` are
    promises that have no line of their own. `trail` names the steps of the last round, the last of which was under way
    when something was found."""

    seed: int
    operations: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    episodes: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    held: int = 0
    flushed: int = 0
    absent: int = 0
    purged: int = 0
    verified: int = 0
    slowest_return: tuple[float, str] = (0.0, "")
    slowest_step: tuple[float, str] = (0.0, "")
    seconds: float = 0.0
    interrupted: bool = False
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    leaks: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in LEAKS})
    broken: list[str] = field(default_factory=list)
    trail: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        leaks = [f"leak of {name}: {what}" for name, several in self.leaks.items() for what in several]
        return [
            *(f"wrong: {what}" for what in self.wrong),
            *(f"lost: {what}" for what in self.lost),
            *leaks,
            *(f"broken: {what}" for what in self.broken),
        ]

    @property
    def is_clean(self) -> bool:
        """Nothing was found, and it came to its end, of one round at least."""
        return not self.findings and not self.interrupted and self.rounds.total() > 0

    @property
    def has_tried(self) -> bool:
        """Anybody was killed, or anything else was done to the node."""
        return bool(self.kills or self.episodes)

    def note_step(self, seconds: float) -> None:
        """The last one of the trail has taken so long."""
        self.slowest_step = max(self.slowest_step, (seconds, self.trail[-1]))

    def find_leak(self, name: str, what: str) -> None:
        self.leaks[name].append(what)

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        seconds, whom = self.slowest_return
        return {
            "clean": self.is_clean,
            "interrupted": self.interrupted,
            "tried": self.has_tried,
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "rounds": dict(self.rounds),
            "operations": dict(self.operations),
            "kills": dict(self.kills),
            "kills_held": self.held,
            "episodes": dict(self.episodes),
            "prefixes_flushed": self.flushed,
            "prefixes_evicted_or_damaged": self.absent,
            "prefixes_purged": self.purged,
            "blocks_verified": self.verified,
            "slowest_return_seconds": round(seconds, 2),
            "slowest_return": whom,
            "slowest_step_seconds": round(self.slowest_step[0], 2),
            "slowest_step": self.slowest_step[1],
            "wrong": len(self.wrong),
            "lost": len(self.lost),
            "leaks": {name: len(several) for name, several in self.leaks.items()},
            "broken": len(self.broken),
            "findings": self.findings,
            "last_steps": [*self.trail[:1], *self.trail[1:][-STEPS_SHOWN:]],
        }
