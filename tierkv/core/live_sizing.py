"""What room is worth, told while the node works: by the hour, for a day.

    asked()      waits, and is sampled when nobody else waits: how much room did each use need?   an estimate, of LRU
    regretted()  how much more room would have kept what was evicted?                             the policy in force

The request path appends to a queue; what is in it is looked at by `step`, and at the latest when too much of it waits.
What is told is of the last hours, in windows of one hour, so that yesterday does not drown today. Nothing of it
survives a restart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tierkv.core.counters import Counters
from tierkv.core.ghosts import Ghost
from tierkv.core.keys import KEY_BYTES
from tierkv.core.more_room import MoreRoom
from tierkv.core.reuse_sample import MAX_SAMPLES, ReuseSample, block_bytes
from tierkv.core.size_report import Gain, MoreGain, SizeReport
from tierkv.core.value.cost import prefill_seconds

if TYPE_CHECKING:
    from tierkv.core.ledger import Group

WINDOW_SECONDS = 3_600.0
MAX_WINDOWS = 25
"""A day, and the hour that is running."""

KEPT_SECONDS = 3 * 86_400.0
"""A block that nobody has used for so long counts as new when it is used again."""

LEARNING_SECONDS = 86_400.0
"""For so long a second sample with a higher rate learns what there is, before it takes over from one that has become
too small: the rate of a sample only sinks."""

MAX_WAITING_BLOCKS = 16_384
BLOCKS_A_STEP = 256

STEPS_AN_OCTAVE = 8
"""Capacities are told apart to 9 %."""

STRATA = 24
"""Blocks of a prompt by their index: 0, 1, 2 to 3, 4 to 7, and so on."""

EDGES = [round(2 ** (place / STEPS_AN_OCTAVE)) for place in range(60 * STEPS_AN_OCTAVE)]
"""A need is counted at the first of these that is not below it."""


@dataclass(slots=True)
class _Sum:
    tokens: float = 0.0
    seconds: float = 0.0
    num_bytes: float = 0.0

    def add(self, tokens: float, seconds: float, num_bytes: float, times: float = 1.0) -> None:
        self.tokens += times * tokens
        self.seconds += times * seconds
        self.num_bytes += times * num_bytes

    def add_all(self, other: _Sum, times: float = 1.0) -> None:
        self.add(other.tokens, other.seconds, other.num_bytes, times)


@dataclass(frozen=True, slots=True)
class _Tally:
    """What the core had counted at some moment."""

    hit_tokens: dict[str, int]
    saved_seconds: float
    regretted_tokens: int
    regretted_seconds: float


_NOTHING = _Tally({}, 0.0, 0, 0.0)


@dataclass(slots=True)
class _Window:
    since: float
    before: _Tally
    requests: int = 0
    uses: int = 0  # of sampled blocks
    asked: _Sum = field(default_factory=_Sum)
    asked_blocks: list[int] = field(default_factory=lambda: [0] * STRATA)
    seen_blocks: list[float] = field(default_factory=lambda: [0.0] * STRATA)  # as many, told from the sample
    gains: dict[tuple[int, int], _Sum] = field(default_factory=dict)  # by stratum, and place in EDGES
    more: dict[tuple[str, int], _Sum] = field(default_factory=dict)  # by tier, and place in EDGES


class _Waiting(NamedTuple):
    group: Group
    keys: bytes
    is_asked: bool
    now: float


class LiveSizing:
    """`group(key)`: what is known of it; `prefill_rate(group)`: tokens a second at the start of a prompt.
    `extent_bytes`: of a whole extent."""

    def __init__(
        self,
        counts: Counters,
        group: Callable[[bytes], Group | None],
        prefill_rate: Callable[[Group], float],
        extent_bytes: int,
        *,
        max_samples: int = MAX_SAMPLES,
    ) -> None:
        self._counts = counts
        self._group = group
        self._prefill_rate = prefill_rate
        self._extent_bytes = extent_bytes
        self._max_samples = max_samples
        self._sample = ReuseSample(max_samples)
        self._sample_began: float | None = None
        self._successor: ReuseSample | None = None
        self._successor_began = 0.0
        self._windows: deque[_Window] = deque(maxlen=MAX_WINDOWS)
        self._more = MoreRoom(self._bytes_of)
        self._waiting: deque[_Waiting] = deque()
        self._waiting_blocks = 0

    # ---- what happens

    def asked(self, group: Group, keys: bytes, now: float) -> None:
        """A prompt is asked for; what is missing of it will be stored."""
        self._wait(_Waiting(group, keys, True, now))

    def stored(self, group: Group, keys: bytes, now: float) -> None:
        """Blocks are stored, whether they were asked for or not."""
        self._wait(_Waiting(group, keys, False, now))

    def regretted(self, ghost: Ghost, seconds: float, now: float) -> None:
        """What was evicted, and is still gone, is asked for; to compute it again takes so long."""
        more = self._more.needed(ghost, now)
        if more is not None:
            window = self._window(now)
            place = bisect_left(EDGES, more)
            window.more.setdefault((ghost.tier, place), _Sum()).add(ghost.tokens, seconds, 0)

    def ghost_changed(self, ghost: Ghost, sign: int) -> None:
        """Blocks are a ghost from now on (+1), or none any more (-1)."""
        self._more.changed(ghost, sign)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> None:
        """A slice of what waits."""
        done = 0
        while self._waiting and done < BLOCKS_A_STEP:
            done += self._take_one()

    def forget(self, groups: frozenset[bytes] | None) -> None:
        """No key of these groups is remembered from here on; None: of any. What was counted stays counted."""
        self._take_all()
        if groups is None:
            self._sample, self._sample_began, self._successor = ReuseSample(self._max_samples), None, None
            return
        for sample in (self._sample, self._successor):
            if sample is not None:
                sample.forget(groups)

    def report(self, seconds: float, now: float) -> SizeReport:
        """Of the last `seconds`, in whole windows, as far back as there are any."""
        self._take_all()
        self._window(now)
        windows = [window for window in self._windows if self._end(window) > now - seconds]
        first, total = windows[0], _Window(windows[0].since, windows[0].before)
        for window in windows:
            _add(total, window)
        gains = _gains(total)
        did = self._tally()
        return SizeReport(
            since=first.since,
            until=now,
            requests=total.requests,
            asked_tokens=int(total.asked.tokens),
            asked_seconds=total.asked.seconds,
            sample_began=now if self._sample_began is None else self._sample_began,
            samples=len(self._sample),
            sampled_uses=total.uses,
            rate=self._sample.rate,
            seen_bytes=self._sample.seen_bytes,
            file_factor=self._file_factor(),
            first_tokens=max(0.0, total.asked.tokens - sum(gain.tokens for gain in gains)),
            gains=tuple(gains),
            hit_tokens={tier: tokens - first.before.hit_tokens.get(tier, 0) for tier, tokens in did.hit_tokens.items()},
            saved_seconds=did.saved_seconds - first.before.saved_seconds,
            regretted_tokens=did.regretted_tokens - first.before.regretted_tokens,
            regretted_seconds=did.regretted_seconds - first.before.regretted_seconds,
            more_gains=tuple(
                MoreGain(tier, EDGES[place], int(one.tokens), one.seconds)
                for (tier, place), one in sorted(total.more.items())
            ),
        )

    # ---- what waits

    def _wait(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._waiting_blocks += len(waiting.keys) // KEY_BYTES
        while self._waiting_blocks > MAX_WAITING_BLOCKS:  # nobody lets it work
            self._take_one()

    def _take_all(self) -> None:
        while self._waiting:
            self._take_one()

    def _take_one(self) -> int:
        """Returns the blocks that were looked at."""
        waiting = self._waiting.popleft()
        blocks = len(waiting.keys) // KEY_BYTES
        self._waiting_blocks -= blocks
        if self._sample_began is None:
            self._sample_began = waiting.now
        window = self._window(waiting.now)
        if waiting.is_asked:
            self._count(window, waiting.group, waiting.keys, blocks, waiting.now)
        else:
            self._sample.store(waiting.group, waiting.keys, waiting.now)
        if self._successor is not None:
            use = self._successor.use if waiting.is_asked else self._successor.store
            use(waiting.group, waiting.keys, waiting.now)
        return blocks

    def _count(self, window: _Window, group: Group, keys: bytes, blocks: int, now: float) -> None:
        prefill, tokens, num_bytes = self._prefill_rate(group), group.block_tokens, block_bytes(group)
        window.requests += 1
        window.asked.add(blocks * tokens, prefill_seconds(blocks * tokens, 0, prefill), blocks * num_bytes)
        for stratum in range(blocks.bit_length() + 1):
            window.asked_blocks[stratum] += max(0, min(blocks, 1 << stratum) - (1 << stratum >> 1))
        each_stands_for = 1 / self._sample.rate
        for index, need in self._sample.use(group, keys, now):
            stratum = index.bit_length()
            window.uses += 1
            window.seen_blocks[stratum] += each_stands_for
            if need is not None:
                gain = window.gains.setdefault((stratum, bisect_left(EDGES, need)), _Sum())
                gain.add(tokens, prefill_seconds(tokens, index * tokens, prefill), num_bytes, each_stands_for)

    # ---- time

    def _window(self, now: float) -> _Window:
        """The one that is running."""
        if not self._windows:
            self._windows.append(_Window(now, _NOTHING))
        elif now >= self._end(self._windows[-1]):
            self._windows.append(_Window(now, self._tally()))
            self._renew(now)
        return self._windows[-1]

    def _end(self, window: _Window) -> float:
        return (window.since // WINDOW_SECONDS + 1) * WINDOW_SECONDS

    def _renew(self, now: float) -> None:
        """Once an hour: forget what is no longer used, and see whether the sample has become too small."""
        self._sample.forget_unused(now - KEPT_SECONDS)
        if self._successor is None:
            if self._sample.rate < 1.0 and len(self._sample) < self._max_samples // 4:
                self._successor = ReuseSample(self._max_samples, min(1.0, 4 * self._sample.rate))
                self._successor_began = now
        elif now - self._successor_began >= LEARNING_SECONDS:
            self._sample, self._sample_began, self._successor = self._successor, self._successor_began, None

    # ---- sums

    def _tally(self) -> _Tally:
        counts = self._counts
        return _Tally(
            hit_tokens=dict(counts.hit_tokens),
            saved_seconds=counts.asked_prefill_seconds - counts.missed_prefill_seconds,
            regretted_tokens=sum(counts.regretted_tokens.values()),
            regretted_seconds=counts.regretted_seconds,
        )

    def _bytes_of(self, ghost: Ghost) -> int:
        group = self._group(ghost.group)
        if group is None:
            return 0
        return ghost.blocks * (block_bytes(group) if ghost.tier in ("gpu", "host") else self._file_bytes(group))

    def _file_bytes(self, group: Group) -> int:
        """Of a block in all ranks' files, when its extent is as long as extents may be."""
        blocks = max(1, self._extent_bytes // group.slot_bytes)
        return group.ranks * group.file_bytes(blocks) // blocks

    def _file_factor(self) -> float:
        blocks = self._sample.blocks_by_group()
        memory = sum(count * block_bytes(group) for group, count in blocks.items())
        files = sum(count * self._file_bytes(group) for group, count in blocks.items())
        return files / memory if memory else 1.0


def _add(total: _Window, window: _Window) -> None:
    total.requests += window.requests
    total.uses += window.uses
    total.asked.add_all(window.asked)
    for stratum in range(STRATA):
        total.asked_blocks[stratum] += window.asked_blocks[stratum]
        total.seen_blocks[stratum] += window.seen_blocks[stratum]
    for at, gain in window.gains.items():
        total.gains.setdefault(at, _Sum()).add_all(gain)
    for of, more in window.more.items():
        total.more.setdefault(of, _Sum()).add_all(more)


def _gains(total: _Window) -> list[Gain]:
    """The blocks that are used most are few, either in the sample or not: so it sees more or less than was asked for.
    They lie at the begin of prompts. How many blocks were asked for at which depth is known, so each depth is weighed
    by what is missing of it, or too much. What the sample has none of counts as not found."""
    by_place: dict[int, _Sum] = {}
    for (stratum, place), gain in total.gains.items():
        weight = total.asked_blocks[stratum] / total.seen_blocks[stratum]
        by_place.setdefault(place, _Sum()).add_all(gain, weight)
    return [Gain(EDGES[place], one.tokens, one.seconds, one.num_bytes) for place, one in sorted(by_place.items())]
