"""Sessions as the front knows them: what the supervisor has announced."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tierkv.wire.messages import Error, ErrorCode


@dataclass(slots=True)
class FrontSession:
    """Closed: no new requests come from it, though what it holds stays held. Slow: closed by us, as it did not read
    its replies; its process goes on, and may still end what it holds."""

    token: bytes
    client: str
    maps_arena: bool
    pid: int = 0
    is_closed: bool = False
    is_slow: bool = False
    groups: set[bytes] = field(default_factory=set)


class SessionTable:
    """`catch_up()` takes what the supervisor has said since: a session is announced before its client can know its
    token, and that it maps a pool before it can; but that may still be unread when the first request comes."""

    def __init__(self, catch_up: Callable[[], None] = lambda: None) -> None:
        self._sessions: dict[bytes, FrontSession] = {}
        self.catch_up = catch_up

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: FrontSession) -> None:
        self._sessions[session.token] = session

    def remove(self, token: bytes) -> None:
        self._sessions.pop(token, None)

    def close(self, token: bytes) -> None:
        session = self._sessions.get(token)
        if session is not None:
            session.is_closed = True

    def note_lost_reply(self, token: bytes) -> bool:
        """A reply of this session was lost. Whether that is news; it is slow from now on."""
        session = self._sessions.get(token)
        if session is None or session.is_slow:
            return False
        session.is_slow = True
        return True

    def find(self, token: bytes) -> FrontSession | None:
        session = self._sessions.get(token)
        if session is None:
            self.catch_up()
            session = self._sessions.get(token)
        return session

    def is_used(self, group: bytes, *, beside: bytes) -> bool:
        """Whether a session that may ask has the group open, another than `beside`."""
        return any(
            group in session.groups and not session.is_closed and session.token != beside
            for session in self._sessions.values()
        )

    def has_closed(self, holders: Iterable[bytes]) -> bool:
        """Whether one of them takes no part any more, though its process lives: it could never say that its copies have
        ended."""
        found = map(self._sessions.get, holders)
        return any(session is not None and session.is_closed for session in found)

    def refuse_holders(self, request_id: int, ranks: int, holders: tuple[tuple[int, bytes], ...]) -> Error | None:
        """A holder copies the bytes: it must have the arena mapped, and its rank must exist. One that has ended is
        the core's to refuse."""
        seen: set[int] = set()
        for rank, token in holders:
            if rank >= ranks or rank in seen:
                problem = f"rank {rank} is named twice" if rank in seen else f"rank {rank} is not in 0 .. {ranks - 1}"
                return Error(id=request_id, code=ErrorCode.INVALID, problem=problem, field="rank")
            seen.add(rank)
            session = self.find(token)
            if session is not None and not session.maps_arena:
                problem = f"the holder of rank {rank} does not map the arena"
                return Error(id=request_id, code=ErrorCode.INVALID, problem=problem, field="holder")
        return None
