"""Blocks that are offered for storing, and what they rank: admission to host memory.

All are taken while there is room. When room has to be made, the last of them is held against the next victim:

    offered      8 9 10 11 12        11 and 12 are worth less than what would go for them:
    granted      8 9 10              a shorter reservation, and two ghosts, so that the next use of them is known as one
"""

from __future__ import annotations

from bisect import bisect_right

from tierkv.core.ghosts import Ghost, Stretch
from tierkv.core.ledger import Group, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.value.kinds import kind_of_new, kind_of_used
from tierkv.core.value.order import Rank


class Offered:
    """`missing` are their indices in the prompt, `keys` their keys.

    Of a group with several ranks the one that asks first decides: what another rank was granted comes in, and what
    another rank was refused a moment ago is refused, or all but one would store for nothing."""

    def __init__(
        self,
        ledger: Ledger,
        group: Group,
        rank: int,
        missing: list[int],
        keys: list[bytes],
        suffix_tokens: int,
        now: float,
    ) -> None:
        self._ledger = ledger
        self._group = group
        self._rank = rank
        self._missing = missing
        self._keys = keys
        self._now = now
        self._order = ledger.host_order(group.slot_bytes)
        self._kind_of_new = kind_of_new(suffix_tokens, ledger.reuse.tuning)
        self._ghosts = ledger.ghosts.along(group.spec.group, keys) if ledger.ghosts else []
        self._starts = [stretch.start for stretch in self._ghosts]

    @property
    def welcome(self) -> int:
        """How many no other rank has been refused."""
        if self._group.ranks == 1:
            return len(self._keys)
        fresh = self._now - self._ledger.limits.staged_seconds
        refused = (
            stretch.start
            for stretch in self._ghosts
            if stretch.ghost.reason is Reason.WORTH_LESS
            and not stretch.ghost.asked
            and stretch.ghost.evicted_at > fresh
            and not self._is_coming(stretch.start)
        )
        return min(refused, default=len(self._keys))

    def rank_of(self, index: int) -> Rank | None:
        """What block `index` of those offered would rank; None: it is not to be refused."""
        if self._group.ranks > 1 and self._is_coming(index):
            return None
        if self._keys[index] in self._ledger.pins.wanted:
            return None
        return self._order.rank_of_new(self._kind(index), self._group.seconds_per_byte)

    def note_refused(self, first: int) -> None:
        """Those from `first` on are not stored."""
        ledger, group = self._ledger, self._group
        known = [stretch for stretch in self._ghosts if stretch.start + stretch.ghost.blocks > first]
        for start, stop in _gaps(first, len(self._keys), known):
            for run_start, run_stop in _runs(self._missing, start, stop):
                keys = self._keys[run_start:run_stop]
                ghost = Ghost(
                    group=group.spec.group,
                    key=keys[0],
                    keys=b"".join(keys),
                    blocks=len(keys),
                    first_token=self._missing[run_start] * group.block_tokens,
                    block_tokens=group.block_tokens,
                    hits=0,
                    last_used=self._now,
                    last_cached_use=self._now,
                    evicted_at=self._now,
                    tier="host",
                    reason=Reason.WORTH_LESS,
                    kind=self._kind_of_new,
                )
                ledger.reuse.refuse(ghost)
                ledger.reuse.forget(ledger.ghosts.note(ghost), self._now)

    def _is_coming(self, index: int) -> bool:
        """Another rank has stored it, or is about to."""
        key = self._keys[index]
        return key in self._ledger.staged or any(key in writing for writing in self._ledger.writing.values())

    def _kind(self, index: int) -> int:
        at = bisect_right(self._starts, index) - 1
        if at < 0:
            return self._kind_of_new
        ghost = self._ghosts[at].ghost
        if index >= self._starts[at] + ghost.blocks:
            return self._kind_of_new
        if ghost.is_of_this_use(self._now):
            return ghost.kind
        return kind_of_used(ghost.uses + 1, self._now - ghost.last_used, self._ledger.reuse.tuning)


def _gaps(first: int, end: int, known: list[Stretch]) -> list[tuple[int, int]]:
    """The stretches of [first, end) that no ghost covers."""
    gaps = []
    for stretch in known:
        if stretch.start > first:
            gaps.append((first, stretch.start))
        first = max(first, stretch.start + stretch.ghost.blocks)
    if first < end:
        gaps.append((first, end))
    return gaps


def _runs(missing: list[int], start: int, stop: int) -> list[tuple[int, int]]:
    """[start, stop) cut where the blocks are not neighbours in the prompt."""
    borders = [at for at in range(start + 1, stop) if missing[at] != missing[at - 1] + 1]
    return list(zip([start, *borders], [*borders, stop], strict=True))
