"""The prefixes that save the most: a bounded table of extents, kept as leases are granted.

An extent comes in with its second hit. When there are twice as many as are kept, those that saved the least lately go;
one that comes back is placed by what its lifetime suggests. So a prefix that is hit all the time is in it, whatever
else comes by, and what is counted of it is what was seen since it came in: never too much.
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
"""An extent with at least this share of the hits of the one before it is more of the same prefix."""

_MAX_WEIGHT = 2.0**40


@dataclass(slots=True)
class _Savings:
    since: float
    recent: float  # blocks saved, by the weight of each hit's time
    hits: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefix:
    """Tokens [0, tokens) of prompts of a group, as far as they lie in extents that are hit alike; those before
    `first_token` are hit more often, and are a prefix of their own. `key`, that of the last extent of it, names it.
    Since `since` it was hit `hits` times, which saved `saved_tokens`, at `mean_depth` tokens behind the begin of their
    prompts on average. `recent_tokens` were saved lately: what the order is by."""

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
        self._epoch: float | None = None

    def __len__(self) -> int:
        return len(self._savings)

    def note(self, path: Iterable[Segment], now: float) -> None:
        """A lease was granted on `path`, whose extents have been touched for it."""
        weight = self._weight(now)
        savings = self._savings
        for segment in path:
            extent = segment.extent
            known = savings.get(extent)
            if known is None:
                if extent.hits < 2:
                    continue
                lately = min(1.0, HALF_LIFE_SECONDS / max(1.0, now - extent.created))
                known = savings[extent] = _Savings(now, (extent.hits - 1) * lately * segment.blocks * weight)
            known.hits += 1
            known.blocks += segment.blocks
            known.recent += segment.blocks * weight
        if len(savings) > 2 * self._kept:
            self._prune()

    def prefixes(self, groups: Mapping[bytes, Group], most: int, now: float) -> list[HotPrefix]:
        """The hottest first."""
        self._drop_gone()
        weight = self._weight(now)
        continued = {above for extent in self._savings if (above := self._more_of(extent)) is not None}
        found = [
            self._prefix(extent, groups[extent.group].block_tokens, weight)
            for extent in self._savings
            if extent not in continued
        ]
        found.sort(key=lambda prefix: -prefix.recent_tokens)
        return found[:most]

    def _more_of(self, extent: Extent) -> Extent | None:
        """The extent before it, if this one is more of the same prefix."""
        above = extent.above.owner if extent.above is not None else None
        if above is None or above not in self._savings:
            return None
        is_same = self._savings[extent].hits >= SAME_PREFIX * self._savings[above].hits
        return above if is_same else None

    def _prefix(self, last: Extent, block_tokens: int, weight: float) -> HotPrefix:
        chain = [last]
        while (above := self._more_of(chain[-1])) is not None:
            chain.append(above)
        savings = [self._savings[extent] for extent in chain]
        blocks = sum(one.blocks for one in savings)
        depths = (
            one.blocks * (extent.first_token + extent.num_blocks * block_tokens / 2)
            for extent, one in zip(chain, savings, strict=True)
        )
        return HotPrefix(
            group=last.group,
            key=last.key,
            first_token=chain[-1].first_token,
            tokens=last.first_token + last.num_blocks * block_tokens,
            hits=max(one.hits for one in savings),
            saved_tokens=blocks * block_tokens,
            mean_depth=sum(depths) / max(1, blocks),
            recent_tokens=sum(one.recent for one in savings) / weight * block_tokens,
            since=min(one.since for one in savings),
            last_used=max(extent.last_used for extent in chain),
        )

    # ---- what is kept

    def _weight(self, now: float) -> float:
        """Of a hit now, in units of one at the epoch: doubling it with time is halving all that was before."""
        if self._epoch is None:
            self._epoch = now
        weight: float = 2.0 ** ((now - self._epoch) / HALF_LIFE_SECONDS)
        if weight > _MAX_WEIGHT:
            for one in self._savings.values():
                one.recent /= weight
            self._epoch, weight = now, 1.0
        return weight

    def _prune(self) -> None:
        self._drop_gone()
        if len(self._savings) > self._kept:
            best = sorted(self._savings.items(), key=lambda item: -item[1].recent)
            self._savings = dict(best[: self._kept])

    def _drop_gone(self) -> None:
        for extent in [extent for extent in self._savings if not extent.in_tree]:
            del self._savings[extent]
