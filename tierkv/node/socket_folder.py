"""The socket directory as the node owns it: made private, checked, with a session socket that listens.

Only its owner may enter it (0700), so that the sockets in it need no checks of their own. A directory that somebody
else could have put there, or put something into, is refused.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.wire.session import NODE_SOCKET_NAME, SESSION_SOCKET_NAME

BACKLOG = 512


def claim_socket_folder(socket_dir: Path) -> None:
    """Make the directory, mode 0700, or take one that is ours. Raises ConfigError("socket_dir")."""
    try:
        _make_missing(socket_dir)
        _require_private(socket_dir)
    except OSError as error:
        raise ConfigError("socket_dir", f"{socket_dir}: {error.strerror}") from error


def node_endpoint(socket_dir: Path) -> str:
    return f"ipc://{socket_dir / NODE_SOCKET_NAME}"


def listen_for_sessions(socket_dir: Path) -> socket.socket:
    """The session socket. The caller holds the directory's lock, so a socket file that lies there is stale."""
    path = socket_dir / SESSION_SOCKET_NAME
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.unlink(missing_ok=True)
        listener.bind(os.fsencode(path))
        os.chmod(path, 0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError("socket_dir", f"{path}: {error.strerror}") from error
    return listener


def remove_sockets(socket_dir: Path) -> None:
    """At the end of a node, while it still holds the lock."""
    for name in (SESSION_SOCKET_NAME, NODE_SOCKET_NAME):
        (socket_dir / name).unlink(missing_ok=True)


def _make_missing(socket_dir: Path) -> None:
    missing = []
    for folder in (socket_dir, *socket_dir.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            continue  # another node of this user makes its own beside it; what matters is checked afterwards
        os.chmod(folder, 0o700)


def _require_private(socket_dir: Path) -> None:
    found = os.lstat(socket_dir)
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError("socket_dir", f"{socket_dir} is a symbolic link; name the directory itself")
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError("socket_dir", f"{socket_dir} is not a directory")
    if found.st_uid != os.geteuid():
        raise ConfigError("socket_dir", f"{socket_dir} belongs to user {found.st_uid}; name one of your own")
    if found.st_mode & 0o077:
        raise ConfigError(
            "socket_dir",
            f"{socket_dir} can be entered by others (mode {found.st_mode & 0o777:o}); run: chmod 700 {socket_dir}",
        )
    for parent in socket_dir.parents:
        mode = os.stat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError("socket_dir", f"{parent} lets others put something in place of {socket_dir}")
