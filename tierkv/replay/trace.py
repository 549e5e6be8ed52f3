"""A trace: which blocks were asked for and stored, and when.

Blocks are numbers. Equal numbers are equal blocks behind equal prefixes: they are handed out along a tree of what came
before, so that an id that turns up behind two prefixes is two blocks, whatever the source meant by it. A last, partial
block of a prompt has no number, for it is never cached; its tokens count in `tokens`.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice

from tierkv.core.keys import KEY_BYTES


class Verb(StrEnum):
    ASK = "ask"
    STORE = "store"
    SERVE = "serve"  # asks, and stores what was missing


@dataclass(frozen=True, slots=True)
class TraceGroup:
    """What shares nothing with others. `block_bytes` are those of all its ranks."""

    name: str
    block_tokens: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """`time` in seconds, never less than the step's before. `blocks` from token 0 on; `tokens` of the whole prompt."""

    time: float
    verb: Verb
    group: int
    blocks: array[int]
    tokens: int

    @property
    def asks(self) -> bool:
        return self.verb is not Verb.STORE

    @property
    def stores(self) -> bool:
        return self.verb is not Verb.ASK


@dataclass(frozen=True, slots=True)
class Gap:
    """`requests` that happened are not in the trace, from `since` on; why is a `reason` of the closed list."""

    since: float
    requests: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trace:
    """`groups_of` has the group of each block, by its number. `about` says in words what was read, and how. `gaps` are
    what the source itself says to be missing."""

    name: str
    about: str
    groups: tuple[TraceGroup, ...]
    steps: tuple[Step, ...]
    groups_of: array[int]
    gaps: tuple[Gap, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Distinct full blocks."""
        return len(self.groups_of)

    @property
    def num_bytes(self) -> int:
        """What all of them take."""
        sizes = [group.block_bytes for group in self.groups]
        return sum(sizes[group] for group in self.groups_of)

    @property
    def num_requests(self) -> int:
        return sum(step.asks for step in self.steps)

    @property
    def asked_tokens(self) -> int:
        return sum(step.tokens for step in self.steps if step.asks)

    @property
    def seconds(self) -> float:
        return self.steps[-1].time - self.steps[0].time if self.steps else 0.0

    @property
    def block_bytes(self) -> int | None:
        """The one size that all blocks have; None where there are several."""
        sizes = {group.block_bytes for group in self.groups}
        return sizes.pop() if len(sizes) == 1 else None

    def block_keys(self) -> list[bytes]:
        """A key for each block, by its number. They stand for digests: no two are equal, and nothing else matters."""
        return [number.to_bytes(KEY_BYTES, "little") for number in range(self.num_blocks)]


@dataclass(slots=True)
class TraceBuilder:
    """Numbers the blocks of a trace while it is read. Steps may come in any order."""

    groups: list[TraceGroup] = field(default_factory=list)
    _numbers: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    _groups_of: array[int] = field(default_factory=lambda: array("H"))
    _steps: list[Step] = field(default_factory=list)
    _gaps: list[Gap] = field(default_factory=list)

    def add_group(self, group: TraceGroup) -> int:
        self.groups.append(group)
        return len(self.groups) - 1

    def path(self, group: int, ids: Iterable[Hashable]) -> array[int]:
        """The blocks of a prompt whose blocks the source calls `ids`, from token 0 on."""
        above = -1 - group
        numbers = self._numbers
        path = array("l")
        for one in ids:
            place = (above, one)
            above = numbers.setdefault(place, len(numbers))
            path.append(above)
        self._groups_of.extend([group] * (len(numbers) - len(self._groups_of)))
        return path

    def add(self, time: float, verb: Verb, group: int, blocks: array[int], tokens: int) -> None:
        self._steps.append(Step(time, verb, group, blocks, tokens))

    def add_gap(self, gap: Gap) -> None:
        self._gaps.append(gap)

    def build(self, name: str, about: str) -> Trace:
        steps = tuple(sorted(self._steps, key=lambda step: step.time))
        return Trace(name, about, tuple(self.groups), steps, self._groups_of, tuple(self._gaps))


def spread_ticks(times: list[float], tick_seconds: float) -> Iterator[float]:
    """Times of a clock that ticks: those with one tick are laid over the time to the next one, at most `tick_seconds`.
    A replay of the clock itself would be one of bursts that nobody sent."""
    start = 0
    while start < len(times):
        stop = start + sum(1 for _ in _while_equal(times, start))
        following = times[stop] if stop < len(times) else times[start] + tick_seconds
        width = min(tick_seconds, following - times[start])
        yield from (times[start] + width * place / (stop - start) for place in range(stop - start))
        start = stop


def _while_equal(times: list[float], start: int) -> Iterator[float]:
    for time in islice(times, start, None):
        if time != times[start]:
            return
        yield time
