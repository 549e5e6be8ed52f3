"""Ghosts: what is remembered of blocks that no tier has any more. Keys and counts, never bytes.

    extent    | 0 1 2 3 4 5 6 7 |
    evicted             4 | 5 6 | 7       three steps, of blocks used alike: one ghost of four blocks
    asked for 0 1 2 3 4 5                 regretted: two of them

A ghost goes when its blocks are stored again (`claim`), when its group is purged, or when it is the oldest of too many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Ghost:
    """Consecutive blocks of one prefix, `key` that of the first, `keys` packed those of all. `tier` is the last that
    had them, `hits` and `last_used` theirs until then."""

    group: bytes
    key: bytes
    keys: bytes
    blocks: int
    first_token: int
    block_tokens: int
    hits: int
    last_used: float
    evicted_at: float
    tier: str
    reason: Reason

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

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
        mine = (self.group, self.hits, self.last_used, self.tier, self.reason)
        return mine == (other.group, other.hits, other.last_used, other.tier, other.reason)


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

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Ghost]:
        return iter(self._by_key.values())

    def note(self, ghost: Ghost, behind: bytes = b"") -> None:
        """Blocks can't be matched any more. `behind` is the key of the block that follows them in their extent, if that
        went before them: then they join its ghost."""
        follower = self._by_key.get(behind)
        if follower is not None and ghost.is_like(follower):
            del self._by_key[behind]
            ghost = replace(ghost, keys=ghost.keys + follower.keys, blocks=ghost.blocks + follower.blocks)
        self._by_key[ghost.key] = ghost
        self._by_key.move_to_end(ghost.key)
        while len(self._by_key) > self._limit:
            self._by_key.popitem(last=False)

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
            ghost = self._by_key.pop(stretch.ghost.key)
            if stretch.ghost.blocks < ghost.blocks:
                rest = ghost.part(stretch.ghost.blocks, ghost.blocks)
                self._by_key[rest.key] = rest
        return claimed

    def forget(self, groups: frozenset[bytes] | None) -> None:
        """Nothing of these groups is remembered from here on; None: of any."""
        for key in [ghost.key for ghost in self if groups is None or ghost.group in groups]:
            del self._by_key[key]


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
