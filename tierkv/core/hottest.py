"""The prefixes that save the most: a bounded table, kept as leases are granted.

    extents of a lease   | A | B | C | D | E | F |      a run: those that are hit about as often as its first
    their hits           | 90  90  88 | 12  11 | 1 |    so many leases, so far
    prefixes             | ..... 0-C | .. D-E |         as far as a run goes; what was hit once is none

Each block that a lease got is counted once, for the run that it is in. What is counted of a prefix is what was seen
since it came into the table: never too much. When there are twice as many as are kept, those that saved the least
lately go; one that comes back is placed by what its lifetime suggests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.core.extent import Extent
from tierkv.core.grants import Segment

if TYPE_CHECKING:
    from tierkv.core.ledger import Group

KEPT = 512
HALF_LIFE_SECONDS = 600.0
"""After so long what was saved counts half as much for the order."""

SAME_PREFIX = 0.8
"""An extent with at least this share of the hits of a run's first is more of the same prefix."""

LEAST_HITS = 2
_MAX_WEIGHT = 2.0**40


@dataclass(slots=True)
class _Savings:
    since: float
    recent: float  # blocks saved, by the weight of each hit's time
    first_token: int = 0  # of the run, when it was last hit
    hits: int = 0
    blocks: int = 0
    depths: float = 0.0  # of the blocks saved, summed up, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """Tokens [0, tokens) of prompts of a group; those before `first_token` are hit more often, and are a prefix of
    their own. `key`, that of its last block, names it. Since `since` it was hit `hits` times, which saved
    `saved_tokens`, at `mean_depth` tokens behind the begin of their prompts on average. `recent_tokens` were saved
    lately: what the order is by."""

    group: bytes
    key: bytes
    first_token: int
    tokens: int
    hits: int
    saved_tokens: int
    mean_depth: float
    recent_tokens: float
    since: float
    last_used: float


class Hottest:
    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._savings: dict[Extent, _Savings] = {}
        self._floor = 0.0  # recent blocks of the least that was kept, by the weights of then
        self._epoch: float | None = None

    def __len__(self) -> int:
        return len(self._savings)

    def note(self, path: Iterable[Segment], now: float) -> None:
        """A lease was granted on `path`, whose extents have been touched for it."""
        first = last = None
        blocks, least = 0, 0.0
        for segment in path:
            extent = segment.extent
            if extent.hits < least and first is not None and last is not None:
                self._count(first, last, blocks, now)
                first, blocks = None, 0
            if first is None:
                first, least = extent, SAME_PREFIX * extent.hits
            last = extent
            blocks += segment.blocks
        if first is not None and last is not None:
            self._count(first, last, blocks, now)

    def _count(self, first: Extent, last: Extent, blocks: int, now: float) -> None:
        """A run was hit."""
        if last.hits < LEAST_HITS:
            return
        weight = self._weight(now)
        known = self._savings.get(last)
        if known is None:
            lately = min(1.0, HALF_LIFE_SECONDS / max(1.0, now - last.created))
            recent = (last.hits - 1) * lately * blocks * weight
            if recent <= self._floor and len(self._savings) >= self._kept:
                return
            known = self._savings[last] = _Savings(now, recent)
        known.first_token = first.first_token
        known.hits += 1
        known.blocks += blocks
        known.recent += blocks * weight
        known.depths += blocks * (first.first_token + last.first_token) / 2
        if len(self._savings) > 2 * self._kept:
            self._prune()

    def prefixes(self, groups: Mapping[bytes, Group], most: int, now: float) -> list[HotPrefix]:
        """The hottest first."""
        self._drop_gone()
        weight = self._weight(now)
        best = sorted(self._savings.items(), key=lambda item: -item[1].recent)[:most]
        return [_prefix(last, one, groups[last.group].block_tokens, weight) for last, one in best]

    # ---- what is kept

    def _weight(self, now: float) -> float:
        """Of a hit now, in units of one at the epoch: doubling it with time is halving all that was before."""
        if self._epoch is None:
            self._epoch = now
        weight: float = 2.0 ** ((now - self._epoch) / HALF_LIFE_SECONDS)
        if weight > _MAX_WEIGHT:
            for one in self._savings.values():
                one.recent /= weight
            self._epoch, self._floor, weight = now, self._floor / weight, 1.0
        return weight

    def _prune(self) -> None:
        self._drop_gone()
        if len(self._savings) > self._kept:
            best = sorted(self._savings.items(), key=lambda item: -item[1].recent)[: self._kept]
            self._savings = dict(best)
            self._floor = best[-1][1].recent

    def _drop_gone(self) -> None:
        for extent in [extent for extent in self._savings if not extent.in_tree]:
            del self._savings[extent]


def _prefix(last: Extent, savings: _Savings, block_tokens: int, weight: float) -> HotPrefix:
    return HotPrefix(
        group=last.group,
        key=last.block_key(last.num_blocks - 1),
        first_token=savings.first_token,
        tokens=last.first_token + last.num_blocks * block_tokens,
        hits=savings.hits,
        saved_tokens=savings.blocks * block_tokens,
        mean_depth=savings.depths / savings.blocks + last.num_blocks * block_tokens / 2,
        recent_tokens=savings.recent / weight * block_tokens,
        since=savings.since,
        last_used=last.last_used,
    )
