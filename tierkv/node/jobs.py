"""Long work that an operator asked for, and warm-ups, which are the core's. Who stops asking, stops it."""

from __future__ import annotations

from dataclasses import dataclass, field

ABANDONED_SECONDS = 30.0
MAX_WARMUPS = 16


@dataclass(slots=True)
class Warmups:
    """When somebody last asked about each warm-up."""

    _asked: dict[bytes, float] = field(default_factory=dict)

    def is_full(self, job: bytes) -> bool:
        return job not in self._asked and len(self._asked) >= MAX_WARMUPS

    def asked(self, job: bytes, now: float) -> None:
        self._asked[job] = now

    def forget(self, job: bytes) -> None:
        self._asked.pop(job, None)

    def take_abandoned(self, now: float) -> list[bytes]:
        jobs = [job for job, asked in self._asked.items() if asked + ABANDONED_SECONDS <= now]
        for job in jobs:
            del self._asked[job]
        return jobs

    def next_deadline(self) -> float | None:
        return min((asked + ABANDONED_SECONDS for asked in self._asked.values()), default=None)
