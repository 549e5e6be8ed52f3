"""Hears of the end of a session while nobody asks the node for anything.

A node counts the arena of a front that died as taken until every process has let go of it. An engine that has nothing
to do would hear of it with its next call only, and nobody would have that memory until then.
"""

from __future__ import annotations

import select
import socket
import threading
import weakref
from contextlib import suppress

from tierkv.client.session import Session
from tierkv.client.state import ClientState

SWEEP_SECONDS, SWEEP_MAX_SECONDS = 0.05, 5.0
"""Between two looks whether the memory of a session that is over can be let go of, doubling from the first to the
second."""


class SessionWatch:
    """A thread that waits on a session's socket, and retires the session when it is over. It ends with the session, or
    when a client that nobody has closed is collected: it keeps neither alive."""

    def __init__(self, session: Session, descriptor: int, state: ClientState) -> None:
        """`descriptor` is a duplicate of the session's; it is ours now."""
        self._socket = socket.socket(fileno=descriptor)
        self._session = weakref.ref(session)
        self._state = weakref.ref(state)
        weakref.finalize(session, _wake, self._socket).atexit = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="tierkv client watch", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def is_of(self, session: Session) -> bool:
        return self._session() is session

    def join(self) -> None:
        """Of a session that is over: returns at once."""
        self._stop.set()
        self._thread.join()

    def _wait(self) -> None:
        with self._socket:
            events = select.poll()
            events.register(self._socket, select.POLLIN)
            while not self._is_session_over():
                events.poll()
        session, state = self._session(), self._state()
        if session is not None and state is not None:
            state.session_over(session)
        del session, state
        pause = SWEEP_SECONDS
        while not self._is_let_go() and not self._stop.wait(pause):
            pause = min(2 * pause, SWEEP_MAX_SECONDS)

    def _is_let_go(self) -> bool:
        """Somebody may have had a view of the memory when the session ended, and drop it without a call to us."""
        session, state = self._session(), self._state()
        return session is None or state is None or state.sweep_views(session)

    def _is_session_over(self) -> bool:
        session = self._session()
        if session is None:
            return True
        session.look()
        return session.over


def _wake(connection: socket.socket) -> None:
    with suppress(OSError):  # the thread has ended, and closed it
        connection.shutdown(socket.SHUT_RD)
