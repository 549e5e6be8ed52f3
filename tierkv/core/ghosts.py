"""Ghosts: what is remembered of blocks that no tier has any more. Keys and counts, never bytes.

    extent    | 0 1 2 3 4 5 6 7 |
    evicted             4 | 5 6 | 7       three steps, of blocks used alike: one ghost of four blocks
    asked for 0 1 2 3 4 5                 regretted: two of them

A ghost goes when its blocks are stored again (`claim`), when its group is purged, or when it is the oldest of too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason

SAME_USE_SECONDS = 60.0
"""An engine that was refused room and asks for it again so soon is still at the same request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ghost:
    """Consecutive blocks of one prefix, `key` that of the first, `keys` packed those of all. `tier` is the last that
    had them. `hits` and `last_cached_use` are as they were when they went. To be asked for (`asked`, since then) is a
    use as well: it counts in `misses` and `last_used`, and `kind` is that of the last use."""

    group: bytes
    key: bytes
    keys: bytes
    blocks: int
    first_token: int
    block_tokens: int
    hits: int
    misses: int = 0
    last_used: float
    last_cached_use: float
    evicted_at: float
    tier: str
    reason: Reason
    kind: int = 0  # core/value/kinds.py
    asked: bool = False

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def uses(self) -> int:
        return self.hits + self.misses

    def is_of_this_use(self, now: float) -> bool:
        """Whether who stores its blocks at `now` is who asked for them, or was just refused them: no further use."""
        return self.asked or (self.reason is Reason.WORTH_LESS and now - self.evicted_at < SAME_USE_SECONDS)

    def part(self, start: int, stop: int) -> Ghost:
        """Blocks [start, stop) of it."""
        keys = self.keys[start * KEY_BYTES : stop * KEY_BYTES]
        return replace(
            self,
            key=keys[:KEY_BYTES],
            keys=keys,
            blocks=stop - start,
            first_token=self.first_token + start * self.block_tokens,
        )

    def is_like(self, other: Ghost) -> bool:
        """Whether both went for the same reason, after the same use: what is evicted block by block is one story."""
        mine = (self.group, self.hits, self.misses, self.kind, self.last_used, self.asked, self.tier, self.reason)
        its = (
            other.group,
            other.hits,
            other.misses,
            other.kind,
            other.last_used,
            other.asked,
            other.tier,
            other.reason,
        )
        return mine == its


@dataclass(frozen=True, slots=True)
class Stretch:
    """`ghost` covers the blocks of a prompt from `start` on, as far as the prompt goes along with it."""

    start: int
    ghost: Ghost


class Ghosts:
    """At most `limit` of them; of more, those that were noted first go."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: OrderedDict[bytes, Ghost] = OrderedDict()
        self.on_change: Callable[[Ghost, int], None] = lambda _ghost, _sign: None  # +1: it is one, -1: no more
        self.on_replaced: Callable[[Ghost], None] = lambda _ghost: None
        """Told of one whose place another takes that covered its blocks as well; `note` returns those instead."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Ghost]:
        return iter(self._by_key.values())

    def note(self, ghost: Ghost, behind: bytes = b"") -> list[Ghost]:
        """Blocks can't be matched any more. `behind` is the key of the block that follows them in their extent, if that
        went before them: then they join its ghost. Returns what is forgotten for it."""
        follower = self._by_key.get(behind)
        if follower is not None and ghost.is_like(follower):
            self._drop(behind)
            ghost = replace(ghost, keys=ghost.keys + follower.keys, blocks=ghost.blocks + follower.blocks)
        forgotten = [self._drop(ghost.key)] if ghost.key in self._by_key else []
        self._put(ghost)
        while len(self._by_key) > self._limit:
            forgotten.append(self._drop(next(iter(self._by_key))))
        return forgotten

    def find(self, group: bytes, key: bytes) -> Ghost | None:
        """The ghost whose first block has this key."""
        ghost = self._by_key.get(key)
        return ghost if ghost is not None and ghost.group == group else None

    def along(self, group: bytes, block_keys: list[bytes]) -> list[Stretch]:
        """The ghosts along a run of blocks, each cut to what the run has of it. A step a ghost where there are any, one
        call where there are none."""
        if self._by_key.keys().isdisjoint(block_keys):
            return []
        stretches = []
        index = 0
        while index < len(block_keys):
            ghost = self.find(group, block_keys[index])
            if ghost is None:
                index += 1
                continue
            blocks = _common_blocks(ghost.keys, block_keys, index)
            stretches.append(Stretch(index, ghost if blocks == ghost.blocks else ghost.part(0, blocks)))
            index += blocks
        return stretches

    def claim(self, group: bytes, block_keys: list[bytes]) -> list[Stretch]:
        """These blocks are stored again: forget them, and give back what was remembered. What was remembered of blocks
        behind them stays."""
        claimed = self.along(group, block_keys)
        for stretch in claimed:
            ghost = self._drop(stretch.ghost.key)
            if stretch.ghost.blocks < ghost.blocks:
                self._put(ghost.part(stretch.ghost.blocks, ghost.blocks))
        return claimed

    def put_back(self, ghost: Ghost) -> None:
        """What `claim` took out and is no less a ghost for that."""
        self._put(ghost)

    def forget(self, groups: frozenset[bytes] | None) -> list[Ghost]:
        """Nothing of these groups is remembered from here on; None: of any. Returns what was."""
        forgotten = [ghost for ghost in self if groups is None or ghost.group in groups]
        for ghost in forgotten:
            self._drop(ghost.key)
        return forgotten

    def _put(self, ghost: Ghost) -> None:
        replaced = self._by_key.get(ghost.key)
        if replaced is not None:
            self.on_change(replaced, -1)
            self.on_replaced(replaced)
        self._by_key[ghost.key] = ghost
        self.on_change(ghost, 1)

    def _drop(self, key: bytes) -> Ghost:
        ghost = self._by_key.pop(key)
        self.on_change(ghost, -1)
        return ghost


def _common_blocks(keys: bytes, block_keys: list[bytes], start: int) -> int:
    """How many of the packed `keys` are those of the run from `start` on: at least one, which the caller has seen."""
    blocks = 1
    while (
        blocks * KEY_BYTES < len(keys)
        and start + blocks < len(block_keys)
        and keys[blocks * KEY_BYTES : (blocks + 1) * KEY_BYTES] == block_keys[start + blocks]
    ):
        blocks += 1
    return blocks
