"""One session of a tenant: what it has opened and what it holds. Grant ids are its own: another session's id means
nothing here, however it was come by.

    Opening --granted--> HeldLease  --Release--> ended
            --granted--> HeldTicket --Abort----> ended
                                    --Commit---> ended, with the reply that a repeated Commit gets
            --ended meanwhile-> given back as soon as it is granted

Ended ids are remembered, so that a late or repeated request finds the same answer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from tierkv.client.grants import LeaseFacts, TicketFacts
from tierkv.client.groups import GroupRecord
from tierkv.client.slots import slot_bytes
from tierkv.gateway.spans import Writing
from tierkv.gateway.users import User
from tierkv.node.sessions import Session
from tierkv.wire.messages import AcquireReply, CommitReply, Error, NotReady, Reply, ReserveReply

PAGE_BYTES = 4096
MAX_ENDED = 1_024

CommitAnswer = CommitReply | NotReady | Error


@dataclass(slots=True, eq=False)
class Opening:
    """Asked of the node. `reply` comes with its answer."""

    reply: asyncio.Future[Reply]


@dataclass(slots=True, eq=False)
class HeldLease:
    facts: LeaseFacts
    reply: AcquireReply
    charged_bytes: int


@dataclass(slots=True, eq=False)
class HeldTicket:
    facts: TicketFacts
    reply: ReserveReply
    charged_bytes: int
    writing: Writing


Held = HeldLease | HeldTicket


@dataclass(slots=True, eq=False)
class TenantSession:
    """`known` is what the session socket knows of it. `groups` it has opened. `tasks` of requests that wait for the
    node end with it."""

    known: Session
    user: User
    groups: set[bytes] = field(default_factory=set)
    grants: dict[bytes, Opening | Held] = field(default_factory=dict)
    ended: OrderedDict[bytes, asyncio.Future[CommitAnswer] | None] = field(default_factory=OrderedDict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    is_over: bool = False

    @property
    def token(self) -> bytes:
        return self.known.token

    def find_lease(self, grant: bytes) -> HeldLease | None:
        """One whose node is still there: what an earlier one had in memory is not kept for its sake."""
        held = self.grants.get(grant)
        return held if isinstance(held, HeldLease) and not _is_stale(held) else None

    def find_ticket(self, grant: bytes) -> HeldTicket | None:
        held = self.grants.get(grant)
        return held if isinstance(held, HeldTicket) and not _is_stale(held) else None

    def remember_ended(self, grant: bytes, answer: asyncio.Future[CommitAnswer] | None = None) -> None:
        self.ended[grant] = answer
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def take(self, grant: bytes) -> Held | None:
        """Off the books, and remembered as ended. None when there is nothing to give back."""
        self.remember_ended(grant)
        held = self.grants.get(grant)
        if held is None or isinstance(held, Opening):
            return None  # who opens it finds it ended, and gives it back
        del self.grants[grant]
        held.facts.slots = None  # no view of the arena is kept: it may have to go
        self.user.held_bytes -= held.charged_bytes
        return held

    def take_stale(self) -> list[Held]:
        """Grants of an incarnation that is over."""
        stale = [grant for grant, held in self.grants.items() if not isinstance(held, Opening) and _is_stale(held)]
        return [held for grant in stale if (held := self.take(grant)) is not None]

    def take_all(self) -> list[Held]:
        return [held for grant in list(self.grants) if (held := self.take(grant)) is not None]


def blocks_affordable(user: User, record: GroupRecord) -> int:
    """How many more blocks the user may hold."""
    return max(0, user.limit_bytes - user.held_bytes) // slot_bytes(record.block_bytes, PAGE_BYTES)


def charge(user: User, record: GroupRecord, blocks: int) -> int:
    """Books `blocks` as held; the bytes."""
    num_bytes = blocks * slot_bytes(record.block_bytes, PAGE_BYTES)
    user.held_bytes += num_bytes
    return num_bytes


def _is_stale(held: Held) -> bool:
    session = held.facts.session
    return session is not None and session.over
