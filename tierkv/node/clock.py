"""Node time: the wall clock when the node started, plus what a monotonic clock has counted since.

Durations and deadlines never jump with the wall clock; times that are shown or kept on disk are close to it. All
processes of a node share the zero, so that their times compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeClock:
    wall_zero: float
    monotonic_zero: float
    monotonic: Callable[[], float] = time.monotonic

    @classmethod
    def start(cls) -> NodeClock:
        return cls(time.time(), time.monotonic())

    def now(self) -> float:
        return self.wall_zero + (self.monotonic() - self.monotonic_zero)
