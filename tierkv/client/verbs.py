"""The verbs of an engine, each as one story: which request, and what its reply becomes. Whatever goes wrong at the node
is a smaller answer with a reason; what a node says is checked before it is used as an address."""

from __future__ import annotations

import time

import msgspec
import numpy as np

from tierkv.client.answers import CodecAnswer, Committed, CommitWait, Match, Sealed, reason_of_text
from tierkv.client.asking import Answer, Failure
from tierkv.client.device.placing import Placed, place
from tierkv.client.device.pool import HOLDERS, MAP_SECONDS, DevicePool, MappedPool, OfHolders
from tierkv.client.grants import LeaseFacts, TicketFacts, granted_blocks
from tierkv.client.groups import GroupRecord
from tierkv.client.inline import InlineVerbs, StagedBlocks
from tierkv.client.prompt import Extras, TokenIds, pack_prompt
from tierkv.client.session import Session
from tierkv.client.slots import Slots, slot_bytes
from tierkv.client.steps import MapPool, Verb
from tierkv.core.keys import KEY_BYTES, NO_EXTRAS, TOKEN_BYTES, chain_keys
from tierkv.core.reasons import Reason
from tierkv.wire.messages import (
    MAX_BLOCKS,
    MAX_FRAME_BYTES,
    MAX_NAME,
    Abort,
    Acquire,
    AcquireReply,
    AskCodec,
    CodecReply,
    Commit,
    CommitReply,
    Holder,
    LeasePart,
    MatchReply,
    Release,
    ReportBad,
    Request,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
    SealWait,
)
from tierkv.wire.messages import Match as MatchRequest

FRAME_ROOM = 65_536
"""Bytes of a Reserve that are neither keys nor tokens nor extras, with room to spare."""


