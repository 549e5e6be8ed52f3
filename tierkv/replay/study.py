"""Several runs over one trace: policies beside each other, capacities one after another, and what bounds them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import active_children
from typing import get_args

from tierkv.core.value.names import PolicyName
from tierkv.errors import ConfigError
from tierkv.replay.capacity import Capacity
from tierkv.replay.driver import Outcome, Setup, replay, require_room
from tierkv.replay.optimum import Bound, belady, infinite
from tierkv.replay.trace import Trace

POLICIES: tuple[str, ...] = get_args(PolicyName)
"""The first is the one that a node has if nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`setup` says what all runs have in common; its policy and sizes are replaced by those asked for. `nvme` None:
    host memory only."""

    capacities: Sequence[Capacity]
    policies: Sequence[str]
    setup: Setup
    nvme: Capacity | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One capacity. `optimum` is None where it can't be told: blocks of several sizes."""

    capacity: Capacity
    host_bytes: int
    nvme_bytes: int
    outcomes: tuple[Outcome, ...]
    optimum: Bound | None


@dataclass(frozen=True, slots=True)
class Study:
    trace: Trace
    question: Question
    points: tuple[Point, ...]
    infinite: Bound

    @property
    def prefill_seconds(self) -> float:
        return self.points[0].outcomes[0].prefill_seconds


def study(
    trace: Trace, question: Question, *, jobs: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> Study:
    """`progress` is called with the runs that are done, and how many there are. Raises ConfigError for a capacity that
    holds no block of the trace."""
    if not question.capacities or not question.policies:
        raise ConfigError("capacity", "a replay needs at least one capacity and one policy")
    nvme_bytes = question.nvme.bytes_of(trace) if question.nvme else 0
    sizes = [capacity.bytes_of(trace) for capacity in question.capacities]
    for host_bytes in sizes:
        require_room(trace, host_bytes)
    runs = [
        replace(question.setup, policy=policy, host_bytes=size, nvme_bytes=nvme_bytes)
        for size in sizes
        for policy in question.policies
    ]
    outcomes = _run_all(trace, runs, jobs, progress)
    rate = question.setup.prefill_rate
    points = [
        Point(
            capacity=capacity,
            host_bytes=size,
            nvme_bytes=nvme_bytes,
            outcomes=tuple(outcomes[number * len(question.policies) : (number + 1) * len(question.policies)]),
            optimum=belady(trace, size + nvme_bytes, rate),
        )
        for number, (capacity, size) in enumerate(zip(question.capacities, sizes, strict=True))
    ]
    return Study(trace, question, tuple(points), infinite(trace, rate))


def _run_all(trace: Trace, runs: Sequence[Setup], jobs: int, progress: Callable[[int, int], None]) -> list[Outcome]:
    outcomes: dict[Setup, Outcome] = {}
    made = _in_turn(trace, runs) if min(jobs, len(runs)) < 2 else _side_by_side(trace, runs, jobs)
    with closing(made):
        for outcome in made:
            outcomes[outcome.setup] = outcome
            progress(len(outcomes), len(runs))
    return [outcomes[run] for run in runs]


def _in_turn(trace: Trace, runs: Sequence[Setup]) -> Generator[Outcome, None, None]:
    for run in dict.fromkeys(runs):
        yield replay(trace, run)


def _side_by_side(trace: Trace, runs: Sequence[Setup], jobs: int) -> Generator[Outcome, None, None]:
    unique = list(dict.fromkeys(runs))
    others = set(active_children())
    with ProcessPoolExecutor(min(jobs, len(unique)), initializer=_take_trace, initargs=(trace,)) as pool:
        waiting: list[Future[Outcome]] = [pool.submit(_replay_taken, run) for run in unique]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            for future in waiting:
                future.cancel()
            for process in set(active_children()) - others:
                process.terminate()  # what is still running nobody waits for any more; the pool sees to their ends


_taken: list[Trace] = []
"""What a process of the pool replays: handed over once, and not with each run."""


def _take_trace(trace: Trace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that is asked, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by this, whatever that process does when it gets one itself
    _taken[:] = [trace]


def _replay_taken(setup: Setup) -> Outcome:
    return replay(_taken[0], setup)
