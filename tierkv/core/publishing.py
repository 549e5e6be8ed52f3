"""How written blocks become visible: in runs behind their predecessor, in extents that grow and then new ones.

committed    | 7 8 9 10 11 |                        with block 6 visible, and every rank's part there: a run
extents      ... 6 7 8 | 9 10 11                    the first had room for two more
staged       13 14                                  wait for 12; when it comes they surface with it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.grants import TicketState
from tierkv.core.keys import TOKEN_BYTES, key_at
from tierkv.core.ledger import Group, Ledger, StagedBlock

Place = tuple[Extent, int]
"""An extent, and the index of a block within it."""


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks of one prompt that every rank has: `slots` per rank."""

    group: bytes
    index: int  # of the first, in its prompt
    parent: bytes
    block_keys: list[bytes]
    tokens: bytes
    extras: Mapping[int, Sequence[bytes]]  # by the index in the prompt
    suffix_tokens: int  # of the request that computed them, behind what was cached
    slots: list[list[int]]

    @classmethod
    def of_staged(cls, blocks: list[StagedBlock], ranks: int) -> Run:
        return cls(
            group=blocks[0].group,
            index=blocks[0].index,
            parent=blocks[0].parent,
            block_keys=[block.key for block in blocks],
            tokens=b"".join(block.tokens for block in blocks),
            extras={block.index: block.extras for block in blocks if block.extras},
            suffix_tokens=blocks[-1].suffix_tokens,
            slots=[[block.slots[rank] for block in blocks] for rank in range(ranks)],
        )

    def __len__(self) -> int:
        return len(self.block_keys)


