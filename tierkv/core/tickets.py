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
        """Stage every block, then let those appear whose predecessor is visible and whose ranks are all there."""
        ledger = self._ledger
        group = ledger.groups[ticket.group]
        step = group.block_tokens * TOKEN_BYTES
        places = ledger.tree.places(ticket.keys)
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
                ledger.stage(block)
            block.slots[ticket.rank] = slot
        for index in ticket.blocks:
            place = places[index - 1] if index else None
            if index == 0:
                self._surface(ticket.group, None, -1, now)
            elif place is not None:
                self._surface(key_at(ticket.keys, index - 1), *place, now)

    def _surface(self, parent: bytes, above: Extent | None, index: int, now: float) -> None:
        """Blocks staged behind `parent`, which is visible now, become visible, and what is staged behind them."""
        ledger = self._ledger
        todo = [(parent, above, index)]
        while todo:
            parent, above, index = todo.pop()
            for key in list(ledger.staged_children.get(parent, ())):
                block = ledger.staged[key]
                if len(block.slots) == ledger.groups[block.group].ranks:
                    ledger.unstage(key)
                    extent, place = self._append(block, above, index, now)
                    todo.append((key, extent, place))

    def _append(self, block: StagedBlock, above: Extent | None, index: int, now: float) -> tuple[Extent, int]:
        """Put a block behind block `index` of `above`: into the same extent while it grows, else into a new one."""
        ledger = self._ledger
        group = ledger.groups[block.group]
        slots = [block.slots[rank] for rank in range(group.ranks)]
        known = ledger.tree.heads.get(block.key)
        if known is not None:
            ledger.pool.release(slots)
            ledger.counts.duplicate_blocks += 1
            return known, 0
        if above is not None and self._may_grow(above, index, group):
            extent = above
            extent.longest_gap = max(extent.longest_gap, now - extent.last_append)
        else:
            extent = Extent(
                group=block.group,
                key=block.key,
                parent=block.parent,
                first_token=block.index * group.block_tokens,
                ranks=group.ranks,
                created=now,
            )
            ledger.add_extent(extent, above, index)
        ledger.grow_extent(extent, block.key, slots)
        if extent.tokens is not None:
            extent.tokens += block.tokens
        if block.extras:
            extent.extras[extent.num_blocks - 1] = block.extras
        extent.last_append = extent.last_used = extent.tail_used = now
        extent.hot_blocks = extent.num_blocks
        group.last_used = now
        ledger.counts.stored_tokens += group.block_tokens
        if not self._has_room(extent, group):
            self._cascade.seal(extent, now)
        ledger.reconsider(extent)
        if extent.above is not None and extent.above.owner is not None:
            ledger.reconsider(extent.above.owner)
        return extent, extent.num_blocks - 1

    def _may_grow(self, extent: Extent, index: int, group: Group) -> bool:
        return (
            not extent.sealed
            and index == extent.num_blocks - 1
            and extent.host_blocks == extent.num_blocks
            and self._has_room(extent, group)
        )

    def _has_room(self, extent: Extent, group: Group) -> bool:
        return (extent.num_blocks + 1) * group.slot_bytes <= self._ledger.limits.extent_bytes
