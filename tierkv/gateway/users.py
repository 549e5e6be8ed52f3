"""Who the tenants are, and what each may have. A user of the machine is one tenant, however many processes it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.client.groups import GroupRecord, declare
from tierkv.core.tenancy import tenant_of_user, under_tenant
from tierkv.wire.messages import OpenGroup

MAX_SESSIONS = 64
MAX_GROUPS = 256
MAX_IDENTITY_BYTES = 65_536
MAX_REQUESTS = 128
MAX_REQUEST_BYTES = 32 * 2**20
MAX_NAME = 100


@dataclass(slots=True, eq=False)
class _OpenGroup:
    """`sessions` that have it open, by token."""

    record: GroupRecord
    sessions: set[bytes] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class User:
    """`limit_bytes` of slots may be in its leases and tickets at one time. `requests` of it, `request_bytes` long, are
    under way at the node."""

    uid: int
    limit_bytes: int
    tenant: str = field(init=False)
    held_bytes: int = 0
    requests: int = 0
    request_bytes: int = 0
    sessions: int = 0
    _groups: dict[bytes, _OpenGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tenant = tenant_of_user(self.uid)

    def declare(self, request: OpenGroup) -> GroupRecord:
        """The group that is really meant: this user's own, whatever the salt. Raises ConfigError or LayoutMismatch, as
        a client's `open` would.

        The list of weight files is left out, and names are marked: both are for people, who should know whose word it
        is.
        """
        return declare(
            under_tenant(request.identity, self.tenant),
            rank=0,
            model_name=_mark(request.model_name, self.uid),
            adapter_name=_mark(request.adapter_name, self.uid),
            manifest=(),
            block_bytes=request.block_bytes,
            persistent=request.persistent,
            moves_coded=True,
        )

    def has_room_for(self, record: GroupRecord) -> bool:
        return record.key in self._groups or len(self._groups) < MAX_GROUPS

    def admit(self, record: GroupRecord, session: bytes) -> GroupRecord:
        """Remember a group that the node has opened for this session; the record in use of it."""
        known = self._groups.setdefault(record.key, _OpenGroup(record))
        known.sessions.add(session)
        return known.record

    def leave(self, group: bytes, session: bytes) -> bool:
        """The session has ended. Whether no other has the group open: then it is forgotten, and takes no place."""
        known = self._groups[group]
        known.sessions.discard(session)
        if known.sessions:
            return False
        del self._groups[group]
        return True

    def record(self, group: bytes, rank: int) -> GroupRecord:
        """Of a group that was admitted. Raises ConfigError for a rank that it hasn't got."""
        first = self._groups[group].record
        if not rank:
            return first
        return declare(
            first.identity,
            rank=rank,
            model_name=first.model_name,
            adapter_name=first.adapter_name,
            manifest=(),
            block_bytes=None,
            persistent=first.wants_persistence,
            moves_coded=True,
        )


def _mark(name: str, uid: int) -> str:
    if not name:
        return ""
    shown = "".join(character if character.isprintable() else "?" for character in name[:MAX_NAME])
    return f"{shown} (inline user {uid})"