class Publisher:
    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade

    def publish(self, ticket: TicketState, now: float) -> None:
        """Blocks whose predecessor is visible and whose ranks are all there appear, in runs; the others are staged."""
        is_shared = self._ledger.groups[ticket.group].ranks > 1
        for piece in self._pieces(ticket, now):
            if isinstance(piece, StagedBlock):
                self._stage(piece)
                continue
            if is_shared and piece.block_keys[0] not in self._ledger.staged:
                continue  # other ranks' blocks lay between: it has surfaced behind them, after an earlier run
            # Asked anew for each run: the last block of the one before may be this one's predecessor.
            place = self._ledger.tree.place(ticket.group, ticket.keys, piece.index - 1) if piece.index else None
            if place is not None or piece.index == 0:
                self._surface(piece, place, now)
            else:
                for block in self._blocks_of(piece, now):
                    self._stage(block)

    def _pieces(self, ticket: TicketState, now: float) -> Iterator[Run | StagedBlock]:
        """The ticket's blocks in order: those that every rank has as runs, the others one by one."""
        ledger = self._ledger
        ranks = ledger.groups[ticket.group].ranks
        runs = list(self._new_runs(ticket)) if ranks == 1 else []
        if runs and self._are_all_new(ticket, runs):
            yield from runs
            return
        run: list[StagedBlock] = []
        for block in list(self._filled_blocks(ticket, now)):
            is_complete = len(block.slots) == ranks
            if run and not (is_complete and run[-1].index + 1 == block.index):
                yield Run.of_staged(run, ranks)
                run = []
            if is_complete:
                run.append(block)
            else:
                yield block
        if run:
            yield Run.of_staged(run, ranks)

    def _new_runs(self, ticket: TicketState) -> Iterator[Run]:
        """The whole ticket, cut where the blocks it was granted are not neighbours."""
        blocks = ticket.blocks
        step = self._ledger.groups[ticket.group].block_tokens * TOKEN_BYTES
        borders = [0, len(blocks)]
        if blocks[-1] - blocks[0] + 1 != len(blocks):
            borders[1:1] = [at for at, (one, two) in enumerate(pairwise(blocks), 1) if two != one + 1]
        for start, stop in pairwise(borders):
            index = blocks[start]
            token = (index - ticket.first) * step
            yield Run(
                group=ticket.group,
                index=index,
                parent=key_at(ticket.keys, index - 1) if index else ticket.group,
                block_keys=ticket.block_keys[start:stop],
                tokens=ticket.tokens[token : token + (stop - start) * step],
                extras=ticket.extras,
                suffix_tokens=ticket.suffix_tokens,
                slots=[ticket.offsets[start:stop]],
            )

    def _are_all_new(self, ticket: TicketState, runs: list[Run]) -> bool:
        """Nobody has made any of the blocks meanwhile. One that is in the tree is a head, or its extent goes back to
        before the run it is in: then the run's first block is in the tree as well."""
        ledger = self._ledger
        return (
            ledger.staged.keys().isdisjoint(ticket.block_keys)
            and ledger.tree.knows_none(ticket.block_keys)
            and all(ledger.tree.place(ticket.group, ticket.keys, run.index) is None for run in runs)
        )

    def _filled_blocks(self, ticket: TicketState, now: float) -> Iterator[StagedBlock]:
        """The ticket's blocks with this rank's slots in them; what another ticket made meanwhile is given up."""
        ledger = self._ledger
        step = ledger.groups[ticket.group].block_tokens * TOKEN_BYTES
        places = ledger.tree.places(ticket.group, ticket.keys)
        for index, key, slot in zip(ticket.blocks, ticket.block_keys, ticket.offsets, strict=True):
            block = ledger.staged.get(key)
            if places[index] is not None or (block is not None and ticket.rank in block.slots):
                ledger.release([slot], ledger.groups[ticket.group].slot_bytes, wipe=False)
                ledger.counts.duplicate_blocks += 1
                continue
            if block is None:
                at = (index - ticket.first) * step
                block = StagedBlock(
                    group=ticket.group,
                    key=key,
                    parent=key_at(ticket.keys, index - 1) if index else ticket.group,
                    index=index,
                    tokens=ticket.tokens[at : at + step],
                    extras=list(ticket.extras.get(index, ())),
                    suffix_tokens=ticket.suffix_tokens,
                    slots={},
                    since=now,
                )
            block.slots[ticket.rank] = slot
            yield block

    def _blocks_of(self, run: Run, now: float) -> Iterator[StagedBlock]:
        step = len(run.tokens) // len(run)
        parent = run.parent
        for position, key in enumerate(run.block_keys):
            yield StagedBlock(
                group=run.group,
                key=key,
                parent=parent,
                index=run.index + position,
                tokens=run.tokens[position * step : (position + 1) * step],
                extras=list(run.extras.get(run.index + position, ())),
                suffix_tokens=run.suffix_tokens,
                slots={rank: slots[position] for rank, slots in enumerate(run.slots)},
                since=now,
            )
            parent = key

    def _stage(self, block: StagedBlock) -> None:
        if block.key not in self._ledger.staged:
            self._ledger.stage(block)

    def _surface(self, run: Run, place: Place | None, now: float) -> None:
        """A run becomes visible behind the block at `place`; then what is staged behind it."""
        ledger = self._ledger
        todo = [(run, place)]
        while todo:
            run, place = todo.pop()
            for key in run.block_keys if ledger.staged else ():
                if key in ledger.staged:
                    ledger.unstage(key)
            for extent, first, block_keys in self._append_run(run, place, now):
                if not ledger.staged_children.keys().isdisjoint(block_keys):
                    todo += self._ready_children(extent, first, block_keys)

    def _ready_children(self, extent: Extent, first: int, block_keys: list[bytes]) -> Iterator[tuple[Run, Place]]:
        """What is staged behind the blocks of `extent` from `first` on and has all its ranks."""
        ledger = self._ledger
        group = ledger.groups[extent.group]
        behind = extent.first_token // group.block_tokens + first + 1
        for offset, key in enumerate(block_keys):
            for child in map(ledger.staged.__getitem__, ledger.staged_children.get(key, ())):
                ranks = group.ranks
                if len(child.slots) == ranks and child.group == extent.group and child.index == behind + offset:
                    yield Run.of_staged([child], ranks), (extent, first + offset)

    def _append_run(self, run: Run, place: Place | None, now: float) -> list[tuple[Extent, int, list[bytes]]]:
        """Put blocks behind the one at `place`: into the same extent while it grows, else into new ones. An extent
        ends before a key that already heads another. Returns where they went: extent, index of the first, keys."""
        ledger = self._ledger
        group = ledger.groups[run.group]
        went = []
        start = 0
        while start < len(run):
            known = ledger.tree.heads.get(run.block_keys[start])
            if known is not None:
                ledger.release([slots[start] for slots in run.slots], group.slot_bytes, wipe=False)
                ledger.counts.duplicate_blocks += 1
                place = known, 0
                start += 1
                continue
            if place is not None and self._may_grow(place, group):
                extent = place[0]
            else:
                extent = self._new_extent(run, start, group, now)
                ledger.add_extent(extent, *(place or (None, -1)))
            room = ledger.limits.extent_bytes // group.slot_bytes - extent.num_blocks
            stop = self._before_next_head(run, start + 1, min(len(run), start + max(1, room)))
            went.append((extent, extent.num_blocks, run.block_keys[start:stop]))
            self._grow(extent, run, start, stop, group, now)
            place = extent, extent.num_blocks - 1
            start = stop
        return went

    def _before_next_head(self, run: Run, start: int, stop: int) -> int:
        heads = self._ledger.tree.heads
        if heads.keys().isdisjoint(run.block_keys[start:stop]):
            return stop
        return next(position for position in range(start, stop) if run.block_keys[position] in heads)

    @staticmethod
    def _new_extent(run: Run, start: int, group: Group, now: float) -> Extent:
        return Extent(
            group=run.group,
            key=run.block_keys[start],
            parent=run.block_keys[start - 1] if start else run.parent,
            first_token=(run.index + start) * group.block_tokens,
            ranks=group.ranks,
            created=now,
        )

    def _grow(self, extent: Extent, run: Run, start: int, stop: int, group: Group, now: float) -> None:
        """Append blocks [start, stop) of the run."""
        ledger = self._ledger
        shift = extent.num_blocks - start - run.index  # from an index in the prompt to one in the extent
        extras = {index + shift: list(e) for index, e in run.extras.items() if start <= index - run.index < stop and e}
        if extras:
            extent.extras = {**extent.extras, **extras}
        if extent.tokens is not None:
            step = group.block_tokens * TOKEN_BYTES
            extent.tokens += run.tokens[start * step : stop * step]
        slots = [slots[start:stop] for slots in run.slots]
        ledger.store(extent, run.block_keys[start:stop], slots, run.suffix_tokens, now)
        ledger.counts.stored_tokens += (stop - start) * group.block_tokens
        if not self._has_room(extent, group):
            self._cascade.seal(extent, now)
        ledger.reconsider(extent)
        if extent.above is not None and extent.above.owner is not None:
            ledger.reconsider(extent.above.owner)

    def _may_grow(self, place: Place, group: Group) -> bool:
        extent, index = place
        return (
            not extent.sealed
            and index == extent.num_blocks - 1
            and extent.host_blocks == extent.num_blocks
            and self._has_room(extent, group)
        )

    def _has_room(self, extent: Extent, group: Group) -> bool:
        return (extent.num_blocks + 1) * group.slot_bytes <= self._ledger.limits.extent_bytes
