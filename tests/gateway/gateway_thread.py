"""A real gateway, in a thread with its own event loop, before a node that is a fake one as a rule."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tierkv.client.state import ClientState
from tierkv.gateway.process import Gateway
from tierkv.gateway.tenant_session import TenantSession
from tierkv.gateway.users import User
from tierkv.node.gateway_config import GatewayConfig
from tierkv.node.socket_folder import claim_inline_folder

T = TypeVar("T")

PATIENCE_SECONDS = 20.0


class GatewayThread:
    """Serves our own user, in `directory`. Up when the constructor returns."""

    def __init__(self, node_dir: Path, directory: Path, *, user_bytes: int = 2**30) -> None:
        claim_inline_folder(directory)
        self.directory = directory
        self._lifeline, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline.settimeout(PATIENCE_SECONDS)
        self._config = GatewayConfig(
            socket_dir=str(node_dir),
            inline_dir=str(directory),
            users=(os.geteuid(),),
            user_bytes=user_bytes,
            lifeline_fd=theirs.detach(),
            parent_pid=os.getpid(),
        )
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._live, name="gateway")
        self._thread.start()
        assert self._lifeline.recv(16) == b"alive"

    def _live(self) -> None:
        async def live() -> None:
            self._loop = asyncio.get_running_loop()
            self._gateway = Gateway(self._config)
            await self._gateway.run()

        try:
            asyncio.run(live())
        except BaseException as problem:  # noqa: BLE001 - handed to the test that owns this thread
            self.problem = problem

    def look(self, question: Callable[[], T]) -> T:
        """Asked in the gateway's own thread."""

        async def answer() -> T:
            return question()

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(PATIENCE_SECONDS)

    @property
    def user(self) -> User:
        return self._gateway._users[os.geteuid()]

    @property
    def sessions(self) -> list[TenantSession]:
        return list(self._gateway._service._sessions.values())

    @property
    def upstream(self) -> ClientState:
        return self._gateway._upstream.state

    @property
    def connections(self) -> int:
        return len(self._gateway._sockets[os.geteuid()]._connections)

    def close(self) -> None:
        self._lifeline.close()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self.problem is not None and error is None:
            raise self.problem
