"""The recorder, as the supervisor sees it: a child that is started, watched, restarted, for as long as the node lives.

The pair of sockets between front and recorder is the supervisor's, so that the death of one loses nothing of what the
other is about to read.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from tierkv.config import Settings
from tierkv.node.children import Backoff, Child
from tierkv.node.control import RecorderHeard
from tierkv.workers.recorder import RecorderConfig

RECORDER_MODULE = "tierkv.workers.recorder"
END_SECONDS = 5.0

log = logging.getLogger(__name__)


class RecorderProcess:
    """Off unless `record` names a file. Call `start_if_due` and `look` from the supervisor's main thread. Each recorder
    inherits `lock_fd`, the lock of the recording, so that no other node writes there while one still does."""

    def __init__(self, settings: Settings, lock_fd: int = -1) -> None:
        self._settings = settings
        self._lock_fds = [lock_fd] if lock_fd >= 0 else []
        self._backoff = Backoff()
        self._child: Child | None = None
        self._problem = ""
        self._is_wanted = settings.record is not None
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self.due: float | None = 0.0 if self._is_wanted else None
        if self._is_wanted:
            self._pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def front_end(self) -> list[int]:
        """The descriptor that a front sends its packets to, to be handed on with its settings; none where it is off."""
        return [self._pair[0].fileno()] if self._pair is not None else []

    def filenos(self) -> list[int]:
        return [self._child.pidfd] if self._child is not None else []

    def heard(self) -> RecorderHeard | None:
        """How it is; None where it is off. To be told to a front when it begins, and when this has changed."""
        if self._pair is None:
            return None
        return RecorderHeard(
            pid=self._child.pid if self._child is not None else 0,
            restarts=self._backoff.restarts,
            is_running=self._child is not None,
            problem=self._problem,
        )

    def start_if_due(self, now: float) -> None:
        if self.due is None or self.due > now or self._pair is None:
            return
        self.due = None
        self._backoff.started(now)
        settings, fd = self._settings, self._pair[1].fileno()
        config = RecorderConfig(
            path=str(settings.record),
            max_bytes=settings.record_bytes,
            socket_fd=fd,
            parent_pid=os.getpid(),
            log_level=settings.log_level,
        )
        self._child = Child(RECORDER_MODULE, [config.encode()], [fd, *self._lock_fds])
        log.info("recorder %d writes to %s", self._child.pid, settings.record)

    def look(self) -> None:
        """Start it again when it has died."""
        if self._child is None or (how := self._child.reap()) is None:
            return
        if self._is_wanted:
            log.error("recorder %d %s", self._child.pid, how)
            self._problem = how
            self.due = self._backoff.died(time.monotonic())
        self._child = None

    def end(self) -> None:
        """The front is gone: let it read what is left, wait a little, kill it."""
        self._is_wanted = False
        self.due = None
        self._close()
        deadline = time.monotonic() + END_SECONDS
        while self._child is not None:
            self.look()
            if self._child is not None and time.monotonic() > deadline:
                self.kill()
            time.sleep(0.005)  # between two looks at a condition that has a deadline

    def kill(self) -> None:
        self._is_wanted = False
        self.due = None
        self._close()
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def _close(self) -> None:
        for end in self._pair or ():
            end.close()
        self._pair = None
