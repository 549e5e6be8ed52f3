"""How a request is asked: under which session, how often, what every answer means for session, group and breaker, and
what is owed to the node when the reply to a grant doesn't come.

Nothing raises because of the node. It is asked again only where that can't do harm: after the session turned out to be
over (the node restarted), or the group to be unknown to it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from math import ceil
from typing import Any

import msgspec

from tierkv.client.answers import reason_of_error
from tierkv.client.breaker import Permit
from tierkv.client.groups import GroupRecord
from tierkv.client.session import Refusal, Session, describe_refusal
from tierkv.client.state import ClientState
from tierkv.client.steps import Ask, Connect, Silence, Step, Tell, Verb
from tierkv.core.reasons import Reason
from tierkv.errors import LayoutMismatch
from tierkv.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Commit,
    Error,
    ErrorCode,
    Hello,
    HelloReply,
    NotReady,
    OpenGroup,
    OpenGroupReply,
    Release,
    Reply,
    Request,
)

GRACE_SECONDS = 0.2
"""How long after a request's deadline its reply may still come: the node answers by the deadline, then it travels."""

ATTEMPTS = 3

_LASTING = (ErrorCode.INVALID, ErrorCode.NO_VERDICT)
"""Why a group is refused for as long as the node runs."""


@dataclass(frozen=True, slots=True)
class Failure:
    """No usable reply. `again`: the session or the group was unknown; with a new session it may work. `error` is what
    the node said, where it said something."""

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


class Asking:
    def __init__(self, state: ClientState) -> None:
        self._state = state

    def budget(self, deadline_seconds: float | None = None) -> Budget:
        seconds = self._state.timeout_seconds if deadline_seconds is None else deadline_seconds
        if not 0 <= seconds <= 600:
            raise ValueError(f"deadline_seconds: {seconds} is not in 0 .. 600")
        return Budget(seconds, self._state.clock() + seconds + GRACE_SECONDS)

    def now(self) -> float:
        """By the clock that deadlines are kept by."""
        return self._state.clock()

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

    # ---- how a request is asked

    def ask(self, kind: type[Request], budget: Budget, **fields: Any) -> Verb[Answer | Failure]:
        """A request about no group."""
        return (yield from self._ask_group(None, self._maker(kind, budget, **fields), budget))

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

    def _give_back(self, session: Session, ending: Release | Abort | Commit) -> Verb[Failure | None]:
        """In doubt from the start: sent now, and again with later calls until the node confirms it, so that nobody
        waits. A session that is over has no grants. Says why it isn't on its way."""
        try:
            if session.over:
                self._state.session_over(session)
                return Failure(Reason.SESSION_GONE)
            self._state.doubt(session, ending)
            if not self._state.is_answering:
                return Failure(Reason.NODE_AWAY)
            yield Tell(session)
            return None
        finally:
            self._state.let_go(session)

    def _end_grant(self, session: Session, ending: Commit) -> Verb[Answer | Failure]:
        """What doesn't get through now is sent again later: every copy has completed, so it may well be published."""
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
            if group is not None and group.tenant != session.tenant:
                # It was declared while no node was there to say so. The keys of this call have another root: a miss.
                group.live_under(session.tenant)
                if make is not None:
                    return Failure(Reason.NOT_READY)
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
                self._state.warn_once(
                    f"it makes other keys than this client: the group is {answer.group.hex()} there and "
                    f"{group.key.hex()} here, so nothing can be shared; run the same release of tierkv on both sides"
                )
                return Failure(Reason.KEY_MISMATCH)
            group.persistent, group.persistence_reason = answer.persistent, answer.reason
            session.opened.add(group.key)
        elif isinstance(answer, Failure) and answer.error is not None and answer.error.code in _LASTING:
            self._state.warn_once(f"it refuses this model, so nothing is cached: {answer.error.problem}")
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
                    self._state.failed(opened.problem, lasting=opened.lasting)
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
            # It won't work a moment later either.
            self._state.failed(describe_refusal(answer.error.code, answer.error.problem))
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
        return Failure(Reason.WIRE_ERROR)  # the reply to something else, or one that can't be read: it settles nothing

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
