"""The verbs of an engine, each as one story: which requests, in which order, and what every answer means.

Nothing raises because of the node: whatever goes wrong there is a smaller answer with a reason. A verb asks again by
itself only where that can't do harm: after the session turned out to be over (the node restarted), or the group to be
unknown to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import ceil
from typing import Any

import msgspec
import numpy as np

from tierkv.client.answers import Committed, Match, Sealed, reason_of_error, reason_of_text
from tierkv.client.breaker import Permit
from tierkv.client.grants import LeaseFacts, Slots, TicketFacts, granted_blocks, slot_bytes
from tierkv.client.groups import GroupRecord
from tierkv.client.prompt import Extras, TokenIds, pack_prompt
from tierkv.client.session import Refusal, Session
from tierkv.client.state import ClientState
from tierkv.client.steps import Ask, Connect, Silence, Step, Tell, Verb
from tierkv.core.keys import KEY_BYTES, NO_EXTRAS, TOKEN_BYTES, chain_keys
from tierkv.core.reasons import Reason
from tierkv.errors import LayoutMismatch
from tierkv.wire.frames import Malformed
from tierkv.wire.messages import (
    MAX_BLOCKS,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Acquire,
    AcquireReply,
    Commit,
    CommitReply,
    Error,
    ErrorCode,
    Hello,
    HelloReply,
    Holder,
    LeasePart,
    MatchReply,
    NotReady,
    OpenGroup,
    OpenGroupReply,
    Release,
    Reply,
    ReportBad,
    Request,
    Reserve,
    ReserveReply,
    Seal,
    SealReply,
    SealWait,
)
from tierkv.wire.messages import Match as MatchRequest

GRACE_SECONDS = 0.2
"""How long after a request's deadline its reply may still come: the node answers by the deadline, then it travels."""

ATTEMPTS = 3
FRAME_ROOM = 65_536
"""Bytes of a Reserve that are neither keys nor tokens nor extras, with room to spare."""


@dataclass(frozen=True, slots=True)
class Failure:
    """No usable reply. `again`: the session or the group was unknown; with a new session it may work."""

    reason: Reason
    again: bool = False
    error: Error | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    session: Session
    reply: Any


@dataclass(frozen=True, slots=True)
class Budget:
    """`deadline_seconds` for the node, `until` (monotonic) for us."""

    deadline_seconds: float
    until: float


