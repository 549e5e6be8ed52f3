"""Grants whose end the node hasn't confirmed: a reply was lost, a call was interrupted, the node didn't answer.

The node may hold slots for each of them, so their end (Release, Abort, or the Commit that was under way) is sent ahead
of the next requests until a reply to it comes. All verbs are idempotent by grant id, so once too often is fine.

Not thread-safe: the client's lock is held around it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from tierkv.client.session import Session
from tierkv.wire.messages import Abort, Commit, Release

RESEND_SECONDS = 1.0
CAPACITY = 4_096

Ending = Release | Abort | Commit


@dataclass(slots=True)
class Doubt:
    session: Session
    ending: Ending  # its id is that of the last time it was sent
    send_at: float

    def renew(self, request: int) -> Ending:
        return msgspec.structs.replace(self.ending, id=request)


class Doubts:
    """At most CAPACITY, the oldest are given up first (the node frees those with the session) and counted."""

    def __init__(self) -> None:
        self.dropped = 0
        self._by_grant: OrderedDict[bytes, Doubt] = OrderedDict()
        self._by_request: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._by_grant)

    def add(self, session: Session, ending: Ending) -> None:
        self._forget(ending.grant)
        self._by_grant[ending.grant] = Doubt(session, ending, send_at=0.0)
        if len(self._by_grant) > CAPACITY:
            self._forget(next(iter(self._by_grant)))
            self.dropped += 1

    def due(self, session: Session, now: float) -> Iterator[Doubt]:
        """Those to be sent now under `session`; call `sent` for each that was."""
        return (doubt for doubt in list(self._by_grant.values()) if doubt.session is session and doubt.send_at <= now)

    def sent(self, doubt: Doubt, ending: Ending, now: float) -> None:
        self._by_request.pop(doubt.ending.id, None)
        self._by_request[ending.id] = ending.grant
        doubt.ending = ending
        doubt.send_at = now + RESEND_SECONDS

    def connection_lost(self, session: Session) -> None:
        """What was sent under it may have gone down with the connection: all of it is due now."""
        for doubt in self._by_grant.values():
            if doubt.session is session:
                doubt.send_at = 0.0

    def answered(self, request: int) -> bool:
        """Whether `request` was the end of a grant in doubt, which it is no longer."""
        grant = self._by_request.get(request)
        if grant is None:
            return False
        self._forget(grant)
        return True

    def session_over(self, session: Session) -> None:
        """Whatever was granted under it is the node's to end."""
        for grant in [grant for grant, doubt in self._by_grant.items() if doubt.session is session]:
            self._forget(grant)

    def _forget(self, grant: bytes) -> None:
        doubt = self._by_grant.pop(grant, None)
        if doubt is not None:
            self._by_request.pop(doubt.ending.id, None)
