"""How fast a tier is, as measured; what is old fades."""

from __future__ import annotations

_KEPT = 0.95
"""Of what was measured, with each transfer: the last twenty or so decide."""


class TierSpeed:
    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self.measured_at = 0.0
        """When one ended last."""

    def note(self, num_bytes: int, seconds: float, at_once: int, now: float) -> None:
        """A transfer has ended. `at_once` were under way, itself included: they shared the disk."""
        self.measured_at = now
        self._bytes = self._bytes * _KEPT + num_bytes * at_once
        self._seconds = self._seconds * _KEPT + seconds

    @property
    def bytes_per_second(self) -> float:
        """Of all that are under way together. 0.0: not known yet."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0
