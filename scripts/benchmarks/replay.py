"""Whole traces through the core, policy beside policy: token hit rates, held against the bars that were set for them.

The traces are not part of the repository. TIERKV_TRACES (or `--traces`) names a folder with those of
tests/replay/traces, but whole, packed (.xz) or not; what isn't there is left out, and said.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Plan
from benchmarks.report import Figure, Remark, of_values
from tierkv.replay.capacity import Capacity
from tierkv.replay.driver import Outcome, Setup
from tierkv.replay.formats import read_trace
from tierkv.replay.reading import ReadOptions
from tierkv.replay.study import POLICIES, Question, Study, study
from tierkv.replay.trace import Trace

QUESTION = "how many prompt tokens does each policy find, of whole traces?"

VARIABLE = "TIERKV_TRACES"
CAPACITIES = ("3%", "10%")
LEAST_OF_LRU = 0.99
EXTENT_BLOCKS = (1, 8)
"""Blocks of an extent: one is what simulations of single blocks do, eight is about what a node has, and takes a third
of the time; so the policies that nobody has by default are looked at with eight."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Least token hit rates, in percent, of the policy of the node, by capacity and whatever the extents. Where none is
    given it has to find LEAST_OF_LRU of what LRU does."""

    file: str
    least: dict[str, float]


TRACES = (
    Bars("mooncake_conversation.jsonl", {"3%": 15.5, "10%": 29.0}),
    Bars("agent_sessions.jsonl", {"3%": 30.0, "10%": 72.5}),
    Bars("mooncake_synthetic.jsonl", {}),
)


def measure(plan: Plan) -> Iterator[Figure | Remark]:
    folder = plan.traces or (Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None)
    if folder is None:
        yield Remark(f"left out: {VARIABLE} names no folder with traces (see scripts/benchmarks/replay.py)")
        return
    for bars in TRACES[:1] if plan.quick else TRACES:
        path = find(folder, bars.file)
        if path is None:
            yield Remark(f"left out: {folder} has no {bars.file}, packed (.xz) or not")
            continue
        yield from _of_trace(read_trace(path, ReadOptions()), bars, quick=plan.quick)


def find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / f"{name}.xz", folder / name) if path.is_file()), None)


def _of_trace(trace: Trace, bars: Bars, *, quick: bool) -> Iterator[Figure | Remark]:
    yield Remark(f"{trace.name}: {trace.num_requests:,} requests, {trace.num_blocks:,} blocks ({trace.about})")
    capacities = [Capacity.parse(text) for text in CAPACITIES[: 1 if quick else None]]
    for extent_blocks in EXTENT_BLOCKS:
        policies = POLICIES if extent_blocks > 1 and not quick else (POLICIES[0], "lru")
        made = _study(trace, capacities, tuple(dict.fromkeys(policies)), extent_blocks)
        for place in range(len(capacities)):
            yield from _figures(made, place, bars, extent_blocks)


def _study(trace: Trace, capacities: Sequence[Capacity], policies: Sequence[str], extent_blocks: int) -> Study:
    setup = Setup(policy="", host_bytes=0, extent_blocks=extent_blocks)
    question = Question(capacities=capacities, policies=policies, setup=setup)
    return study(trace, question, jobs=len(os.sched_getaffinity(0)))


def _figures(made: Study, place: int, bars: Bars, extent_blocks: int) -> Iterator[Figure]:
    """Each policy beside LRU of the same run."""
    point = made.points[place]
    lru = next(outcome for outcome in point.outcomes if outcome.setup.policy == "lru")
    name = made.trace.name.partition(".")[0]
    extents = "block" if extent_blocks == 1 else f"{extent_blocks} blocks"
    least = bars.least.get(point.capacity.text)
    for outcome in point.outcomes:
        is_ours = outcome.setup.policy == POLICIES[0]
        yield of_values(
            f"{name} {point.capacity.text}, {outcome.setup.policy}",
            [_rate(outcome)],
            unit="%",
            beside="lru",
            limit=[_rate(lru)],
            least=least if is_ours else None,
            least_ratio=LEAST_OF_LRU if is_ours and least is None else None,
            note=f"extents of a {extents}" if extent_blocks == 1 else f"extents of {extents}",
            labels={"trace": name, "capacity": point.capacity.text, "policy": outcome.setup.policy, "extent": extents},
        )


def _rate(outcome: Outcome) -> float:
    return 100 * outcome.hit_tokens / outcome.asked_tokens
