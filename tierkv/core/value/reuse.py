"""Books of exposures: what happens to extents and ghosts, told to the hazards.

Each block that is cached or remembered waits in exactly one kind, since exactly one time: those of its segment.

    stored -> waits -> used -> waits ...      an extent's head and its cold tail, each with uses and kind
                    -> evicted -> asked for   a ghost goes on waiting; asking for it is a use like any other
                    -> forgotten, purged
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tierkv.core.extent import Extent
from tierkv.core.ghosts import Ghost, Stretch
from tierkv.core.grants import Segment
from tierkv.core.value.hazards import TOKENS_OF_A_UNIT, Hazards
from tierkv.core.value.kinds import kind_of_new, kind_of_used
from tierkv.core.value.tuning import AS_MEASURED, Tuning


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks with one history."""

    blocks: int
    hits: int
    misses: int
    kind: int

    @property
    def uses(self) -> int:
        return self.hits + self.misses


class Reuse:
    def __init__(self, tuning: Tuning = AS_MEASURED) -> None:
        self.tuning = tuning
        self.hazards = Hazards(tuning)

    def used(self, path: Iterable[Segment], block_tokens: int, now: float) -> None:
        """A hit on these stretches of extents. Most of a path was used together before, and is booked as one."""
        unit = block_tokens / TOKENS_OF_A_UNIT
        ended: Counter[tuple[int, float]] = Counter()  # blocks, by kind and last use
        began: Counter[int] = Counter()
        for segment in path:
            extent, blocks, hot = segment.extent, segment.blocks, segment.extent.hot_blocks
            if hot:
                ended[extent.kind, extent.last_used] += min(blocks, hot)
            if blocks > hot:
                ended[extent.tail_kind, extent.tail_used] += blocks - hot
            elif blocks < hot < extent.num_blocks:  # what was cold joins what of the hot ones was not reached
                cold = (extent.num_blocks - hot) * unit
                self._move(cold, extent.tail_kind, extent.tail_used, extent.kind, extent.last_used)
            extent.touch(blocks, now, self.tuning)
            began[extent.kind] += blocks
        for (kind, used), blocks in ended.items():
            self.hazards.end(kind, used, now, blocks * unit)
        for kind, blocks in began.items():
            self.hazards.begin(kind, now, blocks * unit)

    def asked_for(self, ghost: Ghost, now: float) -> Ghost:
        """Evicted blocks are asked for. What to remember of them from here on."""
        self._end_ghost(ghost, now)
        kind = kind_of_used(ghost.uses + 1, now - ghost.last_used, self.tuning)
        self.hazards.begin(kind, now, ghost.tokens / TOKENS_OF_A_UNIT)
        return replace(ghost, misses=ghost.misses + 1, kind=kind, last_used=now, asked=True)

    def pieces(self, blocks: int, suffix_tokens: int, claimed: list[Stretch], now: float) -> list[Piece]:
        """The histories of a run of blocks that is stored, of which some were known. What `asked_for` has counted as a
        use of them is not counted again."""
        pieces = []
        at = 0
        for stretch in [*claimed, None]:
            start = stretch.start if stretch is not None else blocks
            if start > at:
                pieces.append(Piece(start - at, 0, 0, kind_of_new(suffix_tokens, self.tuning)))
            if stretch is not None:
                pieces.append(self._claim(stretch.ghost, now))
                at = start + stretch.ghost.blocks
        return pieces

    def _claim(self, ghost: Ghost, now: float) -> Piece:
        if ghost.is_of_this_use(now):
            self.hazards.withdraw(ghost.kind, ghost.last_used, ghost.tokens / TOKENS_OF_A_UNIT)
            return Piece(ghost.blocks, ghost.hits, ghost.misses, ghost.kind)
        self._end_ghost(ghost, now)
        kind = kind_of_used(ghost.uses + 1, now - ghost.last_used, self.tuning)
        return Piece(ghost.blocks, ghost.hits, ghost.misses + 1, kind)

    def grow(self, extent: Extent, pieces: list[Piece], block_tokens: int, now: float) -> None:
        """`pieces` are appended to what the extent has; all of it is in use now. An extent has two segments: of more
        than two histories the last ones become its tail, with that of the very last."""
        unit = block_tokens / TOKENS_OF_A_UNIT
        hot, cold = extent.hot_blocks, extent.num_blocks - extent.hot_blocks
        there = []
        if hot:
            self.hazards.withdraw(extent.kind, extent.last_used, hot * unit)
            there.append(Piece(hot, extent.hits, extent.misses, extent.kind))
        if cold:
            self.hazards.withdraw(extent.tail_kind, extent.tail_used, cold * unit)
            there.append(Piece(cold, extent.tail_hits, extent.tail_misses, extent.tail_kind))
        joined = _join([*there, *pieces], _is_equal)
        if len(joined) > 2:
            joined = _join(joined, _is_equal_in_worth)
        head, tail = joined[0], joined[-1]
        tail_blocks = sum(piece.blocks for piece in joined[1:])
        extent.hot_blocks = head.blocks
        extent.hits, extent.misses, extent.kind = head.hits, head.misses, head.kind
        extent.tail_hits, extent.tail_misses, extent.tail_kind = tail.hits, tail.misses, tail.kind
        extent.last_used = extent.tail_used = now
        self.hazards.begin(head.kind, now, head.blocks * unit)
        if tail_blocks:
            self.hazards.begin(tail.kind, now, tail_blocks * unit)

    def found(self, extent: Extent, claimed: list[Stretch], block_tokens: int) -> None:
        """It was in the disk tier, put there by another node, or thought gone: what is `claimed` of ghosts waits as it
        does. That is no use."""
        for stretch in claimed:
            ghost = stretch.ghost
            self.hazards.withdraw(ghost.kind, ghost.last_used, ghost.tokens / TOKENS_OF_A_UNIT)
        if self.hazards.counts(extent.last_used):
            self.hazards.begin(extent.kind, extent.last_used, extent.num_blocks * block_tokens / TOKENS_OF_A_UNIT)

    def used_elsewhere(self, extent: Extent, last_used: float, block_tokens: int) -> None:
        """By another node, which says when and nothing more: it waits since then."""
        units = extent.hot_blocks * block_tokens / TOKENS_OF_A_UNIT
        if self.hazards.counts(extent.last_used):
            self.hazards.withdraw(extent.kind, extent.last_used, units)
        if self.hazards.counts(last_used):
            self.hazards.begin(extent.kind, last_used, units)
        extent.last_used = last_used

    def cut(self, extent: Extent, num_blocks: int, block_tokens: int) -> None:
        """The blocks from `num_blocks` on are forgotten as if they had never been."""
        unit = block_tokens / TOKENS_OF_A_UNIT
        cold = extent.num_blocks - max(num_blocks, extent.hot_blocks)
        hot = extent.hot_blocks - num_blocks
        if cold > 0:
            self.hazards.withdraw(extent.tail_kind, extent.tail_used, cold * unit)
        if hot > 0:
            self.hazards.withdraw(extent.kind, extent.last_used, hot * unit)

    def purge(self, ghosts: list[Ghost]) -> None:
        for ghost in ghosts:
            self.hazards.withdraw(ghost.kind, ghost.last_used, ghost.tokens / TOKENS_OF_A_UNIT)

    def forget(self, ghosts: list[Ghost], now: float) -> None:
        """There are too many: of these it will not be known when they are used again."""
        for ghost in ghosts:
            self.hazards.forget(ghost.kind, ghost.last_used, now, ghost.tokens / TOKENS_OF_A_UNIT)

    def refuse(self, ghost: Ghost) -> None:
        """New blocks that were not stored: they wait like others."""
        self.hazards.begin(ghost.kind, ghost.last_used, ghost.tokens / TOKENS_OF_A_UNIT)

    def _end_ghost(self, ghost: Ghost, now: float) -> None:
        self.hazards.end(ghost.kind, ghost.last_used, now, ghost.tokens / TOKENS_OF_A_UNIT)

    def _move(self, units: float, kind: int, used: float, new_kind: int, new_used: float) -> None:
        self.hazards.withdraw(kind, used, units)
        self.hazards.begin(new_kind, new_used, units)


def _is_equal(one: Piece, other: Piece) -> bool:
    return one.hits == other.hits and _is_equal_in_worth(one, other)


def _is_equal_in_worth(one: Piece, other: Piece) -> bool:
    """Blocks never used again are of one suffix, whose length the last of them knows best."""
    return one.uses == other.uses and (one.kind == other.kind or not other.uses)


def _join(pieces: list[Piece], is_one: Callable[[Piece, Piece], bool]) -> list[Piece]:
    """Neighbours with one history; where they differ in hits, with the fewer ones."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and is_one(last, piece):
            hits = min(last.hits, piece.hits)
            joined[-1] = Piece(last.blocks + piece.blocks, hits, piece.uses - hits, piece.kind)
        else:
            joined.append(piece)
    return joined
