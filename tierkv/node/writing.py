"""Requests of those who write: Reserve, Commit, Abort, Seal; and the check of keys against tokens between the first
two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tierkv.core.grants import Committed, Refused, SealAnswer, Waiting
from tierkv.core.keys import TOKEN_BYTES, count_keys
from tierkv.core.reasons import Reason
from tierkv.node.core_calls import CoreCalls
from tierkv.node.front_sessions import SessionTable
from tierkv.node.key_check import KeyChecks, Verdict
from tierkv.node.outbox import Outbox
from tierkv.node.replies import commit_reply, reservation_reply, seal_reply, strange_grant
from tierkv.node.waiting import Asker
from tierkv.wire.messages import Abort, Commit, Done, Error, ErrorCode, Reply, Request, Reserve, Seal, SealWait


@dataclass(frozen=True, slots=True)
class _WaitingCommit:
    grant: bytes
    asker: Asker


class Writing:
    def __init__(self, core: CoreCalls, sessions: SessionTable, outbox: Outbox) -> None:
        self._core = core
        self._state = core.state
        self._sessions = sessions
        self._outbox = outbox
        self._checks: KeyChecks[_WaitingCommit] = KeyChecks()
        self._last_seal = 0
        self.handlers: dict[type[Request], Callable[[Any, Asker, float], Reply | None]] = {
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._abort,
            Seal: self._seal,
        }

    @property
    def num_checks(self) -> int:
        return len(self._checks)

    @property
    def is_hurried(self) -> bool:
        return self._checks.is_hurried or self._checks.is_behind

    @property
    def is_behind(self) -> bool:
        """So much waits to be checked that this goes before new requests."""
        return self._checks.is_behind

    def check_keys(self, now: float) -> None:
        """One slice of what is done when nobody waits for a reply; commits that waited for it go on."""
        for waiting in self._checks.run():
            reply = self._finish_commit(waiting.grant, waiting.asker.request_id, now)
            self._outbox.reply(waiting.asker, reply, now)

    def session_ended(self, now: float) -> None:
        """What its tickets' keys came to is of no interest any more; whoever waits to hear is told that they ended."""
        is_over = self._core.look(
            lambda: [grant for grant in self._checks.open_grants() if self._state.ticket_to_check(grant) is None]
        )
        for grant in is_over:
            for waiting in self._checks.forget(grant):
                self._outbox.reply(waiting.asker, self._finish_commit(grant, waiting.asker.request_id, now), now)

    def tick(self, now: float) -> None:
        for _, askers in self._core.seals.take_overdue(now):
            for asker in askers:
                answer = SealAnswer(0, 0, Reason.DEADLINE)
                self._outbox.reply(asker, seal_reply(asker.request_id, answer), now)

    def _reserve(self, request: Reserve, _asker: Asker, now: float) -> Reply:
        if request.on_device:
            self._sessions.catch_up()
        holder = request.holder or request.session
        ranks, block_tokens, _ = self._state.group_shape(request.group)
        refusal = self._sessions.refuse_holders(request.id, ranks, ((request.rank, holder),))
        if refusal is not None:
            return refusal
        num_blocks = count_keys(request.keys) - request.first
        if len(request.tokens) != num_blocks * block_tokens * TOKEN_BYTES:
            problem = f"{len(request.tokens) // TOKEN_BYTES} tokens for {num_blocks} blocks of {block_tokens}"
            return Error(id=request.id, code=ErrorCode.INVALID, problem=problem, field="tokens")
        if self._sessions.has_closed((holder,)):
            return reservation_reply(request.id, Refused(Reason.SESSION_GONE), num_blocks)
        answer = self._core.ask(
            now,
            lambda: self._state.reserve(
                grant=request.grant,
                session=request.session,
                holder=holder,
                group=request.group,
                rank=request.rank,
                keys=request.keys,
                first=request.first,
                tokens=request.tokens,
                extras=request.extras,
                on_device=request.on_device,
                now=now,
            ),
        )
        if not isinstance(answer, Refused):
            self._queue_check(request.grant, block_tokens)
        return reservation_reply(request.id, answer, num_blocks)

    def _queue_check(self, grant: bytes, block_tokens: int) -> None:
        """Of the ticket, not of this request: a repeated one could carry other keys than those that get published."""
        ticket = self._core.look(lambda: self._state.ticket_to_check(grant))
        if ticket is not None:
            self._checks.add(
                grant,
                group=ticket.group,
                block_tokens=block_tokens,
                keys=ticket.keys,
                first=ticket.first,
                tokens=ticket.tokens,
                extras=ticket.extras,
            )

    def _commit(self, request: Commit, asker: Asker, now: float) -> Reply | None:
        if self._core.look(lambda: self._state.is_strange_to(request.grant, request.session)):
            return strange_grant(request.id)
        if self._checks.settle(request.grant, _WaitingCommit(request.grant, asker)) is Verdict.PENDING:
            return None
        return self._finish_commit(request.grant, request.id, now)

    def _finish_commit(self, grant: bytes, request_id: int, now: float) -> Reply:
        if self._checks.verdict(grant) is Verdict.WRONG:
            self._core.do(now, lambda: self._state.abort(grant, now, Reason.KEY_MISMATCH))
            self._checks.forget(grant)
        recording = self._core.recording
        ticket = self._core.look(lambda: self._state.ticket_to_check(grant)) if recording.is_on else None
        answer = self._core.ask(now, lambda: self._state.commit(grant, now))
        if ticket is not None and isinstance(answer, Committed):
            recording.stored(ticket, now)
        return commit_reply(request_id, answer)

    def _abort(self, request: Abort, _asker: Asker, now: float) -> Reply:
        if self._core.look(lambda: self._state.is_strange_to(request.grant, request.session)):
            return strange_grant(request.id)
        self._core.do(now, lambda: self._state.abort(request.grant, now))
        for waiting in self._checks.forget(request.grant):
            reply = self._finish_commit(request.grant, waiting.asker.request_id, now)
            self._outbox.reply(waiting.asker, reply, now)
        return Done(id=request.id)

    def _seal(self, request: Seal, asker: Asker, now: float) -> Reply | None:
        """With `wait` FLUSHED answered when it is flushed or can't be, which may be as late as its deadline."""
        self._last_seal += 1
        seal_id = self._last_seal
        deadline = now + request.deadline_ms / 1000
        answer = self._core.ask(
            now,
            lambda: self._state.seal(
                seal_id=seal_id,
                group=request.group,
                keys=request.keys,
                wait_flushed=request.wait is SealWait.FLUSHED,
                deadline=deadline,
                now=now,
            ),
            on_waiting=lambda: self._core.seals.add(seal_id, asker, deadline),
        )
        return None if isinstance(answer, Waiting) else seal_reply(request.id, answer)