class Verbs:
    def __init__(self, state: ClientState) -> None:
        self._state = state

    def budget(self, deadline_seconds: float | None = None) -> Budget:
        seconds = self._state.timeout_seconds if deadline_seconds is None else deadline_seconds
        if not 0 <= seconds <= 600:
            raise ValueError(f"deadline_seconds: {seconds} is not in 0 .. 600")
        return Budget(seconds, self._state.clock() + seconds + GRACE_SECONDS)

    @property
    def problem(self) -> str:
        return self._state.problem

    @property
    def endpoint(self) -> str:
        return str(self._state.socket_dir)

    # ---- sessions and groups

    def connect(self) -> Verb[Reason | None]:
        """Have a session, greeted. None when there is one, else why not."""
        session = yield from self._ready(self.budget().until)
        return self._reason(session) if isinstance(session, Failure) else None

    def ping(self) -> Verb[Reason | None]:
        """Whether the node answers now: None when it does."""
        answer = yield from self.ask(Hello, self.budget(), protocol=PROTOCOL_VERSION)
        return self._reason(answer) if isinstance(answer, Failure) else None

    def session_token(self) -> Verb[bytes]:
        session = yield from self._ready(self.budget().until)
        return b"" if isinstance(session, Failure) else session.token

    def open_group(self, group: GroupRecord) -> Verb[Reason | None]:
        """Raises LayoutMismatch where the node refuses the layout; else None, or why it isn't open yet."""
        budget = self.budget()
        answer = yield from self._ask_group(group, None, budget)
        if not isinstance(answer, Failure):
            return None
        if answer.error is not None and answer.error.code == ErrorCode.LAYOUT_MISMATCH:
            raise LayoutMismatch(answer.error.field or "block_bytes", group.block_bytes, answer.error.problem)
        return self._reason(answer)

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
            holders=holders,
            revocable=revocable,
        )
        answer = yield from self._ask_grant(group, make, budget, grant, Release)
        if isinstance(answer, Failure):
            return LeaseFacts(group=group, reason=self._reason(answer))
        return self._lease(group, grant, answer, bool(holders), most)

    def _lease(self, group: GroupRecord, grant: bytes, answer: Answer, has_holders: bool, most: int) -> LeaseFacts:
        reply: AcquireReply = answer.reply
        session = answer.session
        facts = LeaseFacts(
            group=group,
            grant=grant,
            blocks=reply.blocks,
            nvme_blocks=min(reply.nvme_blocks, reply.blocks),
            cached_blocks=reply.cached_blocks,
            parts=reply.parts,
            release_rank=group.rank if has_holders else None,
            reason=reason_of_text(reply.reason),
        )
        self._state.count(facts.reason)
        if not reply.blocks:
            return facts
        part = next((part for part in reply.parts if part.rank == group.rank), None)
        if part is None and has_holders:
            return facts  # all of it is for others
        if part is None or reply.blocks > most:
            return self._refuse_lease(group, session, grant)
        return self._hold_slots(facts, session, part)

    def _hold_slots(self, facts: LeaseFacts, session: Session, part: LeasePart) -> LeaseFacts:
        group = facts.group
        offsets = np.frombuffer(part.offsets, "<u8")
        if not _fit(offsets, session, group):
            return self._refuse_lease(group, session, facts.grant)
        if not self._state.hold(session):
            return LeaseFacts(group=group, reason=self._reason(Failure(Reason.SESSION_GONE)))
        generations = np.frombuffer(part.generations, "<u8")
        facts.slots = Slots(session, group, offsets.astype(np.int64), generations)
        facts.session = session
        return facts

    def _refuse_lease(self, group: GroupRecord, session: Session, grant: bytes) -> LeaseFacts:
        """The node granted what can't be: nothing of it is touched, and it is given back."""
        self._state.doubt(session, Release(id=0, session=session.token, grant=grant))
        return LeaseFacts(group=group, reason=self._reason(Failure(Reason.WIRE_ERROR)))

    def hold(self, group: GroupRecord, grant: bytes, token: bytes, part: LeasePart) -> LeaseFacts:
        """A lease that another session asked for, naming this one (by `token`) as the holder of `part`."""
        session = self._state.session()
        blocks = len(part.offsets) // 8
        if session is None or session.token != token:
            return LeaseFacts(group=group, reason=self._reason(Failure(Reason.SESSION_GONE)))
        facts = LeaseFacts(
            group=group, grant=grant, blocks=blocks, cached_blocks=blocks, parts=(part,), release_rank=part.rank
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
    ) -> Verb[TicketFacts]:
        packed = pack_prompt(tokens)
        extras = extras or NO_EXTRAS
        if keys is None:
            keys = chain_keys(group.key, packed, group.block_tokens, extras=extras)
        blocks = _require_fit(keys, len(packed) // TOKEN_BYTES, group.block_tokens)
        if first_block < 0:
            raise ValueError(f"first_block: {first_block} is negative")
        step = group.block_tokens * TOKEN_BYTES
        end = min(blocks, _room_in_frame(first_block, step, extras))
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
            keys=keys[: end * KEY_BYTES],
            first=first_block,
            tokens=packed[first_block * step : end * step],
            extras={block: list(inputs) for block, inputs in extras.items() if first_block <= block < end},
        )
        answer = yield from self._ask_grant(group, make, budget, grant, Abort)
        if isinstance(answer, Failure):
            return TicketFacts(group=group, first_block=first_block, reason=self._reason(answer))
        return self._ticket(group, grant, answer, first_block, end)

    def _ticket(self, group: GroupRecord, grant: bytes, answer: Answer, first_block: int, end: int) -> TicketFacts:
        reply: ReserveReply = answer.reply
        session = answer.session
        facts = TicketFacts(
            group=group, first_block=first_block, states=reply.states, reason=reason_of_text(reply.reason)
        )
        self._state.count(facts.reason)
        granted = granted_blocks(reply.states, first_block)
        if not len(granted):
            return facts
        offsets = np.frombuffer(reply.offsets, "<u8")
        if len(reply.states) != end - first_block or not _fit(offsets, session, group):
            self._state.doubt(session, Abort(id=0, session=session.token, grant=grant))
            reason = self._reason(Failure(Reason.WIRE_ERROR))
            return TicketFacts(group=group, first_block=first_block, reason=reason)
        if not self._state.hold(session):
            reason = self._reason(Failure(Reason.SESSION_GONE))
            return TicketFacts(group=group, first_block=first_block, reason=reason)
        facts.grant, facts.session, facts.granted = grant, session, granted
        facts.slots = Slots(session, group, offsets.astype(np.int64), np.frombuffer(reply.generations, "<u8"))
        return facts

    def commit(self, facts: TicketFacts) -> Verb[Committed]:
        session = facts.session
        if session is None:
            return Committed(visible=0, staged=0, reason=facts.reason)
        try:
            answer = yield from self._end_grant(session, Commit(id=0, session=session.token, grant=facts.grant))
        finally:
            self._state.let_go(session)
        if isinstance(answer, Failure):
            return Committed(visible=0, staged=0, reason=self._reason(answer))
        reply: CommitReply = answer.reply
        return Committed(visible=reply.visible, staged=reply.staged)

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

    # ---- operators

    def ask(self, kind: type[Request], budget: Budget, **fields: Any) -> Verb[Answer | Failure]:
        """A request about no group."""
        return (yield from self._ask_group(None, self._maker(kind, budget, **fields), budget))

    # ---- how a request is asked

    def _maker(self, kind: type[Request], budget: Budget, **fields: Any) -> Callable[[Session], Request]:
        """The deadline that travels is what is left of the budget when the request is sent."""

        def make(session: Session) -> Request:
            left = min(budget.deadline_seconds, budget.until - GRACE_SECONDS - self._state.clock())
            milliseconds = ceil(max(0.0, left) * 1_000)
            return kind(id=self._state.next_id(), session=session.token, deadline_ms=milliseconds, **fields)

        return make

    def _ask_grant(
        self,
        group: GroupRecord,
        make: Callable[[Session], Request],
        budget: Budget,
        grant: bytes,
        ending: type[Release] | type[Abort],
    ) -> Verb[Answer | Failure]:
        """Like `_ask_group`, for a request that makes a grant: whatever keeps its reply from us, the node may have
        granted, so that the `ending` of the grant is owed to it."""
        asked: list[Session] = []

        def make_noting(session: Session) -> Request:
            asked.append(session)
            return make(session)

        answer: Answer | Failure = Failure(Reason.DEADLINE)
        try:
            answer = yield from self._ask_group(group, make_noting, budget)
        finally:  # also when the caller is interrupted or cancelled while it waits
            if isinstance(answer, Failure) and answer.reason is not Reason.NOT_READY:
                for session in asked[-1:]:
                    self._state.doubt(session, ending(id=0, session=session.token, grant=grant))
        return answer

    def _give_back(self, session: Session, ending: Release | Abort) -> Verb[None]:
        try:
            if session.over:
                self._state.session_over(session)
                return
            self._state.doubt(session, ending)
            if self._state.is_answering:
                yield Tell(session)
        finally:
            self._state.let_go(session)

    def _end_grant(self, session: Session, ending: Commit) -> Verb[Answer | Failure]:
        """What doesn't get through now is sent again later. A session that is over has no grants."""
        if session.over:
            self._state.session_over(session)
            return Failure(Reason.SESSION_GONE)
        if self._state.permit() is Permit.REFUSED:
            self._state.doubt(session, ending)
            return Failure(Reason.NODE_AWAY)
        request = msgspec.structs.replace(ending, id=self._state.next_id())
        answer: Reply | Failure = Failure(Reason.DEADLINE)
        try:
            answer = yield from self._exchange(session, request, self.budget().until)
        finally:
            if isinstance(answer, Failure) and answer.error is None:
                self._state.doubt(session, ending)
        return answer if isinstance(answer, Failure) else Answer(session, answer)

    def _ask_group(
        self, group: GroupRecord | None, make: Callable[[Session], Request] | None, budget: Budget
    ) -> Verb[Answer | Failure]:
        failure = Failure(Reason.SESSION_GONE)
        for _attempt in range(ATTEMPTS):
            session = yield from self._ready(budget.until)
            if isinstance(session, Failure):
                return session
            answer: Reply | Failure | None = None
            if group is not None and group.key not in session.opened:
                answer = yield from self._open(session, group, budget)
            if not isinstance(answer, Failure) and make is not None:
                answer = yield from self._exchange(session, make(session), budget.until)
            if not isinstance(answer, Failure):
                return Answer(session, answer)
            if not answer.again:
                return answer
            failure = answer
        return failure

    def _open(self, session: Session, group: GroupRecord, budget: Budget) -> Verb[Reply | Failure]:
        make = self._maker(
            OpenGroup,
            budget,
            identity=group.identity,
            block_bytes=group.block_bytes,
            model_name=group.model_name,
            adapter_name=group.adapter_name,
            manifest=group.manifest,
            persistent=group.wants_persistence,
        )
        answer = yield from self._exchange(session, make(session), budget.until)
        if isinstance(answer, OpenGroupReply):
            if answer.group != group.key:
                return Failure(Reason.WIRE_ERROR)
            group.persistent, group.persistence_reason = answer.persistent, answer.reason
            session.opened.add(group.key)
        return answer

    def _ready(self, until: float) -> Verb[Session | Failure]:
        """A session that the node answers under. Costs no step while everything is well."""
        failure = Failure(Reason.SESSION_GONE)
        for _attempt in range(ATTEMPTS):
            permit = self._state.permit()
            if permit is Permit.REFUSED:
                return Failure(Reason.NODE_AWAY)
            session = self._state.session()
            if session is not None and session.greeted and permit is Permit.GO:
                return session
            soon = min(until, self._state.clock() + self._state.timeout_seconds)
            if session is None:
                opened: Session | Refusal = yield Connect(soon)
                if isinstance(opened, Refusal):
                    self._state.failed(opened.problem)
                    return Failure(opened.reason)
                session = opened
            # Hello is the probe, too: a verb of its own may rightly take seconds, this never does.
            answer = yield from self._greet(session, soon)
            if answer is None:
                return session
            if not answer.again:
                return answer
            failure = answer
        return failure

    def _greet(self, session: Session, until: float) -> Generator[Step, Any, Failure | None]:
        hello = Hello(id=self._state.next_id(), session=session.token, protocol=PROTOCOL_VERSION)
        answer = yield from self._exchange(session, hello, until)
        if isinstance(answer, HelloReply):
            if answer.incarnation == session.incarnation:
                session.greeted = True
                return None
            session.end()
            self._state.session_over(session)
            return Failure(Reason.SESSION_GONE, again=True)
        assert isinstance(answer, Failure)
        if answer.error is not None and not answer.again:
            self._state.failed(f"{answer.error.code}: {answer.error.problem}")  # it won't work a moment later either
        return answer

    def _exchange(self, session: Session, request: Request, until: float) -> Verb[Reply | Failure]:
        """One request, and what its answer means for session and breaker."""
        answer = yield Ask(session, request, until)
        if isinstance(answer, Silence):
            if session.over:
                self._state.session_over(session)
                return Failure(Reason.NODE_AWAY, again=True)
            self._state.failed(f"no answer to {type(request).__name__} in time")
            return Failure(answer.reason)
        self._state.answered()
        if isinstance(answer, request.reply):
            return answer
        if isinstance(answer, NotReady):
            return Failure(Reason.NOT_READY)
        if isinstance(answer, Error):
            return self._refused(session, answer)
        if isinstance(answer, Malformed):
            return Failure(Reason.WIRE_ERROR, error=answer.error)
        return Failure(Reason.WIRE_ERROR)

    def _refused(self, session: Session, error: Error) -> Failure:
        if error.code == ErrorCode.SESSION_GONE:
            session.end()
            self._state.session_over(session)
            return Failure(Reason.SESSION_GONE, again=True, error=error)
        if error.code == ErrorCode.UNKNOWN_GROUP:
            session.opened.clear()
            return Failure(Reason.SESSION_GONE, again=True, error=error)
        return Failure(reason_of_error(error), error=error)

    def _reason(self, failure: Failure) -> Reason:
        self._state.count(failure.reason)
        return failure.reason


