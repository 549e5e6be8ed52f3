"""The name of the session socket: looked at now and then, for a cleaner of temporary files may have deleted it, and
then nobody new could connect."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.node.sessions import Sessions
from tierkv.node.socket_folder import claim_socket_folder, listen_for_sessions
from tierkv.wire.session import SESSION_SOCKET_NAME

CHECK_SECONDS = 20.0

log = logging.getLogger(__name__)


class SessionSocket:
    """Call `look` when it is `due`, in seconds of the monotonic clock."""

    def __init__(self, socket_dir: Path, sessions: Sessions, now: float) -> None:
        self._socket_dir = socket_dir
        self._sessions = sessions
        self._inode = self._find()
        self.due = now + CHECK_SECONDS

    def look(self, now: float, *, is_wanted: bool) -> None:
        """Make it again where it is not what it was, unless nobody is wanted any more."""
        self.due = now + CHECK_SECONDS
        if not is_wanted or self._find() == self._inode:
            return
        log.warning("the session socket was deleted or replaced; making it again")
        try:
            claim_socket_folder(self._socket_dir)
            self._sessions.replace_listener(listen_for_sessions(self._socket_dir))
        except ConfigError as error:
            log.error("nobody new can connect: %s", error)
            return
        self._inode = self._find()

    def _find(self) -> int | None:
        try:
            return os.stat(self._socket_dir / SESSION_SOCKET_NAME, follow_symlinks=False).st_ino
        except OSError:
            return None
