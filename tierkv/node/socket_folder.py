"""The socket directory as the node owns it: made private, checked, with a session socket that listens.

Only its owner may enter it (0700), so that the sockets in it need no checks of their own. A directory that somebody
else could have put there, or put something into, is refused.

The directory for tenants that are not trusted is another one. Others may pass through it (0711) to sockets that they
know by name, but neither list it nor write in it; each of those sockets asks the kernel who connects.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.storage.new_folders import make_folders
from tierkv.wire.session import NODE_SOCKET_NAME, SESSION_SOCKET_NAME

BACKLOG = 512


def claim_socket_folder(socket_dir: Path) -> None:
    """Make the directory, mode 0700, or take one that is ours. Raises ConfigError("socket_dir")."""
    try:
        make_folders(socket_dir)
        _require_private(socket_dir)
    except OSError as error:
        raise ConfigError("socket_dir", f"{socket_dir}: {error.strerror}") from error


def claim_inline_folder(inline_dir: Path) -> None:
    """Make the directory, mode 0711, or take one that is ours, whose mode is its owner's choice as long as nobody else
    can write in it. Raises ConfigError("inline_dir")."""
    try:
        _require_passable(inline_dir)
        make_folders(inline_dir, mode=0o711)
        _require_own(inline_dir, "inline_dir")
        if os.lstat(inline_dir).st_mode & 0o022:
            raise ConfigError("inline_dir", f"{inline_dir} can be written by others; run: chmod go-w {inline_dir}")
    except OSError as error:
        raise ConfigError("inline_dir", f"{inline_dir}: {error.strerror}") from error


def node_endpoint(socket_dir: Path) -> str:
    return f"ipc://{socket_dir / NODE_SOCKET_NAME}"


def listen_for_sessions(socket_dir: Path, mode: int = 0o600) -> socket.socket:
    """The session socket. The caller holds the directory's lock, so a socket file that lies there is stale."""
    path = socket_dir / SESSION_SOCKET_NAME
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.unlink(missing_ok=True)
        listener.bind(os.fsencode(path))
        os.chmod(path, mode)
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


def remove_inline_sockets(inline_dir: Path) -> None:
    """All of them: only a gateway of ours makes sockets there."""
    for path in inline_dir.iterdir():
        if path.is_socket():
            path.unlink(missing_ok=True)


def _require_private(socket_dir: Path) -> None:
    _require_own(socket_dir, "socket_dir")
    mode = os.lstat(socket_dir).st_mode
    if mode & 0o077:
        raise ConfigError(
            "socket_dir",
            f"{socket_dir} can be entered by others (mode {mode & 0o777:o}); run: chmod 700 {socket_dir}",
        )


def _require_own(directory: Path, field: str) -> None:
    found = os.lstat(directory)
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(field, f"{directory} is a symbolic link; name the directory itself")
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(field, f"{directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise ConfigError(field, f"{directory} belongs to user {found.st_uid}; name one of your own")
    for parent in directory.parents:
        mode = os.stat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(field, f"{parent} lets others put something in place of {directory}")


def _require_passable(inline_dir: Path) -> None:
    """What is there and closed to everybody else is closed to every tenant."""
    for folder in (inline_dir, *inline_dir.parents):
        if os.path.lexists(folder) and not os.stat(folder).st_mode & 0o011:
            raise ConfigError(
                "inline_dir",
                f"others can't reach {inline_dir}, as {folder} is closed to them; name one like /run/tierkv-inline",
            )
