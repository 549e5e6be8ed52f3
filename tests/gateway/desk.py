"""A gateway's service with users of any number, asked directly: no sockets on the tenants' side."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.client.conftest import BLOCK_TOKENS, make_identity
from tierkv.core.identity import Identity
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.gateway.service import Service
from tierkv.gateway.tenant_session import TenantSession
from tierkv.gateway.upstream import Upstream
from tierkv.gateway.users import User
from tierkv.node.sessions import Session
from tierkv.wire.frames import encode
from tierkv.wire.messages import (
    Acquire,
    AcquireReply,
    Commit,
    Match,
    OpenGroup,
    OpenGroupReply,
    Put,
    Reply,
    Request,
    Reserve,
    ReserveReply,
)

ANSWER_SECONDS = 20.0


class Tenant:
    """One session of a user. `group` once it has opened one."""

    def __init__(self, desk: Desk, user: User) -> None:
        self.desk = desk
        self.user = user
        ours, self._theirs = socket.socketpair()
        self.session = TenantSession(Session(os.urandom(16), 1, os.getpid(), "", False, None, ours, user.uid), user)
        self.group = b""
        desk.service.add(self.session)

    async def ask(self, kind: type[Request], **fields: Any) -> Any:
        return await self.desk.ask(self.user, kind(**{"id": next(self.desk.ids), "session": self.token} | fields))

    @property
    def token(self) -> bytes:
        return self.session.token

    async def open(self, identity: Identity | None = None, salt: str = "") -> OpenGroupReply:
        identity = msgspec.structs.replace(identity or make_identity(), salt=salt)
        block_bytes = identity.layout.total_block_bytes
        reply = await self.ask(OpenGroup, identity=identity, block_bytes=block_bytes)
        if isinstance(reply, OpenGroupReply):
            self.group = reply.group
        return reply  # type: ignore[no-any-return]

    def keys(self, tokens: list[int]) -> bytes:
        return chain_keys(self.group, pack_tokens(tokens), BLOCK_TOKENS)

    async def reserve(self, tokens: list[int], grant: bytes) -> ReserveReply:
        whole = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]
        reply = await self.ask(
            Reserve, grant=grant, group=self.group, keys=self.keys(tokens), first=0, tokens=pack_tokens(whole)
        )
        assert isinstance(reply, ReserveReply)
        return reply

    async def store(self, tokens: list[int], payload: bytes) -> None:
        grant = os.urandom(16)
        await self.reserve(tokens, grant)
        await self.ask(Put, grant=grant, start=0, payload=payload)
        await self.ask(Commit, grant=grant)

    async def acquire(self, tokens: list[int], grant: bytes) -> AcquireReply:
        reply = await self.ask(Acquire, grant=grant, group=self.group, keys=self.keys(tokens))
        assert isinstance(reply, AcquireReply)
        return reply

    async def match(self, tokens: list[int]) -> int:
        reply = await self.ask(Match, group=self.group, keys=self.keys(tokens))
        return int(reply.blocks)

    def close(self) -> None:
        self.desk.service.end_session(self.token)
        self._theirs.close()
        assert self.session.known.sock is not None
        self.session.known.sock.close()


class Desk:
    def __init__(self, node_dir: Path) -> None:
        self.ids = itertools.count(1)
        self.upstream = Upstream(node_dir)
        self.service = Service(self.upstream, incarnation=1)
        self._tenants: list[Tenant] = []

    def user(self, uid: int, limit_bytes: int = 2**30) -> User:
        return User(uid=uid, limit_bytes=limit_bytes)

    def tenant(self, user: User) -> Tenant:
        made = Tenant(self, user)
        self._tenants.append(made)
        return made

    async def ask(self, user: User, request: Request) -> Reply:
        return await self.ask_frame(user, encode(request))

    async def ask_frame(self, user: User, frame: bytes) -> Reply:
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.service.handle(user, frame, lambda _session, answer: reply.set_result(answer))
        return await asyncio.wait_for(reply, ANSWER_SECONDS)

    async def close(self) -> None:
        for tenant in self._tenants:
            tenant.close()
        await self.service.close()
        await self.upstream.close()


@asynccontextmanager
async def open_desk(node_dir: Path) -> AsyncIterator[Desk]:
    desk = Desk(node_dir)
    try:
        yield desk
    finally:
        await desk.close()


def run(node_dir: Path, program: Callable[[Desk], Awaitable[None]]) -> None:
    """With every task awaited at the end."""

    async def main() -> None:
        async with open_desk(node_dir) as desk:
            await program(desk)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left"

    asyncio.run(main())