def _fit(offsets: np.ndarray, session: Session, group: GroupRecord) -> bool:
    """Whether every slot lies in the arena, on a page: what a node says is checked before it is used as an address."""
    arena = session.arena
    if arena is None:
        return False
    page = arena.page_bytes
    last = arena.arena_bytes - slot_bytes(group.block_bytes, page)
    if page & (page - 1) or last < 0 or int(offsets.max()) > last:
        return False
    return int(np.bitwise_or.reduce(offsets)) & (page - 1) == 0


def _require_fit(keys: bytes, num_tokens: int, block_tokens: int) -> int:
    blocks = num_tokens // block_tokens
    if len(keys) != blocks * KEY_BYTES:
        raise ValueError(
            f"keys: {len(keys)} bytes are {len(keys) / KEY_BYTES:g} keys, but tokens: {num_tokens} tokens are "
            f"{blocks} full blocks of {block_tokens}"
        )
    return blocks


def _room_in_frame(first_block: int, tokens_bytes: int, extras: Extras) -> int:
    """The block before which a Reserve from `first_block` on must end so that its frame isn't too large."""
    extra_bytes = sum(len(extra) + 16 for inputs in extras.values() for extra in inputs)
    room = MAX_FRAME_BYTES - FRAME_ROOM - extra_bytes - first_block * KEY_BYTES
    return min(MAX_BLOCKS, first_block + max(0, room) // (KEY_BYTES + tokens_bytes))
