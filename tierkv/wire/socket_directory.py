"""Where a node's sockets are: the directory that is its endpoint, for clients, operators and the node itself.

    <socket directory>/session.sock   sessions and descriptors (tierkv.wire.session)
                       node.sock      ZeroMQ
                       LOCK           flock of a node without a data directory

It is derived from the data directory's real path, so that a client needs to know nothing but the data directory, and
is short, because the address of a Unix socket holds 107 bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from tierkv.wire.session import NODE_SOCKET_NAME, SESSION_SOCKET_NAME

MAX_SOCKET_PATH_BYTES = 107
"""`sun_path` of Linux without its final zero."""


def default_socket_dir(data_dir: Path | None, name: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of the node on `data_dir`, or of the memory-only node called `name`. Touches nothing but to
    resolve symlinks of `data_dir`."""
    return _roots(environ)[0] / "tierkv" / directory_name(data_dir, name)


def find_socket_dir(data_dir: Path | None, name: str = "", environ: Mapping[str, str] = os.environ) -> Path:
    """Like `default_socket_dir`, but prefers a directory in which a session socket lies. A node started by a service
    manager and an engine started from a login shell do not agree about XDG_RUNTIME_DIR; both places are looked at."""
    candidates = [root / "tierkv" / directory_name(data_dir, name) for root in _roots(environ)]
    for candidate in candidates:
        if (candidate / SESSION_SOCKET_NAME).is_socket():
            return candidate
    return candidates[0]


def default_inline_dir(socket_dir: Path) -> Path:
    """Where tenants that are not trusted find the gateway of the node at `socket_dir`. A runtime directory is closed to
    other users as a rule, so it is not below it."""
    return Path(f"{_fallback()}-inline") / socket_dir.name


def directory_name(data_dir: Path | None, name: str = "") -> str:
    """16 hex digits of the BLAKE3 of the data directory's real path; "memory" and the name where there is none."""
    if data_dir is None:
        return f"memory-{name}" if name else "memory"
    return blake3(os.fsencode(os.path.realpath(data_dir))).hexdigest()[:16]


def user_socket_name(uid: int) -> str:
    """The ZeroMQ socket of one user that is not trusted, in a gateway's directory."""
    return f"{uid}.sock"


def excess_bytes(socket_dir: Path, *others: str) -> int:
    """By how many bytes the longest socket path in `socket_dir` (of a node's, and of `others` by name) is too long; 0
    when all fit."""
    longest = max(NODE_SOCKET_NAME, SESSION_SOCKET_NAME, *others, key=len)
    return max(0, len(os.fsencode(socket_dir / longest)) - MAX_SOCKET_PATH_BYTES)


def _roots(environ: Mapping[str, str]) -> list[Path]:
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return [Path(runtime), _fallback()] if os.path.isabs(runtime) else [_fallback()]


def _fallback() -> Path:
    return Path("/tmp") / f"tierkv-{os.getuid()}"