class Verbs(InlineVerbs):
    # ---- before there is a group

    def ask_codec(self, weights: str, adapter: str) -> Verb[CodecAnswer]:
        answer = yield from self.ask(AskCodec, self.budget(), weights=weights, adapter=adapter)
        if isinstance(answer, Failure):
            return CodecAnswer(reason=self._reason(answer))
        reply: CodecReply = answer.reply
        return CodecAnswer(codec=reply.codec, reason=reason_of_text(reply.reason), problem=reply.problem)

    # ---- reading

    def match(self, group: GroupRecord, keys: bytes) -> Verb[Match]:
        keys = keys[: MAX_BLOCKS * KEY_BYTES]
        if not keys:
            return Match(blocks=0, host_blocks=0, tokens=0)
        budget = self.budget()
        make = self._maker(MatchRequest, budget, group=group.key, keys=keys)
        answer = yield from self._ask_group(group, make, budget)
        if isinstance(answer, Failure):
            return Match(blocks=0, host_blocks=0, tokens=0, reason=self._reason(answer))
        reply: MatchReply = answer.reply
        blocks = min(reply.blocks, len(keys) // KEY_BYTES)
        return Match(blocks=blocks, host_blocks=min(reply.host_blocks, blocks), tokens=blocks * group.block_tokens)

    def acquire(
        self,
        group: GroupRecord,
        keys: bytes,
        *,
        deadline_seconds: float,
        max_blocks: int | None,
        holders: tuple[Holder, ...],
        revocable: bool,
        name: str = "",
        device: DevicePool | OfHolders | None = None,
    ) -> Verb[LeaseFacts]:
        keys = keys[: MAX_BLOCKS * KEY_BYTES]
        most = min(len(keys) // KEY_BYTES, MAX_BLOCKS if max_blocks is None else max_blocks)
        if most < 0:
            raise ValueError(f"max_blocks: {max_blocks} is negative")
        if not most:
            return LeaseFacts(group=group)
        budget = self.budget(deadline_seconds)
        grant = self._state.new_grant()
        make = self._maker(
            Acquire,
            budget,
            grant=grant,
            group=group.key,
            keys=keys,
            max_blocks=most,
            revocable=revocable,
            name=cut_name(name),
        )

        pool = device if isinstance(device, DevicePool) else None

        def make_held(session: Session) -> Request:
            own = (Holder(group.rank, session.token),) if group.rank else ()  # rank 0 is what the node takes by itself
            on_device = device == HOLDERS or _mapped(pool, session) is not None
            return msgspec.structs.replace(make(session), holders=holders or own, on_device=on_device)

        yield from self._attend(pool, budget.until)
        answer = yield from self._ask_grant(group, make_held, budget, grant, Release)
        if isinstance(answer, Failure):
            return LeaseFacts(group=group, reason=self._reason(answer))
        # Another process of our rank may be the one that copies: then its part is not ours to read, nor to release.
        is_ours = not holders or Holder(group.rank, answer.session.token) in holders
        facts = self._lease(group, grant, answer, bool(holders), most, is_ours=is_ours)
        facts.revocable, facts.keys = revocable, keys
        return facts

    def map_device(self, pool: DevicePool) -> Verb[None]:
        """Have it mapped, if it is due."""
        yield from self._attend(pool, self.budget().until)

    def _attend(self, pool: DevicePool | None, until: float) -> Verb[None]:
        """Costs no step while it is mapped, and none while the last refusal is fresh."""
        if pool is None or not self._is_due(pool):
            return
        session = yield from self._ready(until)
        if isinstance(session, Session) and session.arena is not None and pool.is_due(session):
            yield MapPool(pool, session, min(until, time.monotonic() + MAP_SECONDS))

    def _is_due(self, pool: DevicePool) -> bool:
        session = self._state.session()
        return session is None or pool.is_due(session)

    def _lease(
        self, group: GroupRecord, grant: bytes, answer: Answer, has_holders: bool, most: int, *, is_ours: bool
    ) -> LeaseFacts:
        reply: AcquireReply = answer.reply
        session = answer.session
        facts = LeaseFacts(
            group=group,
            grant=grant,
            blocks=reply.blocks,
            nvme_blocks=min(reply.nvme_blocks, reply.blocks),
            disk_blocks=min(reply.disk_blocks, reply.blocks),
            device_blocks=min(reply.device_blocks, reply.blocks),
            cached_blocks=reply.cached_blocks,
            parts=reply.parts,
            release_rank=group.rank if has_holders else None,
            asker=session,
            reason=reason_of_text(reply.reason),
        )
        self._state.count(facts.reason)
        if not reply.blocks:
            return facts
        if session.tenant:
            return self._hold_inline(facts, session, most)
        part = next((part for part in reply.parts if is_ours and part.rank == group.rank), None)
        if part is None and has_holders:
            return facts  # all of it is for others
        if part is None or reply.blocks > most:
            return self._refuse_lease(group, session, grant)
        return self._hold_slots(facts, session, part)

    def _hold_inline(self, facts: LeaseFacts, session: Session, most: int) -> LeaseFacts:
        if facts.blocks > most:
            return self._refuse_lease(facts.group, session, facts.grant)
        if not self._state.hold(session):
            return LeaseFacts(group=facts.group, reason=self._reason(Failure(Reason.SESSION_GONE)))
        facts.session, facts.is_inline = session, True
        return facts

    def _hold_slots(self, facts: LeaseFacts, session: Session, part: LeasePart) -> LeaseFacts:
        """What is mapped of a pool now is what its addresses are taken for: those of an earlier one are never proven,
        and those of a later one can't be there (see device/pool.py)."""
        group = facts.group
        offsets, generations = np.frombuffer(part.offsets, "<i8"), part.generations
        placed = place(offsets, session, slot_bytes_of(session, group), self._state.pools())
        if placed is None:
            return self._refuse_lease(group, session, facts.grant)
        if placed.count < len(offsets):
            offsets, generations = offsets[: placed.count], generations[: 8 * placed.count]
            facts.cut(placed.count, self._reason(Failure(Reason.DEVICE_DOWN)))
        if not placed.count:
            self._state.doubt(session, Release(id=0, session=session.token, grant=facts.grant))
            return LeaseFacts(group=group, cached_blocks=facts.cached_blocks, reason=facts.reason)
        if not self._state.hold(session):
            placed.let_go()
            return LeaseFacts(group=group, reason=self._reason(Failure(Reason.SESSION_GONE)))
        facts.slots = Slots(session, group, offsets, generations, placed.pool)
        facts.session = session
        return facts

    def _refuse_lease(self, group: GroupRecord, session: Session, grant: bytes) -> LeaseFacts:
        """The node granted what can't be: nothing of it is touched, and it is given back."""
        self._state.doubt(session, Release(id=0, session=session.token, grant=grant))
        return LeaseFacts(group=group, reason=self._reason(Failure(Reason.WIRE_ERROR)))

    def hold(self, group: GroupRecord, grant: bytes, token: bytes, part: LeasePart, keys: bytes = b"") -> LeaseFacts:
        """A lease that another session asked for, naming this one (by `token`) as the holder of `part`."""
        if part.rank != group.rank:
            raise ValueError(f"part: it is rank {part.rank}'s, and this process holds rank {group.rank}")
        if len(part.offsets) % 8 or len(part.offsets) != len(part.generations):
            raise ValueError(f"part: {len(part.offsets)} bytes of offsets, {len(part.generations)} of generations")
        session = self._state.session()
        blocks = len(part.offsets) // 8
        if session is None or session.token != token:
            return LeaseFacts(group=group, reason=self._reason(Failure(Reason.SESSION_GONE)))
        facts = LeaseFacts(
            group=group,
            grant=grant,
            blocks=blocks,
            cached_blocks=blocks,
            parts=(part,),
            release_rank=part.rank,
            revocable=True,  # as far as is known here
            keys=keys,
        )
        return self._hold_slots(facts, session, part) if blocks else facts

    def release(self, facts: LeaseFacts) -> Verb[None]:
        """On its way when this returns, and in doubt until the node's answer has come, which a later call notes.
        Waiting for it would cost a round trip and tell nothing that the caller could act on."""
        session = facts.session
        if session is None:
            return
        yield from self._give_back(
            session, Release(id=0, session=session.token, grant=facts.grant, rank=facts.release_rank)
        )

    def release_all(self, facts: LeaseFacts) -> Verb[None]:
        """As the one who asked, whoever holds."""
        session = facts.asker
        if session is not None and self._state.hold(session):
            yield from self._give_back(session, Release(id=0, session=session.token, grant=facts.grant))

    def came_short(self, facts: LeaseFacts) -> Verb[None]:
        """Fewer blocks than were leased could be used. What is damaged is told to the node, by the one who can name
        it."""
        if facts.bad_block is None:
            self._state.count(Reason.REVOKED)
            return
        self._state.count(facts.reason)
        keys, facts.keys = facts.keys, b""  # once: by the next copy the keys may name blocks that others have stored
        if keys:
            yield from self.report_bad(facts.group, keys, facts.bad_block)

    def report_bad(self, group: GroupRecord, keys: bytes, first_bad: int) -> Verb[Reason | None]:
        blocks = len(keys) // KEY_BYTES
        if not 0 <= first_bad < blocks:
            raise ValueError(f"first_bad: {first_bad} is none of the {blocks} blocks of keys")
        budget = self.budget()
        make = self._maker(ReportBad, budget, group=group.key, keys=keys[: MAX_BLOCKS * KEY_BYTES], first_bad=first_bad)
        answer = yield from self._ask_group(group, make, budget)
        return self._reason(answer) if isinstance(answer, Failure) else None

    # ---- writing

    def reserve(
        self,
        group: GroupRecord,
        tokens: TokenIds,
        *,
        first_block: int,
        keys: bytes | None,
        extras: Extras | None,
        deadline_seconds: float,
        device: DevicePool | None = None,
    ) -> Verb[TicketFacts]:
        packed = pack_prompt(tokens)
        extras = extras or NO_EXTRAS
        if keys is None:
            keys = chain_keys(group.key, packed, group.block_tokens, extras=extras)
        _require_fit(keys, len(packed) // TOKEN_BYTES, group.block_tokens)
        step = group.block_tokens * TOKEN_BYTES
        return (
            yield from self.reserve_tail(
                group,
                keys,
                first_block=first_block,
                tokens=packed[max(0, first_block) * step : len(keys) // KEY_BYTES * step],
                extras=extras,
                deadline_seconds=deadline_seconds,
                device=device,
            )
        )

    def reserve_tail(
        self,
        group: GroupRecord,
        keys: bytes,
        *,
        first_block: int,
        tokens: bytes,
        extras: Extras | None,
        deadline_seconds: float,
        device: DevicePool | None = None,
    ) -> Verb[TicketFacts]:
        extras = extras or NO_EXTRAS
        step = group.block_tokens * TOKEN_BYTES
        blocks = len(keys) // KEY_BYTES
        if first_block < 0:
            raise ValueError(f"first_block: {first_block} is negative")
        if len(keys) % KEY_BYTES or len(tokens) != max(0, blocks - first_block) * step:
            raise ValueError(
                f"tokens: {len(tokens)} bytes; {step} are needed for each of the blocks from {first_block} on, of "
                f"which there are {len(keys) / KEY_BYTES - first_block:g}"
            )
        end = min(blocks, _room_in_frame(first_block, step, extras))
        return (
            yield from self.reserve_packed(
                group,
                keys[: end * KEY_BYTES],
                first_block=first_block,
                tokens=tokens[: (end - first_block) * step],
                extras={block: list(inputs) for block, inputs in extras.items() if first_block <= block < end},
                deadline_seconds=deadline_seconds,
                device=device,
            )
        )

    def reserve_packed(
        self,
        group: GroupRecord,
        keys: bytes,
        *,
        first_block: int,
        tokens: bytes,
        extras: dict[int, list[bytes]],
        deadline_seconds: float,
        device: DevicePool | None = None,
    ) -> Verb[TicketFacts]:
        """As `reserve`, with everything as it is sent: `tokens` are those of the blocks from `first_block` on."""
        end = len(keys) // KEY_BYTES
        if end <= first_block:
            return TicketFacts(group=group, first_block=first_block)
        budget = self.budget(deadline_seconds)
        grant = self._state.new_grant()
        make = self._maker(
            Reserve,
            budget,
            grant=grant,
            group=group.key,
            rank=group.rank,
            keys=keys,
            first=first_block,
            tokens=tokens,
            extras=extras,
        )
        asked_with: list[MappedPool | None] = [None]

        def make_placed(session: Session) -> Request:
            asked_with.append(_mapped(device, session))
            return msgspec.structs.replace(make(session), on_device=asked_with[-1] is not None)

        yield from self._attend(device, budget.until)
        answer = yield from self._ask_grant(group, make_placed, budget, grant, Abort)
        if isinstance(answer, Failure):
            return TicketFacts(group=group, first_block=first_block, reason=self._reason(answer))
        return self._ticket(group, grant, answer, first_block, end, device, asked_with[-1])

    def _ticket(
        self,
        group: GroupRecord,
        grant: bytes,
        answer: Answer,
        first_block: int,
        end: int,
        device: DevicePool | None,
        asked_with: MappedPool | None,
    ) -> TicketFacts:
        reply: ReserveReply = answer.reply
        session = answer.session
        facts = TicketFacts(
            group=group, first_block=first_block, states=reply.states, reason=reason_of_text(reply.reason)
        )
        self._state.count(facts.reason)
        granted = granted_blocks(reply.states, first_block)
        if not len(granted):
            return facts
        offsets = np.frombuffer(reply.offsets, "<i8")
        placed: Placed | None = Placed(len(offsets))
        if not session.tenant:
            placed = place(offsets, session, slot_bytes_of(session, group), [] if device is None else [device])
        problem = None
        if placed is None or len(reply.states) != end - first_block:
            problem = Reason.WIRE_ERROR
        elif placed.count < len(offsets) or (placed.pool is not None and placed.pool is not asked_with):
            # Written into another pool than was meant, it would be somebody else's slot.
            problem = Reason.DEVICE_DOWN
        if placed is None or problem is not None:
            if placed is not None:
                placed.let_go()
            self._state.doubt(session, Abort(id=0, session=session.token, grant=grant))
            reason = self._reason(Failure(problem or Reason.WIRE_ERROR))
            return TicketFacts(group=group, first_block=first_block, reason=reason)
        if not self._state.hold(session):
            placed.let_go()
            reason = self._reason(Failure(Reason.SESSION_GONE))
            return TicketFacts(group=group, first_block=first_block, reason=reason)
        facts.grant, facts.session, facts.granted = grant, session, granted
        if session.tenant:
            facts.slots = facts.staged = StagedBlocks(group.block_bytes, len(granted))
        else:
            facts.slots = Slots(session, group, offsets, reply.generations, placed.pool)
        return facts

    def commit(self, facts: TicketFacts, wait: CommitWait) -> Verb[Committed]:
        session = facts.session
        if session is None:
            return Committed(visible=0, staged=0, reason=facts.reason)
        if facts.refused_block is not None:
            yield from self.abort(facts)
            self._state.count(facts.reason)
            return Committed(visible=0, staged=0, reason=facts.reason)
        if facts.is_lost:
            yield from self.abort(facts)
            return Committed(visible=0, staged=0, reason=self._reason(Failure(Reason.DEVICE_DOWN)))
        ending = Commit(id=0, session=session.token, grant=facts.grant)
        if facts.staged is not None:
            problem = yield from self._put_or_abort(facts, session)
            if problem is not None:
                return Committed(visible=0, staged=0, reason=self._reason(problem))
        if wait is CommitWait.SENT:
            failure = yield from self._give_back(session, ending)
            if failure is not None:
                return Committed(visible=0, staged=0, reason=self._reason(failure))
            return Committed(visible=0, staged=len(facts.granted))
        try:
            answer = yield from self._end_grant(session, ending)
        finally:
            self._state.let_go(session)
        if isinstance(answer, Failure):
            return Committed(visible=0, staged=0, reason=self._reason(answer))
        reply: CommitReply = answer.reply
        return Committed(visible=reply.visible, staged=reply.staged)

    def _put_or_abort(self, facts: TicketFacts, session: Session) -> Verb[Failure | None]:
        problem: Failure | None = Failure(Reason.DEADLINE)
        try:
            problem = yield from self.put_staged(facts)
            facts.staged = None  # what has arrived needs no memory here
        finally:  # also when the caller is interrupted or cancelled: what is half there must not stay
            if problem is not None:
                self._state.doubt(session, Abort(id=0, session=session.token, grant=facts.grant))
                self._state.let_go(session)
        return problem

    def abort(self, facts: TicketFacts) -> Verb[None]:
        """On its way when this returns, like `release`."""
        session = facts.session
        if session is not None:
            yield from self._give_back(session, Abort(id=0, session=session.token, grant=facts.grant))

    def seal(self, group: GroupRecord, keys: bytes, wait: str, deadline_seconds: float) -> Verb[Sealed]:
        keys = keys[: MAX_BLOCKS * KEY_BYTES]
        wanted = SealWait(wait)
        if not keys:
            return Sealed(blocks=0, flushed_blocks=0)
        budget = self.budget(deadline_seconds)
        make = self._maker(Seal, budget, group=group.key, keys=keys, wait=wanted)
        answer = yield from self._ask_group(group, make, budget)
        if isinstance(answer, Failure):
            return Sealed(blocks=0, flushed_blocks=0, reason=self._reason(answer))
        reply: SealReply = answer.reply
        reason = reason_of_text(reply.reason)
        self._state.count(reason)
        return Sealed(blocks=reply.blocks, flushed_blocks=reply.flushed_blocks, reason=reason)


def cut_name(name: str) -> str:
    """What the node takes of a request's name: whole characters, in at most MAX_NAME bytes."""
    return name.encode(errors="replace")[:MAX_NAME].decode(errors="ignore")


def _mapped(pool: DevicePool | None, session: Session) -> MappedPool | None:
    return None if pool is None else pool.mapped_under(session)


def slot_bytes_of(session: Session, group: GroupRecord) -> int:
    return slot_bytes(group.block_bytes, session.arena.page_bytes if session.arena is not None else 1)


def _require_fit(keys: bytes, num_tokens: int, block_tokens: int) -> None:
    blocks = num_tokens // block_tokens
    if len(keys) != blocks * KEY_BYTES:
        raise ValueError(
            f"keys: {len(keys)} bytes are {len(keys) / KEY_BYTES:g} keys, but tokens: {num_tokens} tokens are "
            f"{blocks} full blocks of {block_tokens}"
        )


def _room_in_frame(first_block: int, tokens_bytes: int, extras: Extras) -> int:
    """The block before which a Reserve from `first_block` on must end so that its frame isn't too large."""
    extra_bytes = sum(len(extra) + 16 for inputs in extras.values() for extra in inputs)
    room = MAX_FRAME_BYTES - FRAME_ROOM - extra_bytes - first_block * KEY_BYTES
    return min(MAX_BLOCKS, first_block + max(0, room) // (KEY_BYTES + tokens_bytes))
