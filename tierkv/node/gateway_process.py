"""The gateway for tenants that are not trusted, as the supervisor sees it: a child that is started, watched, restarted.

Nothing of the node depends on it. It says every second that it lives; the front is told, for status.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import ExitStack

from tierkv.config import Settings
from tierkv.node.children import Backoff, Child
from tierkv.node.control import GatewayHeard
from tierkv.node.gateway_config import GatewayConfig

GATEWAY_MODULE = "tierkv.gateway.process"
END_SECONDS = 2.0
MEMORY_BYTES, MEMORY_BYTES_A_USER = 2**30, 128 * 2**20
"""A gateway that is flooded loses connections first, itself at worst, and never the machine's memory."""

log = logging.getLogger(__name__)


class GatewayProcess:
    """Off unless there are `inline_users`. Call `start_if_due` and `look` from the supervisor's main thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._backoff = Backoff()
        self._child: Child | None = None
        self._lifeline: socket.socket | None = None
        self._problem = ""
        self._is_wanted = True
        self.due: float | None = 0.0 if settings.inline_users else None

    def filenos(self) -> list[int]:
        """What to wait for: its signs of life, and its end."""
        found = [self._lifeline.fileno()] if self._lifeline is not None else []
        return found + ([self._child.pidfd] if self._child is not None else [])

    def start_if_due(self, now: float) -> None:
        if self.due is None or self.due > now:
            return
        self.due = None
        self._backoff.started(now)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ExitStack() as undo:
            undo.enter_context(ours)
            with theirs:
                ours.setblocking(False)
                self._child = Child(GATEWAY_MODULE, [self._encode_config(theirs.fileno())], [theirs.fileno()])
            undo.pop_all()
        self._lifeline = ours
        log.info("gateway %d for %s at %s", self._child.pid, self._settings.inline_users, self._settings.inline_dir)

    def look(self) -> GatewayHeard | None:
        """What has been heard of it since, if anything."""
        heard = self._read_signs()
        if self._child is not None and (how := self._child.reap()) is not None:
            log.error("gateway %d %s", self._child.pid, how)
            due = self._backoff.died(time.monotonic())
            self.due = due if self._is_wanted else None
            heard = GatewayHeard(pid=self._child.pid, restarts=self._backoff.restarts, is_running=False, problem=how)
            self._problem = how
            self._forget()
        return heard

    def _read_signs(self) -> GatewayHeard | None:
        """Packets of one process only; at the end of the socket its death is about to be told."""
        heard = None
        while self._lifeline is not None and self._child is not None:
            try:
                sign = self._lifeline.recv(64)
            except BlockingIOError:
                break
            except OSError:
                sign = b""
            if not sign:
                self._lifeline.close()
                self._lifeline = None
                break
            heard = GatewayHeard(
                pid=self._child.pid, restarts=self._backoff.restarts, is_running=True, problem=self._problem
            )
        return heard

    def start_no_more(self) -> None:
        """The node is stopping: the one that runs serves until the end, no other follows."""
        self._is_wanted = False
        self.due = None

    def end(self) -> None:
        """Tell it to end, wait a little, kill it: whatever it held is the node's to free."""
        self.start_no_more()
        child = self._child
        if child is None:
            return
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        deadline = time.monotonic() + END_SECONDS
        while child.reap() is None:
            if time.monotonic() > deadline:
                child.kill()
                child.wait()
                break
            time.sleep(0.005)  # between two looks at a condition that has a deadline
        self._forget()

    def kill(self) -> None:
        self.start_no_more()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._forget()

    def _forget(self) -> None:
        self._child = None
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def _encode_config(self, lifeline_fd: int) -> str:
        settings = self._settings
        return GatewayConfig(
            socket_dir=str(settings.socket_dir),
            inline_dir=str(settings.inline_dir),
            users=settings.inline_uids,
            user_bytes=settings.inline_bytes,
            lifeline_fd=lifeline_fd,
            parent_pid=os.getpid(),
            memory_bytes=MEMORY_BYTES + len(settings.inline_uids) * MEMORY_BYTES_A_USER,
            log_level=settings.log_level,
        ).encode()
