"""Who waits for an answer that is not there yet. Every one of them is answered: when it comes, or past the deadline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K")

GRACE_SECONDS = 0.25
"""The core answers at the deadline; whoever is still here so much later (its lease was ended by another) is answered
without it."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Where an answer goes: the ZeroMQ peer, the id of its request, and when that came (node time)."""

    peer: bytes
    request_id: int
    session: bytes
    request: str
    received: float


@dataclass(slots=True)
class _Entry:
    askers: list[Asker]
    deadline: float


@dataclass(slots=True)
class WaitingRoom(Generic[K]):
    """By what they wait for: a grant, or the number of a seal. A request that was sent twice waits twice."""

    _entries: dict[K, _Entry] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: K, asker: Asker, deadline: float) -> None:
        entry = self._entries.setdefault(key, _Entry([], deadline))
        entry.askers.append(asker)
        entry.deadline = max(entry.deadline, deadline)

    def take(self, key: K) -> list[Asker]:
        entry = self._entries.pop(key, None)
        return entry.askers if entry is not None else []

    def take_overdue(self, now: float) -> list[tuple[K, list[Asker]]]:
        """Earliest deadline first."""
        late = [(e.deadline, key) for key, e in self._entries.items() if e.deadline + GRACE_SECONDS <= now]
        return [(key, self.take(key)) for _, key in sorted(late, key=lambda pair: pair[0])]

    def take_all(self) -> list[tuple[K, list[Asker]]]:
        return [(key, self.take(key)) for key in list(self._entries)]

    def take_session(self, session: bytes) -> list[tuple[K, list[Asker]]]:
        """Whose session has ended: those asked by it alone."""
        mine = [key for key, entry in self._entries.items() if all(a.session == session for a in entry.askers)]
        return [(key, self.take(key)) for key in mine]

    def next_deadline(self) -> float | None:
        return min((e.deadline + GRACE_SECONDS for e in self._entries.values()), default=None)
