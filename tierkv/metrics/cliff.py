"""What a restart costs, read from the record of a start: the first minute against what was usual, and how long it took
to be back there.

    lost prefill   seconds that engines computed, from ready on, over what the same prompts would have cost at the usual
                   share of misses; until the hit rate was back, or as far as the record goes
    away prefill   an estimate of the same for the time in which the node was away: what it saved in so many seconds
                   when all was as usual

An estimate of a time to first token is what acquires took and what computing the missed tokens takes, divided by the
acquires. Queues of the engine are not in it, nor is the copy of what was hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tierkv.core.starts import FIRST_SECONDS, Start, StartKind, Window, total, usual
from tierkv.metrics.snapshot import LATENCY_BOUNDS

BACK_SHARE = 0.9
"""Of the usual hit rate: from there on a start counts as over."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a stretch of time. None where nothing was asked in it."""

    seconds: float
    asked_tokens: int
    hit_tokens: dict[str, int]
    stored_tokens: int
    acquires: int
    hit_rate: float | None
    first_token_seconds: float | None
    acquire_p50_seconds: float | None
    acquire_p99_seconds: float | None
    asked_prefill_seconds: float
    missed_prefill_seconds: float


@dataclass(frozen=True, slots=True)
class Cliff:
    """`usual_from`: "before", the life that ended; "after", the end of this one, where no record says what was before;
    empty where neither says. `back_seconds` after ready the hit rate was back; None when it was not, as far as the
    record goes, or nobody knows what is usual. `watched_seconds` after ready the record ends."""

    start: Start
    first: Figures
    usual: Figures | None
    usual_from: str
    lost_prefill_seconds: float | None
    away_prefill_seconds: float | None
    away_seconds: float | None
    back_seconds: float | None
    watched_seconds: float

    @property
    def cost_seconds(self) -> float | None:
        if self.lost_prefill_seconds is None:
            return None
        return self.lost_prefill_seconds + (self.away_prefill_seconds or 0.0)


def figures(window: Window) -> Figures:
    asked, acquires = window.asked_tokens, window.acquires
    return Figures(
        seconds=window.seconds,
        asked_tokens=asked,
        hit_tokens=dict(window.hit_tokens),
        stored_tokens=window.stored_tokens,
        acquires=acquires,
        hit_rate=window.all_hit_tokens / asked if asked else None,
        first_token_seconds=(window.missed_prefill_seconds + window.wait_seconds) / acquires if acquires else None,
        acquire_p50_seconds=quantile(window.waits, 0.5),
        acquire_p99_seconds=quantile(window.waits, 0.99),
        asked_prefill_seconds=window.asked_prefill_seconds,
        missed_prefill_seconds=window.missed_prefill_seconds,
    )


def cliff_of(start: Start) -> Cliff:
    known, usual_from = start.before, "before"
    if known is None or not known.asked_tokens:
        after = usual(start)
        known, usual_from = after, "after" if after is not None else ""
    windows = (*start.windows, *start.late)
    first = total([window for window in windows if window.begins < FIRST_SECONDS])
    back = None if known is None else _back(windows, known)
    return Cliff(
        start=start,
        first=figures(first),
        usual=None if known is None else figures(known),
        usual_from=usual_from,
        lost_prefill_seconds=_lost(start.windows, known, back),
        away_prefill_seconds=_lost_while_away(start, known),
        away_seconds=_away(start),
        back_seconds=back,
        watched_seconds=windows[-1].ends if windows else 0.0,
    )


def quantile(counts: list[int], share: float) -> float | None:
    """Of durations counted by bucket: where in its bucket it lies is taken from how many are in there. None without
    any; the last bound for what is slower than all of them."""
    if len(counts) != len(LATENCY_BOUNDS) + 1 or not sum(counts):
        return None
    left = share * sum(counts)
    for count, (low, high) in zip(counts, pairwise((0.0, *LATENCY_BOUNDS)), strict=False):
        if count and left <= count:
            return low + (high - low) * left / count
        left -= count
    return LATENCY_BOUNDS[-1]


def _back(windows: tuple[Window, ...], known: Window) -> float | None:
    """The end of the first window in which the hit rate was back, and was so in the minute from there on, and in all
    that is on record after it: one lucky window is no return."""

    def is_back(some: tuple[Window, ...]) -> bool:
        found = total(some)
        wanted = BACK_SHARE * known.all_hit_tokens * found.asked_tokens
        return found.asked_tokens > 0 and found.all_hit_tokens * known.asked_tokens >= wanted

    for index, window in enumerate(windows):
        rest = windows[index:]
        minute = tuple(one for one in rest if one.begins < window.begins + FIRST_SECONDS)
        if is_back((window,)) and is_back(minute) and is_back(rest):
            return window.ends
    return None


def _lost(windows: tuple[Window, ...], known: Window | None, back: float | None) -> float | None:
    if known is None or not known.asked_prefill_seconds:
        return None
    usual_share = known.missed_prefill_seconds / known.asked_prefill_seconds
    until = windows if back is None else [window for window in windows if window.ends <= back]
    return sum(max(0.0, one.missed_prefill_seconds - usual_share * one.asked_prefill_seconds) for one in until)


def _lost_while_away(start: Start, known: Window | None) -> float | None:
    """An engine's start costs nothing of that kind: the node was there."""
    away = _away(start)
    if away is None or known is None or not known.seconds:
        return None
    return (known.asked_prefill_seconds - known.missed_prefill_seconds) / known.seconds * away


def _away(start: Start) -> float | None:
    """From its beginning until it served. How long nobody had started it is not the node's to say."""
    return start.ready_seconds if start.is_ready and start.kind is not StartKind.ENGINE else None
