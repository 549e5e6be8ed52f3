"""Tickets: who may write which slots, and how written blocks become visible.

reserve -> slots are written -> commit -> staged -> visible, when the predecessor is and every rank has its part
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.grants import (
    GRANTED,
    NO_ROOM,
    PENDING,
    PRESENT,
    Committed,
    Refused,
    Reservation,
    TicketState,
    path_blocks,
)
from tierkv.core.keys import NO_EXTRAS, TOKEN_BYTES, key_at
from tierkv.core.ledger import Group, Ledger, StagedBlock
from tierkv.core.reasons import Reason


class Tickets:
    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade

    def reserve(
        self,
        *,
        grant: bytes,
        session: bytes,
        holder: bytes,
        group: bytes,
        rank: int,
        keys: bytes,
        first: int,
        tokens: bytes,
        extras: Mapping[int, Sequence[bytes]] = NO_EXTRAS,
        now: float,
    ) -> Reservation | Refused:
        """A ticket for the missing ones of the blocks [first, end of keys) of `rank`."""
        ledger = self._ledger
        known = ledger.tickets.get(grant)
        if known is not None:
            return known.answer
        if ledger.ended.get(grant) is not None:
            return Refused(Reason.GRANT_ENDED)
        if ledger.is_closing:
            return Refused(Reason.SHUTDOWN)
        if holder not in ledger.sessions:
            return Refused(Reason.SESSION_GONE)
        shape = ledger.groups[group]
        if not 0 <= rank < shape.ranks:
            return Refused(Reason.LAYOUT_MISMATCH)
        states, missing = self._missing_blocks(keys, first, rank)
        # The prefix of what is being stored is not its own victim.
        path = ledger.tree.walk(keys)
        for segment in path:
            ledger.hold(segment.extent, grant, segment.blocks)
        allowed, reason = ledger.blocks_allowed(shape, [holder], len(missing))
        if missing and not ledger.pool.fits(shape.slot_bytes):
            allowed, reason = 0, Reason.LARGER_THAN_TIER
        room = self._cascade.make_room(shape.slot_bytes, allowed, now) if allowed else 0
        offsets = ledger.pool.allocate(shape.slot_bytes, room)
        if len(offsets) < len(missing):
            reason = reason or Reason.NO_ROOM
            ledger.counts.refused_blocks[reason] += len(missing) - len(offsets)
            for index in missing[len(offsets) :]:
                states[index - first] = NO_ROOM
        answer = Reservation(
            grant=grant,
            states=bytes(states),
            offsets=offsets,
            generations=[ledger.pool.generation(offset) for offset in offsets],
            reason=reason,
        )
        if not offsets:
            for segment in path:
                ledger.unhold(segment.extent, grant)
            return answer
        ticket = TicketState(
            grant=grant,
            session=session,
            holder=holder,
            group=group,
            rank=rank,
            keys=keys,
            first=first,
            tokens=tokens,
            extras=extras,
            blocks=missing[: len(offsets)],
            offsets=offsets,
            path=[segment.extent for segment in path],
            answer=answer,
        )
        ledger.tickets[grant] = ticket
        ledger.counts.tickets += 1
        ledger.sessions[holder].held_bytes += len(offsets) * shape.slot_bytes
        for index in ticket.blocks:
            ledger.writing[key_at(keys, index), rank] = grant
        return answer

    def commit(self, grant: bytes, now: float) -> Committed | Refused:
        """Every copy into the slots has completed: publish all blocks of the ticket."""
        ledger = self._ledger
        ticket = ledger.tickets.get(grant)
        if ticket is None:
            return ledger.ended.get(grant) or Refused(Reason.GRANT_ENDED)
        self._forget_ticket(ticket)
        self._publish(ticket, now)
        if ledger.is_closing:
            for extent in list(ledger.unsealed):
                self._cascade.seal(extent, now)
        visible_blocks = path_blocks(ledger.tree.walk(ticket.keys))
        visible = sum(index < visible_blocks for index in ticket.blocks)
        answer = Committed(visible, len(ticket.blocks) - visible)
        ledger.ended.remember(grant, answer)
        return answer

    def abort(self, grant: bytes, reason: Reason) -> None:
        """No copy into the slots is running or will start: nothing is published, the slots are free."""
        ledger = self._ledger
        if grant in ledger.tickets:
            ledger.counts.aborted_tickets[reason] += 1
            self._end_ticket(grant, Refused(reason))
        elif ledger.ended.get(grant) is None:
            ledger.ended.remember(grant, Refused(reason))

    def end_session(self, session: bytes) -> None:
        """The process that may have been writing has ended, proven: its slots are free."""
        for grant in [t.grant for t in self._ledger.tickets.values() if t.holder == session]:
            self._end_ticket(grant, Refused(Reason.SESSION_GONE))
            self._ledger.counts.aborted_tickets[Reason.SESSION_GONE] += 1

    def drop_stale(self, now: float) -> None:
        """Staged blocks whose predecessor or other ranks did not come in time."""
        ledger = self._ledger
        for key in [b.key for b in ledger.staged.values() if b.since + ledger.limits.staged_seconds <= now]:
            ledger.drop_staged(key)

    def _missing_blocks(self, keys: bytes, first: int, rank: int) -> tuple[bytearray, list[int]]:
        ledger = self._ledger
        places = ledger.tree.places(keys)
        states = bytearray(len(places) - first)
        missing = []
        for index in range(first, len(places)):
            key = key_at(keys, index)
            staged = ledger.staged.get(key)
            if places[index] is not None or (staged is not None and rank in staged.slots):
                states[index - first] = PRESENT
            elif (key, rank) in ledger.writing:
                states[index - first] = PENDING
            else:
                states[index - first] = GRANTED
                missing.append(index)
        return states, missing

    def _forget_ticket(self, ticket: TicketState) -> None:
        """Take a ticket off the books, all but its slots."""
        ledger = self._ledger
        del ledger.tickets[ticket.grant]
        for index in ticket.blocks:
            del ledger.writing[key_at(ticket.keys, index), ticket.rank]
        holder = ledger.sessions.get(ticket.holder)
        if holder is not None:
            holder.held_bytes -= len(ticket.offsets) * ledger.groups[ticket.group].slot_bytes
        for extent in ticket.path:
            ledger.unhold(extent, ticket.grant)

    def _end_ticket(self, grant: bytes, answer: Refused) -> None:
        ticket = self._ledger.tickets[grant]
        self._forget_ticket(ticket)
        self._ledger.pool.release(ticket.offsets)
        self._ledger.ended.remember(grant, answer)

    def _publish(self, ticket: TicketState, now: float) -> None:
        """Blocks whose predecessor is visible and whose ranks are all there appear, in runs; the others are staged."""
        ledger = self._ledger
        ranks = ledger.groups[ticket.group].ranks
        places = ledger.tree.places(ticket.keys)
        run: list[StagedBlock] = []
        above: Extent | None = None
        at = -1
        for block in self._filled_blocks(ticket, places, now):
            is_complete = len(block.slots) == ranks
            if run and is_complete and run[-1].index + 1 == block.index:
                run.append(block)
                continue
            self._surface(run, above, at, now)
            run = []
            # After a run has surfaced, its last block may be this one's predecessor: so ask the tree again.
            place = ledger.tree.places(ticket.keys)[block.index - 1] if block.index and is_complete else None
            if is_complete and (block.index == 0 or place is not None):
                run = [block]
                above, at = place if place is not None else (None, -1)
            elif block.key not in ledger.staged:
                ledger.stage(block)
        self._surface(run, above, at, now)

    def _filled_blocks(
        self, ticket: TicketState, places: list[tuple[Extent, int] | None], now: float
    ) -> list[StagedBlock]:
        """The ticket's blocks with this rank's slots in them; what another ticket made meanwhile is given up."""
        ledger = self._ledger
        step = ledger.groups[ticket.group].block_tokens * TOKEN_BYTES
        blocks = []
        for index, slot in zip(ticket.blocks, ticket.offsets, strict=True):
            key = key_at(ticket.keys, index)
            block = ledger.staged.get(key)
            if places[index] is not None or (block is not None and ticket.rank in block.slots):
                ledger.pool.release([slot])
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
                    slots={},
                    since=now,
                )
            block.slots[ticket.rank] = slot
            blocks.append(block)
        return blocks

    def _surface(self, run: list[StagedBlock], above: Extent | None, at: int, now: float) -> None:
        """A run of consecutive blocks becomes visible behind block `at` of `above`; then what is staged behind them."""
        ledger = self._ledger
        todo = [(run, above, at)] if run else []
        while todo:
            run, above, at = todo.pop()
            for block in run:
                if block.key in ledger.staged:
                    ledger.unstage(block.key)
            for extent, first, blocks in self._append_run(run, above, at, now):
                for offset, block in enumerate(blocks):
                    todo += [
                        ([child], extent, first + offset)
                        for child in map(ledger.staged.__getitem__, ledger.staged_children.get(block.key, ()))
                        if len(child.slots) == ledger.groups[child.group].ranks
                    ]

    def _append_run(
        self, run: list[StagedBlock], above: Extent | None, at: int, now: float
    ) -> list[tuple[Extent, int, list[StagedBlock]]]:
        """Put blocks behind block `at` of `above`: into the same extent while it grows, else into new ones. An extent
        ends before a key that already heads another. Returns where they went: extent, index of the first, blocks."""
        ledger = self._ledger
        group = ledger.groups[run[0].group]
        went = []
        position = 0
        while position < len(run):
            block = run[position]
            known = ledger.tree.heads.get(block.key)
            if known is not None:
                ledger.pool.release(list(block.slots.values()))
                ledger.counts.duplicate_blocks += 1
                above, at = known, 0
                position += 1
                continue
            if above is not None and self._may_grow(above, at, group):
                extent = above
                extent.longest_gap = max(extent.longest_gap, now - extent.last_append)
            else:
                extent = self._new_extent(block, group, now)
                ledger.add_extent(extent, above, at)
            chunk = [block]
            room = self._ledger.limits.extent_bytes // group.slot_bytes - extent.num_blocks
            for following in run[position + 1 : position + room]:
                if following.key in ledger.tree.heads:
                    break
                chunk.append(following)
            went.append((extent, extent.num_blocks, chunk))
            self._grow(extent, chunk, group, now)
            above, at = extent, extent.num_blocks - 1
            position += len(chunk)
        return went

    @staticmethod
    def _new_extent(block: StagedBlock, group: Group, now: float) -> Extent:
        return Extent(
            group=block.group,
            key=block.key,
            parent=block.parent,
            first_token=block.index * group.block_tokens,
            ranks=group.ranks,
            created=now,
        )

    def _grow(self, extent: Extent, chunk: list[StagedBlock], group: Group, now: float) -> None:
        ledger = self._ledger
        for offset, block in enumerate(chunk, start=extent.num_blocks):
            if block.extras:
                extent.extras[offset] = block.extras
        if extent.tokens is not None:
            extent.tokens += b"".join(block.tokens for block in chunk)
        extent.last_append = extent.last_used = extent.tail_used = now
        ledger.grow_extent(
            extent,
            b"".join(block.key for block in chunk),
            [[block.slots[rank] for block in chunk] for rank in range(group.ranks)],
        )
        extent.hot_blocks = extent.num_blocks
        group.last_used = now
        ledger.counts.stored_tokens += len(chunk) * group.block_tokens
        if not self._has_room(extent, group):
            self._cascade.seal(extent, now)
        ledger.reconsider(extent)
        if extent.above is not None and extent.above.owner is not None:
            ledger.reconsider(extent.above.owner)

    def _may_grow(self, extent: Extent, index: int, group: Group) -> bool:
        return (
            not extent.sealed
            and index == extent.num_blocks - 1
            and extent.host_blocks == extent.num_blocks
            and self._has_room(extent, group)
        )

    def _has_room(self, extent: Extent, group: Group) -> bool:
        return (extent.num_blocks + 1) * group.slot_bytes <= self._ledger.limits.extent_bytes
