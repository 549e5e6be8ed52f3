"""What a client knows, shared by its threads: the session in use, those that wait to be finished, the breaker, the
grants in doubt, and the counts. Moves no request itself."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tierkv.client.answers import Counters
from tierkv.client.breaker import CircuitBreaker, Permit
from tierkv.client.device.pool import DevicePool
from tierkv.client.doubts import Doubts, Ending
from tierkv.client.groups import GroupRecord
from tierkv.client.prefill_reports import PrefillReports
from tierkv.client.session import Refusal, Session, open_session
from tierkv.core.prefill_rates import PrefillSample
from tierkv.core.reasons import Reason
from tierkv.errors import ForkedClient
from tierkv.wire.messages import Request

LOG_EVERY_SECONDS = 10.0

_log = logging.getLogger("tierkv.client")


class ClientState:
    def __init__(
        self,
        socket_dir: Path,
        *,
        client: str,
        maps_arena: bool,
        timeout_seconds: float,
        node_user: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket_dir = socket_dir
        self.timeout_seconds = timeout_seconds
        self.clock = clock
        self.closed = False
        self.problem = ""  # in words, why the node isn't reached; empty while it is
        self.next_id = itertools.count(1).__next__
        self._client = client
        self._maps_arena = maps_arena
        self._node_user = node_user
        self._pid = os.getpid()
        self._grant_prefix = os.urandom(8)
        self._grant_numbers = itertools.count()
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._session: Session | None = None
        self._retired: list[Session] = []
        self._breaker = CircuitBreaker()
        self._doubts = Doubts()
        self._prefills = PrefillReports()
        self._pools: dict[str, DevicePool] = {}
        self._reasons: Counter[Reason] = Counter()
        self._calls = self._sessions_opened = self._stale = self._unreadable = 0
        self._logged_at = -LOG_EVERY_SECONDS
        self._warned: set[str] = set()
        self._told_away = False

    # ---- a call

    def begin_call(self) -> None:
        """Raises ForkedClient in a child: the sockets, the session and the grants are its parent's."""
        if not self.is_own_process():
            raise ForkedClient("this client was made before fork(): call connect() in the child")
        with self._lock:
            self._calls += 1
            if self._retired:
                self._sweep()

    def new_grant(self) -> bytes:
        return self._grant_prefix + next(self._grant_numbers).to_bytes(8, "little")

    def count(self, reason: Reason | None) -> None:
        if reason is not None:
            with self._lock:
                self._reasons[reason] += 1

    # ---- is the node there

    def permit(self) -> Permit:
        with self._lock:
            return Permit.REFUSED if self.closed else self._breaker.ask(self.clock())

    @property
    def is_answering(self) -> bool:
        """As far as the last call knows. Takes no permit, so it is for what waits for no answer."""
        return self._breaker.is_closed and not self.closed

    def failed(self, problem: str, *, lasting: str = "") -> None:
        """`lasting` names what stays so until somebody changes it: told once, even if the node was away before."""
        now = self.clock()
        with self._lock:
            self.problem = problem
            worth_a_line = self._breaker.is_closed and now - self._logged_at >= LOG_EVERY_SECONDS
            if lasting and lasting not in self._warned:
                self._warned.add(lasting)
                worth_a_line = True
            self._breaker.failed(now)
            if worth_a_line:
                self._logged_at = now
        if worth_a_line:
            self._told_away = True
            _log.warning("node at %s is away, every call is a miss until it is back: %s", self.socket_dir, problem)

    def warn_once(self, problem: str) -> None:
        """What is wrong with this deployment, and stays so until somebody changes it."""
        with self._lock:
            is_known = problem in self._warned
            self._warned.add(problem)
        if not is_known:
            _log.warning("node at %s: %s", self.socket_dir, problem)

    def answered(self) -> None:
        if self._breaker.is_closed and not self.problem:
            return
        with self._lock:
            self._breaker.answered()
            self.problem = ""
            was_told_away, self._told_away = self._told_away, False
        if was_told_away:
            _log.info("node at %s is back", self.socket_dir)

    # ---- sessions

    def session(self) -> Session | None:
        """The one to ask under; None when there is none, or it is over."""
        session = self._session
        return None if session is None or session.over else session

    def connect(self, until: float) -> Session | Refusal:
        """Open a session, or wait for the thread that is at it. Blocks, not beyond `until` of our clock."""
        until = time.monotonic() + until - self.clock()  # from here on it is the kernel that waits
        if not self._connecting.acquire(timeout=max(0.0, until - time.monotonic())):
            return Refusal(Reason.DEADLINE, "another thread is still opening the session")
        try:
            current = self.session()
            if current is not None:
                return current
            opened = open_session(
                self.socket_dir,
                client=self._client,
                maps_arena=self._maps_arena,
                until=until,
                node_user=self._node_user,
            )
            return self._adopt(opened) if isinstance(opened, Session) else opened
        finally:
            self._connecting.release()

    def _adopt(self, opened: Session) -> Session | Refusal:
        with self._lock:
            before, self._session = self._session, opened
            self._sessions_opened += 1
            if before is not None:
                self._retire(before)
            if not self.closed:
                return opened
            self._session = None
            self._retire(opened)
            return Refusal(Reason.NODE_AWAY, "the client was closed meanwhile")

    def session_over(self, session: Session) -> None:
        with self._lock:
            if self._session is session:
                self._session = None
                self._retire(session)

    def pool(self, device: str) -> DevicePool:
        """The one for that device, made once."""
        with self._lock:
            pool = self._pools.get(device)
            if pool is None:
                pool = self._pools[device] = DevicePool(device)
                if self.closed:
                    pool.close()
            return pool

    def pools(self) -> tuple[DevicePool, ...]:
        return tuple(self._pools.values()) if self._pools else ()

    def forget_group(self, key: bytes) -> None:
        """Nobody uses it any more: who opens it again asks the node again."""
        session = self._session
        if session is not None:
            session.opened.discard(key)

    def hold(self, session: Session) -> bool:
        """Count a grant that uses the session's arena. False when the arena is on its way out."""
        with self._lock:
            if session.retired:
                return False
            session.grants += 1
            return True

    def let_go(self, session: Session) -> None:
        with self._lock:
            session.grants -= 1
            if session.retired:
                self._sweep()

    def _retire(self, session: Session) -> None:
        session.retired = True
        session.end()
        for pool in self._pools.values():
            pool.drop(session)
        session.unpin(self.sweep)
        self._doubts.session_over(session)
        self._retired.append(session)
        self._sweep()

    def sweep(self) -> None:
        """Something that kept a retired session's memory mapped has let go of it."""
        with self._lock:
            self._sweep()

    def sweep_views(self, session: Session) -> bool:
        """Whether the session, which is over, has nothing mapped any more. Where no grant is open and somebody has a
        view all the same, it may be one that only the garbage collector still knows of."""
        with self._lock:
            self._sweep()
            is_left = session in self._retired
            may_be_garbage = is_left and not session.grants
        if may_be_garbage:
            gc.collect()
            self.sweep()
        return not is_left

    def _sweep(self) -> None:
        self._retired = [session for session in self._retired if session.grants or not session.finish()]

    # ---- grants in doubt

    def doubt(self, session: Session, ending: Ending) -> None:
        with self._lock:
            if not session.retired:
                self._doubts.add(session, ending)

    def owes(self, session: Session) -> bool:
        """Whether an end of a grant is due to be sent under `session`."""
        if not self._doubts:
            return False
        with self._lock:
            return any(self._doubts.due(session, self.clock()))

    def send_doubts(self, session: Session, send: Callable[[Ending], bool]) -> None:
        """Pass to `send` what is due, with a new id each, until it says False (it can't take more now)."""
        now = self.clock()
        with self._lock:
            for doubt in self._doubts.due(session, now):
                ending = doubt.renew(self.next_id())
                if not send(ending):
                    return
                self._doubts.sent(doubt, ending, now)

    # ---- what engines tell of their prompts

    def note_prefill(self, group: GroupRecord, tokens: int, first_token: int, seconds: float) -> None:
        """To be sent with some later call, or never. What can't be is left out."""
        sample = PrefillSample(int(tokens), int(first_token), float(seconds))  # whatever stands for a number
        if sample.is_possible:
            with self._lock:
                self._prefills.add(group, sample)

    def send_prefills(self, session: Session, send: Callable[[Request], bool]) -> None:
        """Pass a report to `send` if one is due. One that it can't take is lost."""
        now = self.clock()
        if not self._prefills.is_due(now):
            return
        with self._lock:
            report = self._prefills.take(session, self.next_id(), now)
        if report is not None:
            send(report)

    # ---- what comes back, and connections

    def connection_lost(self, session: Session) -> None:
        """A connection of `session` has ended: what is in doubt under it is sent again without a wait."""
        if self._doubts:
            with self._lock:
                self._doubts.connection_lost(session)

    def note_other(self, request: int, *, readable: bool) -> None:
        """A reply that nobody waits for: to the end of a grant in doubt, to a report, to a call that gave up, or
        noise."""
        with self._lock:
            if not readable:
                self._unreadable += 1
            elif not self._doubts.answered(request) and not self._prefills.answered(request):
                self._stale += 1

    # ---- outside

    def counters(self) -> Counters:
        with self._lock:
            sessions = [*self._retired, *([self._session] if self._session is not None else [])]
            return Counters(
                calls=self._calls,
                by_reason=dict(self._reasons),
                sessions_opened=self._sessions_opened,
                stale_replies=self._stale,
                unreadable_replies=self._unreadable,
                doubts_dropped=self._doubts.dropped,
                in_doubt=len(self._doubts),
                open_grants=sum(session.grants for session in sessions),
            )

    def is_own_process(self) -> bool:
        """False in a forked child, which must not so much as close what it has inherited: Detach would end the
        parent's session, and a shutdown of the socket is felt by both."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """No call goes to the node any more. The session ends as soon as no grant and no view of it is open."""
        with self._lock:
            self.closed = True
            self.problem = "the client is closed"
            session, self._session = self._session, None
            if session is not None:
                self._retire(session)
            for pool in self._pools.values():
                pool.close()
            self._sweep()
