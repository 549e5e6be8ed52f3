"""The gateway process: sockets for tenants on one side, an ordinary session on the node on the other.

    session socket    who connects, by the kernel's word -> a session, or a refusal
    user sockets      frames -> service -> replies
    lifeline          ends with the supervisor; a sign of life goes out on it every second

One thread, one event loop. A task that ends, whatever the reason, ends the process: the supervisor starts another, and
tenants register again by themselves. Run as `python -m tierkv.gateway.process CONFIG`.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import zmq.asyncio

from tierkv.errors import ConfigError, TierkvError
from tierkv.gateway.service import Service
from tierkv.gateway.tenant_session import TenantSession
from tierkv.gateway.upstream import Upstream
from tierkv.gateway.user_socket import Door, UserSocket
from tierkv.gateway.users import MAX_SESSIONS, User
from tierkv.node.gateway_config import GatewayConfig
from tierkv.node.sessions import Asked, Ended, Sessions
from tierkv.node.socket_folder import listen_for_sessions
from tierkv.wire.frames import encode
from tierkv.wire.messages import MAX_FRAME_BYTES, Reply
from tierkv.wire.session import SESSION_SOCKET_NAME, InlineGrant
from tierkv.wire.socket_directory import user_socket_name
from tierkv.workers.lifeline import end_with_parent

BEAT_SECONDS = 1.0
SOCKET_CHECK_SECONDS = 20.0
LOG_EVERY_SECONDS = 10.0
"""Tenants must not be able to fill the log."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>

log = logging.getLogger(__name__)


class Gateway:
    """Owns its sockets, its sessions, and its session on the node, until `close`."""

    def __init__(self, config: GatewayConfig) -> None:
        folder = Path(config.inline_dir)
        self._lifeline = socket.socket(fileno=config.lifeline_fd)
        self._lifeline.setblocking(False)
        self._incarnation = time.time_ns() // 1_000_000
        self._upstream = Upstream(Path(config.socket_dir))
        self._service = Service(self._upstream, incarnation=self._incarnation)
        self._users = {uid: User(uid=uid, limit_bytes=config.user_bytes) for uid in config.users}
        self._context = zmq.asyncio.Context()
        self._door = Door(self._context)
        self._sockets = {uid: self._open_socket(folder, user) for uid, user in self._users.items()}
        self._sessions = Sessions(listen_for_sessions(folder, 0o666), users=frozenset(self._users))
        self._session_socket = folder / SESSION_SOCKET_NAME
        self._stalled_log_due = 0.0
        self._inode = self._session_socket.stat().st_ino

    def _open_socket(self, folder: Path, user: User) -> UserSocket:
        def handle(peer: bytes, frame: bytes) -> None:
            def send(session: TenantSession | None, reply: Reply) -> None:
                opened.send(peer, b"" if session is None else session.token, encode(reply))

            self._service.handle(user, frame, send)

        opened = UserSocket(
            self._context, folder / user_socket_name(user.uid), user.uid, handle=handle, stalled=self._end_stalled
        )
        self._door.sockets[opened.domain] = opened
        return opened

    async def run(self) -> None:
        """Until the supervisor says so; raises what ended one of its tasks."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        loop.add_reader(self._lifeline, self._listen, ended)
        loop.add_reader(self._sessions.fileno(), self._take_sessions)
        duties = [self._door.serve(), self._beat()]
        duties += [duty for opened in self._sockets.values() for duty in (opened.serve(), opened.count())]
        tasks = [loop.create_task(duty) for duty in duties]
        try:
            await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._lifeline)
            loop.remove_reader(self._sessions.fileno())
            for task in tasks:
                task.cancel()
            problems = await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()
        for problem in problems:
            if isinstance(problem, Exception):
                raise problem

    def _listen(self, ended: asyncio.Future[None]) -> None:
        """Nothing is said on it: what can be read is its end."""
        if not ended.done():
            ended.set_result(None)

    async def _beat(self) -> None:
        """A sign of life, and what is to be done from time to time."""
        await self._upstream.run(self._upstream.verbs.connect())
        check_due = time.monotonic() + SOCKET_CHECK_SECONDS
        while True:
            # The supervisor is busy, and will read the ones before; or it has let go, which is for `_listen` to see.
            with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                self._lifeline.send(b"alive")
            self._service.sweep()
            self._sessions.expire()
            if check_due <= time.monotonic():
                check_due = time.monotonic() + SOCKET_CHECK_SECONDS
                self._require_sockets()
            await asyncio.sleep(BEAT_SECONDS)

    def _require_sockets(self) -> None:
        if any(opened.is_deleted for opened in self._sockets.values()) or self._find_inode() != self._inode:
            raise TierkvError("a socket was deleted or replaced; starting again to make it anew")

    def _find_inode(self) -> int | None:
        try:
            return self._session_socket.stat().st_ino
        except FileNotFoundError:
            return None

    # ---- sessions

    def _take_sessions(self) -> None:
        for event in self._sessions.poll():
            match event:
                case Asked():
                    self._admit(event)
                case Ended():
                    self._service.end_session(event.session.token)

    def _admit(self, asked: Asked) -> None:
        user = self._users[asked.knock.uid]
        if user.sessions >= MAX_SESSIONS:
            problem = f"user {user.uid} has {MAX_SESSIONS} sessions, as many as it may"
            self._sessions.refuse(asked.knock, "too_many_sessions", problem)
            return
        grant = InlineGrant(
            token=self._sessions.new_token(),
            incarnation=self._incarnation,
            endpoint=self._sockets[user.uid].endpoint,
            tenant=user.tenant,
        )
        known = self._sessions.grant_inline(asked.knock, grant)
        self._service.add(TenantSession(known, user))

    def _end_stalled(self, token: bytes) -> None:
        session = self._service.find(token)
        if session is None:
            return
        if (now := time.monotonic()) >= self._stalled_log_due:
            self._stalled_log_due = now + LOG_EVERY_SECONDS
            log.warning("a session of user %d does not read its replies; ending it", session.user.uid)
        self._service.end_session(token)
        self._sessions.end(session.known)

    async def _close(self) -> None:
        self._sessions.close()
        self._session_socket.unlink(missing_ok=True)
        await self._service.close()
        await self._upstream.close()
        for opened in self._sockets.values():
            opened.close()
        self._door.close()
        self._context.term()
        self._lifeline.close()


def _keep_freed_memory() -> None:
    """Have the allocator keep some of what is freed. By default every frame with payload is given back to the kernel,
    and the next one is taken from it page by page, which takes four times as long as copying it."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not every libc has it
        libc.mallopt(_M_MMAP_THRESHOLD, 2 * MAX_FRAME_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 * MAX_FRAME_BYTES)


def _limit_memory(num_bytes: int) -> None:
    """A peer may send parts of one message without an end, which ZeroMQ keeps until it has them all, whatever its
    queues are set to. So the kernel sets the limit: where it says no, ZeroMQ drops the connection that it was reading
    from."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    chosen = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (chosen, hard))


def main(arguments: list[str]) -> int:
    config = GatewayConfig.decode(arguments[0])
    _keep_freed_memory()
    if config.memory_bytes:
        _limit_memory(config.memory_bytes)
    end_with_parent(config.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the supervisor, which ends the lifeline
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s gateway: %(name)s: %(message)s"
    )

    async def live() -> None:
        await Gateway(config).run()

    try:
        asyncio.run(live())
    except ConfigError as error:
        log.error("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(sys.argv[1:]))
