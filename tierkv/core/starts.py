"""Records of starts: when a node began to serve, why the life before ended, and what was asked of it then.

A record is kept by the front while it lives, in `starts/` of the data directory from window to window, and told to
whoever asks. Times are node time; a record holds no key, no salt and no name of a model.

    began ---- ready ---- 60 s in windows of 5 s ---- 10 min in coarser ones ---- late: 5 min each, the last 30 min
                |<------------------ windows ------------------>|<--------------- late --------------->|
"""

from __future__ import annotations

from enum import StrEnum
from functools import reduce

import msgspec

FIRST_SECONDS = 60.0
"""The part of a life that a restart is judged by; what comes after it may count as steady."""

STEADY_SECONDS = 1_800.0
"""How far back a life is looked at to say what is usual."""

ENOUGH_SECONDS = 240.0
"""What of a life, after its first part, must have been seen before it overrules what was usual earlier."""

WINDOW_ENDS: tuple[float, ...] = (
    *range(5, 61, 5),
    *(75, 90, 105, 120),
    *(150, 180, 210, 240, 270, 300),
    *(360, 420, 480, 540, 600),
)
"""Seconds after ready at which a window ends and the next begins."""

LATE_SECONDS = 300.0
MAX_LATE = int(STEADY_SECONDS / LATE_SECONDS)


class StartKind(StrEnum):
    NODE = "node"  # all of it
    FRONT = "front"  # a new front under the same supervisor: host memory is lost, files are not
    ENGINE = "engine"  # the node lived; an engine came back to a group after all of that group's sessions had ended


class LastEnd(StrEnum):
    """How the life before ended."""

    FIRST = "first"  # there was none, as far as is known
    CLEAN = "clean"
    KILLED = "killed"  # by SIGKILL, or nobody lived to say
    CRASHED = "crashed"
    MACHINE = "machine"  # the machine itself was started again
    UNKNOWN = "unknown"


class Window(msgspec.Struct, frozen=True, array_like=True):
    """What happened in `seconds` from `begins` seconds after ready on. `waits` counts acquires by how long they took,
    as `tierkv.metrics.Latency` does; `asked_prefill_seconds` and `missed_prefill_seconds` are what computing
    the tokens would cost an engine that were asked for, and those that were not granted."""

    begins: float = 0.0
    seconds: float = 0.0
    asked_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    stored_tokens: int = 0
    waits: list[int] = []
    wait_seconds: float = 0.0
    asked_prefill_seconds: float = 0.0
    missed_prefill_seconds: float = 0.0

    @property
    def ends(self) -> float:
        return self.begins + self.seconds

    @property
    def acquires(self) -> int:
        return sum(self.waits)

    @property
    def all_hit_tokens(self) -> int:
        return sum(self.hit_tokens.values())


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start. `number` tells starts apart (milliseconds of node time); `group` (first digits) is an engine's only.
    `ready_seconds` after `began` the node served. `before` is what was usual in the life before. `heard` is when this
    record was last brought up to date. `ended`: the node stopped in order after that. `rate` is the
    prefill_tokens_per_second in force, which counts until engines have told their own."""

    number: int
    kind: StartKind
    began: float
    last_end: LastEnd
    problem: str = ""
    last_heard: float = 0.0
    boot: str = ""
    group: str = ""
    rate: float = 0.0
    is_ready: bool = False
    ready_seconds: float = 0.0
    before: Window | None = None
    windows: tuple[Window, ...] = ()
    late: tuple[Window, ...] = ()
    heard: float = 0.0
    ended: bool = False
    format: int = 1


def difference(later: Window, earlier: Window, begins: float, seconds: float) -> Window:
    """What happened between two moments, each given as all that had happened until then."""
    waits = later.waits
    if earlier.waits:
        waits = [one - other for one, other in zip(later.waits, earlier.waits, strict=True)]
    return Window(
        begins=begins,
        seconds=seconds,
        asked_tokens=later.asked_tokens - earlier.asked_tokens,
        hit_tokens={tier: count - earlier.hit_tokens.get(tier, 0) for tier, count in later.hit_tokens.items()},
        stored_tokens=later.stored_tokens - earlier.stored_tokens,
        waits=waits,
        wait_seconds=later.wait_seconds - earlier.wait_seconds,
        asked_prefill_seconds=later.asked_prefill_seconds - earlier.asked_prefill_seconds,
        missed_prefill_seconds=later.missed_prefill_seconds - earlier.missed_prefill_seconds,
    )


def total(windows: tuple[Window, ...] | list[Window]) -> Window:
    """Of windows in order. None at all is an empty window."""
    return reduce(_add, windows) if windows else Window()


def _add(one: Window, other: Window) -> Window:
    waits = one.waits or other.waits
    if one.waits and other.waits:
        waits = [a + b for a, b in zip(one.waits, other.waits, strict=True)]
    tiers = one.hit_tokens | other.hit_tokens
    return Window(
        begins=one.begins,
        seconds=one.seconds + other.seconds,
        asked_tokens=one.asked_tokens + other.asked_tokens,
        hit_tokens={tier: one.hit_tokens.get(tier, 0) + other.hit_tokens.get(tier, 0) for tier in tiers},
        stored_tokens=one.stored_tokens + other.stored_tokens,
        waits=waits,
        wait_seconds=one.wait_seconds + other.wait_seconds,
        asked_prefill_seconds=one.asked_prefill_seconds + other.asked_prefill_seconds,
        missed_prefill_seconds=one.missed_prefill_seconds + other.missed_prefill_seconds,
    )


def usual(start: Start) -> Window | None:
    """What was usual at the end of a life: its last half hour, without its first minute. None where nothing was asked
    then. A life that was too short to say is believed to have become what the one before it was."""
    windows = (*start.windows, *start.late)
    since = max(FIRST_SECONDS, windows[-1].ends - STEADY_SECONDS) if windows else 0.0
    found = total([one for one in windows if one.begins >= since])
    if found.seconds < ENOUGH_SECONDS and start.before is not None:
        return start.before
    return found if found.asked_tokens else None


def predecessor(starts: list[Start], before: float) -> Start | None:
    """The last life of the node that began earlier than `before`."""
    lives = [start for start in starts if start.kind is not StartKind.ENGINE and start.began < before]
    return max(lives, key=lambda start: start.began, default=None)
