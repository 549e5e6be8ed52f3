"""How things are measured: alternately, many times, with work before the clock starts left out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Work = Callable[[int], float]
"""Given the number of the round, does its work and says how many seconds of it count."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command line asked for. `directory` is on the disk to measure, and is the benchmarks' own. `model` is a
    folder that vLLM loads, `traces` one with traces of requests, for the benchmarks that need one."""

    quick: bool
    directory: Path
    model: Path | None = None
    traces: Path | None = None

    def rounds(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def alternate(rounds: int, works: Mapping[str, Work]) -> dict[str, list[float]]:
    """Seconds of each work in each round. All of them take their turn in every round, the order turning with the
    rounds, so that whatever else the machine does meets them alike. The first round is a rehearsal and isn't counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    with _without_collector():
        for number in range(rounds + 1):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                taken = works[name](number)
                if number:
                    seconds[name].append(taken)
    return seconds


def timed(work: Callable[[int], object]) -> Work:
    """All of the work counts."""

    def run(number: int) -> float:
        start = time.perf_counter()
        work(number)
        return time.perf_counter() - start

    return run


@contextmanager
def _without_collector() -> Iterator[None]:
    """A garbage collection of what the benchmarks hold would fall on whoever has the turn."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
