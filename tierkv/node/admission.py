"""Who asked for a session gets one when there is a front to serve it: announced there first, then granted."""

from __future__ import annotations

from tierkv.node.control import SessionOpened
from tierkv.node.incarnation import Incarnation
from tierkv.node.sessions import Knock, Sessions
from tierkv.wire.messages import ErrorCode


class Admission:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._waiting: list[Knock] = []  # have said hello while no front was ready

    def ask(self, knock: Knock, incarnation: Incarnation | None) -> None:
        """Grant, or keep waiting: a front is on its way."""
        if incarnation is not None and incarnation.is_ready:
            self._grant(knock, incarnation)
            return
        self._waiting = [one for one in self._waiting if self._sessions.is_waiting(one)]
        self._waiting.append(knock)

    def front_is_ready(self, incarnation: Incarnation) -> None:
        waiting, self._waiting = self._waiting, []
        for knock in waiting:
            if self._sessions.is_waiting(knock):
                self._grant(knock, incarnation)

    def _grant(self, knock: Knock, incarnation: Incarnation) -> None:
        """The front hears of the session before the client learns its token: no request can overtake the news."""
        assert knock.hello is not None, "who has not said hello has not asked"
        token = self._sessions.new_token()
        opened = SessionOpened(token=token, pid=knock.pid, client=knock.hello.client, maps_arena=knock.hello.maps_arena)
        if incarnation.control.send_now(opened):
            self._sessions.grant(knock, token, incarnation.memory())
        else:
            self._sessions.refuse(knock, ErrorCode.TIMEOUT, "the front does not answer; try again")
