"""Tickets: who may write which slots, from the asking to the commit.

reserve -> slots are written -> commit -> staged -> visible, when the predecessor is and every rank has its part
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from tierkv.core.cascade import Cascade
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
    reused_blocks,
)
from tierkv.core.keys import KEY_BYTES, NO_EXTRAS, count_keys, split_keys
from tierkv.core.ledger import Ledger
from tierkv.core.offered import Offered
from tierkv.core.publishing import Publisher
from tierkv.core.reasons import Reason
from tierkv.core.recent import Refusal
from tierkv.core.shares import Share
from tierkv.core.value.order import Rank

AHEAD_SHARE = 64
"""One part in so many of host memory may be kept free for the next reservation."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Slots that a reservation takes, the rank of what comes into the last of them, and whose share they are."""

    slot_bytes: int
    count: int
    rank: Rank | None
    share: Share


class Tickets:
    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self._publisher = Publisher(ledger, cascade)
        self._expected: Expected | None = None  # of the next reservation, if it is like the last one
        cascade.devices.on_landed = self._landed

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
        on_device: bool = False,
        now: float,
    ) -> Reservation | Refused:
        """A ticket for the missing ones of the blocks [first, end of keys) of `rank`. `on_device`: the first ones are
        to be written to the pool that `holder` has mapped; each keeps a host slot for its landing."""
        ledger = self._ledger
        known = ledger.tickets.get(grant)
        if known is not None and not known.is_asked_by(session, group, rank, keys, first):
            return Refused(Reason.GRANT_ENDED)  # its slots are for what another request stores
        if known is not None:
            return known.answer
        if ledger.ended.get(grant) is not None or grant in ledger.leases or grant in ledger.landings:
            return Refused(Reason.GRANT_ENDED)
        if ledger.is_closing:
            return Refused(Reason.SHUTDOWN)
        if holder not in ledger.sessions:
            return Refused(Reason.SESSION_GONE)
        shape = ledger.groups[group]
        if not 0 <= rank < shape.ranks:
            return Refused(Reason.LAYOUT_MISMATCH)
        path = ledger.tree.walk(group, keys)
        states, missing, missing_keys = self._missing_blocks(group, keys, first, rank, path_blocks(path))
        ledger.counts.duplicate_blocks += states.count(PRESENT) + states.count(PENDING)
        if len(frozenset(missing_keys)) < len(missing_keys):  # no chain of digests repeats itself
            return Refused(Reason.KEY_MISMATCH)
        suffix_tokens = (count_keys(keys) - reused_blocks(path)) * shape.block_tokens
        # The prefix of what is being stored is not its own victim.
        for segment in path:
            ledger.hold(segment.extent, grant, segment.blocks)
        allowed, reason = ledger.blocks_allowed(shape, [holder], len(missing))
        if missing and not ledger.pool.fits(shape.slot_bytes):
            allowed, reason = 0, Reason.LARGER_THAN_TIER
        offsets: list[int] = []
        on_devices: list[int] = []
        device = ledger.devices.mapped.get(holder, -1) if on_device else -1
        refused = 0
        if allowed:
            offered = Offered(ledger, shape, rank, missing[:allowed], missing_keys[:allowed], suffix_tokens, now)
            with shape.share.asking(host_bytes=offered.welcome * shape.slot_bytes):
                room = self._cascade.make_room(shape.slot_bytes, offered.welcome, now, offered.rank_of)
            offsets = ledger.pool.allocate(shape.slot_bytes, room.slots)
            refused = allowed - offered.welcome + room.refused
            if refused:
                offered.note_refused(allowed - refused)
            if offsets:
                rank_of_last = offered.rank_of(len(offsets) - 1)
                self._expected = Expected(shape.slot_bytes, len(offsets), rank_of_last, shape.share)
            if device >= 0:
                on_devices = self._cascade.devices.allocate(device, shape, len(offsets), now, offered.rank_of)
                ledger.devices.pair(offsets[: len(on_devices)], on_devices)
        if len(offsets) < len(missing):
            others = len(missing) - len(offsets) - refused
            if refused:
                ledger.counts.refused_blocks[Reason.WORTH_LESS] += refused
            if others:
                ledger.counts.refused_blocks[reason or Reason.NO_ROOM] += others
            if refused and len(offsets) == allowed - refused:  # the first that got no room
                reason = Reason.WORTH_LESS
            reason = reason or Reason.NO_ROOM
            refusal = Refusal(len(missing) - len(offsets), reason, now)
            ledger.refusals.note(group, missing_keys[len(offsets)], refusal)
            for index in missing[len(offsets) :]:
                states[index - first] = NO_ROOM
        told = [*on_devices, *offsets[len(on_devices) :]] if on_devices else offsets
        answer = Reservation(
            grant=grant,
            states=bytes(states),
            offsets=told,
            generations=ledger.pool.generations(told),
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
            block_keys=missing_keys[: len(offsets)],
            offsets=offsets,
            suffix_tokens=suffix_tokens,
            path=[segment.extent for segment in path],
            answer=answer,
            device=device if on_devices else -1,
        )
        ledger.tickets[grant] = ticket
        ledger.counts.tickets += 1
        ledger.sessions[holder].held_bytes += len(offsets) * shape.slot_bytes
        shape.share.host_bytes += len(offsets) * shape.slot_bytes
        ledger.writing.setdefault(rank, {}).update(zip(ticket.block_keys, repeat(grant)))
        return answer

    @property
    def expects_more(self) -> bool:
        return self._expected is not None

    def make_ready(self, now: float) -> None:
        """Evict now what the next reservation would have to wait for, if it is like the last one; a share of host
        memory at most."""
        if self._expected is None:
            return
        expected, self._expected = self._expected, None
        most = self._ledger.limits.host_bytes // AHEAD_SHARE // expected.slot_bytes
        count = min(expected.count, most)
        with expected.share.asking(host_bytes=count * expected.slot_bytes):
            self._cascade.make_ready(expected.slot_bytes, count, now, expected.rank)

    def commit(self, grant: bytes, now: float) -> Committed | Refused:
        """Every copy into the slots has completed: publish all blocks of the ticket."""
        ledger = self._ledger
        ticket = ledger.tickets.get(grant)
        if ticket is None:
            return ledger.ended.get(grant) or Refused(Reason.GRANT_ENDED)
        if ticket.purged:
            ledger.counts.aborted_tickets[Reason.PURGED] += 1
            self._end_ticket(grant, Refused(Reason.PURGED))
            return Refused(Reason.PURGED)
        if ticket.is_device_lost:
            ledger.counts.dropped_landings[Reason.DEVICE_DOWN] += len(ticket.blocks)
            ledger.counts.aborted_tickets[Reason.DEVICE_DOWN] += 1
            self._end_ticket(grant, Refused(Reason.DEVICE_DOWN))
            return Refused(Reason.DEVICE_DOWN)
        if ticket.device >= 0:
            self._begin_landing(ticket)
        else:
            self._forget_ticket(ticket)
            self._publish(ticket, now)
        visible = bisect_left(ticket.blocks, path_blocks(ledger.tree.walk(ticket.group, ticket.keys)))
        answer = Committed(visible, len(ticket.blocks) - visible)
        ledger.ended.remember(grant, answer)
        return answer

    def _publish(self, ticket: TicketState, now: float) -> None:
        self._publisher.publish(ticket, now)
        if self._ledger.is_closing:
            for extent in list(self._ledger.unsealed):
                self._cascade.seal(extent, now)

    def _begin_landing(self, ticket: TicketState) -> None:
        """Its holder has done its part: from here on nothing but the device's worker touches the slots. The blocks are
        its own until they are in host memory, and the prefix before them stays."""
        ledger = self._ledger
        self._leave_holder(ticket)
        ledger.landings[ticket.grant] = ticket
        self._cascade.devices.land(ticket)

    def _landed(self, ticket: TicketState, problem: Reason | None, now: float) -> None:
        """Nothing touches its slots any more: they have the blocks, unless there was a problem."""
        ledger = self._ledger
        del ledger.landings[ticket.grant]
        self._let_go(ticket)
        if problem is None and not ticket.purged:
            ledger.counts.landed_blocks += len(ticket.blocks)
            self._publish(ticket, now)
            for segment in ledger.tree.walk(ticket.group, ticket.keys) if ticket.seals else ():
                if not segment.extent.sealed:
                    self._cascade.seal(segment.extent, now)
            return
        reason = Reason.PURGED if ticket.purged else problem
        ledger.counts.dropped_landings[reason or ""] += len(ticket.blocks)
        slot_bytes = ledger.groups[ticket.group].slot_bytes
        ledger.release(ticket.offsets, slot_bytes, wipe=ticket.purged or ticket.unclean)

    def purge(self, ticket: TicketState) -> None:
        """What was reserved before a purge is not published after it. The slots stay the holder's, who may be writing;
        others may store the same blocks again."""
        if not ticket.purged:
            self._end_writing(ticket)
            ticket.purged = True

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

    def _missing_blocks(
        self, group: bytes, keys: bytes, first: int, rank: int, visible: int
    ) -> tuple[bytearray, list[int], list[bytes]]:
        """States of the blocks from `first` on, and indices and keys of those that nobody has and nobody is writing.
        The first `visible` blocks of the prompt are in the tree."""
        ledger = self._ledger
        num_blocks = len(keys) // KEY_BYTES
        behind = split_keys(keys, visible)
        if ledger.tree.knows_none(behind):  # as nearly always; a few calls tell, however long the prompt is
            asked = behind[max(0, first - visible) :]
            writing = ledger.writing.get(rank, {})
            if ledger.staged.keys().isdisjoint(asked) and writing.keys().isdisjoint(asked):
                begin = num_blocks - len(asked)
                states = bytearray([PRESENT]) * (begin - first) + bytearray([GRANTED]) * len(asked)
                return states, list(range(begin, num_blocks)), asked
        return self._missing_one_by_one(group, keys, first, rank)

    def _missing_one_by_one(
        self, group: bytes, keys: bytes, first: int, rank: int
    ) -> tuple[bytearray, list[int], list[bytes]]:
        ledger = self._ledger
        places = ledger.tree.places(group, keys)
        states = bytearray()
        writing = ledger.writing.get(rank, {})
        missing = []
        missing_keys = []
        for index, key in enumerate(split_keys(keys, first), first):
            staged = ledger.staged.get(key)
            if places[index] is not None or (staged is not None and rank in staged.slots):
                states.append(PRESENT)
            elif key in writing:
                states.append(PENDING)
            else:
                states.append(GRANTED)
                missing.append(index)
                missing_keys.append(key)
        return states, missing, missing_keys

    def _forget_ticket(self, ticket: TicketState) -> None:
        """Take a ticket off the books, all but its slots."""
        self._leave_holder(ticket)
        self._let_go(ticket)

    def _leave_holder(self, ticket: TicketState) -> None:
        """Whoever held it holds it no more."""
        ledger = self._ledger
        del ledger.tickets[ticket.grant]
        holder = ledger.sessions.get(ticket.holder)
        if holder is not None:
            holder.held_bytes -= len(ticket.offsets) * ledger.groups[ticket.group].slot_bytes

    def _let_go(self, ticket: TicketState) -> None:
        ledger = self._ledger
        ledger.has_let_go = ledger.has_let_go or ticket.unclean
        if not ticket.purged:
            self._end_writing(ticket)
        group = ledger.groups[ticket.group]
        group.share.host_bytes -= len(ticket.offsets) * group.slot_bytes
        for extent in ticket.path:
            ledger.unhold(extent, ticket.grant)

    def _end_ticket(self, grant: bytes, answer: Refused) -> None:
        ledger = self._ledger
        ticket = ledger.tickets[grant]
        self._forget_ticket(ticket)
        ledger.release(ticket.offsets, ledger.groups[ticket.group].slot_bytes, wipe=ticket.purged or ticket.unclean)
        ledger.ended.remember(grant, answer)

    def _end_writing(self, ticket: TicketState) -> None:
        writing = self._ledger.writing[ticket.rank]
        for key in ticket.block_keys:
            del writing[key]
        if not writing:
            del self._ledger.writing[ticket.rank]
