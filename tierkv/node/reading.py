"""Requests of those who read: Match, Acquire, Release, ReportBad, ReportPrefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tierkv.core.grants import Lease, Waiting
from tierkv.core.reasons import Reason
from tierkv.node.core_calls import CoreCalls
from tierkv.node.front_sessions import SessionTable
from tierkv.node.outbox import Outbox
from tierkv.node.replies import empty_lease, lease_reply, strange_grant
from tierkv.node.waiting import Asker
from tierkv.wire.messages import Acquire, Done, Match, MatchReply, Release, Reply, ReportBad, ReportPrefill, Request


class Reading:
    def __init__(self, core: CoreCalls, sessions: SessionTable, outbox: Outbox) -> None:
        self._core = core
        self._state = core.state
        self._sessions = sessions
        self._outbox = outbox
        self.handlers: dict[type[Request], Callable[[Any, Asker, float], Reply | None]] = {
            Match: self._match,
            Acquire: self._acquire,
            Release: self._release,
            ReportBad: self._report_bad,
            ReportPrefill: self._report_prefill,
        }

    def _match(self, request: Match, _asker: Asker, _now: float) -> Reply:
        found = self._core.look(lambda: self._state.match(request.group, request.keys))
        return MatchReply(id=request.id, blocks=found.blocks, host_blocks=found.host_blocks)

    def _acquire(self, request: Acquire, asker: Asker, now: float) -> Reply | None:
        """Answered when the lease is granted, which may be as late as its deadline."""
        if request.on_device:
            self._sessions.catch_up()
        holders = tuple((holder.rank, holder.session) for holder in request.holders) or ((0, request.session),)
        ranks, _, _ = self._state.group_shape(request.group)
        refusal = self._sessions.refuse_holders(request.id, ranks, holders)
        if refusal is not None:
            return refusal
        if self._sessions.has_closed(token for _rank, token in holders):
            return empty_lease(request.id, Reason.SESSION_GONE)
        deadline = now + request.deadline_ms / 1000
        recording = self._core.recording
        if recording.is_on and not self._core.look(lambda: self._state.is_leased(request.grant)):
            recording.ask(request.grant, request.group, request.keys, now)
        answer = self._core.ask(
            now,
            lambda: self._state.acquire(
                grant=request.grant,
                session=request.session,
                group=request.group,
                keys=request.keys,
                holders=holders,
                max_blocks=request.max_blocks,
                deadline=deadline,
                revocable=request.revocable,
                on_device=request.on_device,
                name=request.name,
                now=now,
            ),
            on_waiting=lambda: self._core.leases.add(request.grant, asker, deadline),
        )
        if isinstance(answer, Waiting):
            return None
        recording.answer(request.grant, answer if isinstance(answer, Lease) else None)
        return lease_reply(request.id, answer)

    def _release(self, request: Release, _asker: Asker, now: float) -> Reply:
        if self._core.look(lambda: self._state.is_strange_to(request.grant, request.session)):
            return strange_grant(request.id)
        self._end(request.grant, request.rank, now, request.session)
        if not self._core.look(lambda: self._state.is_leased(request.grant)):
            self._tell_ended(self._core.leases.take(request.grant), now)
        return Done(id=request.id)

    def _report_bad(self, request: ReportBad, _asker: Asker, now: float) -> Reply:
        self._core.do(now, lambda: self._state.report_bad(request.group, request.keys, request.first_bad, now))
        return Done(id=request.id)

    def _report_prefill(self, request: ReportPrefill, _asker: Asker, _now: float) -> Reply:
        self._core.look(lambda: self._state.report_prefill(request.group, request.samples))
        return Done(id=request.id)

    def tick(self, now: float) -> None:
        """A lease that another ended while somebody waited for it is never granted: its asker is told so here."""
        for grant, askers in self._core.leases.take_overdue(now):
            self._end(grant, None, now)
            self._tell_ended(askers, now)

    def _end(self, grant: bytes, rank: int | None, now: float, session: bytes | None = None) -> None:
        self._core.do(now, lambda: self._state.release(grant, rank, now, session))

    def _tell_ended(self, askers: list[Asker], now: float) -> None:
        for asker in askers:
            self._outbox.reply(asker, empty_lease(asker.request_id, Reason.GRANT_ENDED), now)
