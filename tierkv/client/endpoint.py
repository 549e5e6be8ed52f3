"""Which node is meant: the directory of its sockets, and whose it may be."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.wire.socket_directory import MAX_SOCKET_PATH_BYTES, excess_bytes, find_socket_dir

ENDPOINT_VARIABLE = "TIERKV_ENDPOINT"
DATA_DIR_VARIABLE = "TIERKV_DATA_DIR"
NAME_VARIABLE = "TIERKV_NAME"
NODE_USER_VARIABLE = "TIERKV_NODE_USER"


def find_endpoint(
    endpoint: str | os.PathLike[str] | None,
    data_dir: str | os.PathLike[str] | None,
    name: str,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """`endpoint` as given, else TIERKV_ENDPOINT, else what belongs to the data directory (given, else TIERKV_DATA_DIR)
    or to the memory-only node called `name` (given, else TIERKV_NAME). Raises ConfigError for nonsense."""
    if endpoint is not None and data_dir is not None:
        raise ConfigError("endpoint", "given together with data_dir, which says the same; leave one of them out")
    if endpoint is None and data_dir is None and not name:
        endpoint = environ.get(ENDPOINT_VARIABLE) or None
        data_dir = environ.get(DATA_DIR_VARIABLE) or None if endpoint is None else None
        name = environ.get(NAME_VARIABLE, "")
    if endpoint is None:
        return find_socket_dir(None if data_dir is None else Path(data_dir), name)
    directory = Path(endpoint)
    if not directory.is_absolute():
        raise ConfigError("endpoint", f"{os.fspath(endpoint)!r} is no absolute path of a directory with sockets")
    if excess := excess_bytes(directory):
        raise ConfigError("endpoint", f"{excess} bytes too long: a socket's path has {MAX_SOCKET_PATH_BYTES} at most")
    return directory


def find_node_user(given: str | int | None, environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of the user whose node is believed besides our own user's and root's: `given` (a name or a number),
    else TIERKV_NODE_USER, else None. Raises ConfigError for a user that this machine doesn't know."""
    chosen = environ.get(NODE_USER_VARIABLE) or None if given is None else given
    if chosen is None:
        return None
    if isinstance(chosen, int) or (chosen.isascii() and chosen.isdigit()):
        return int(chosen)
    try:
        return pwd.getpwnam(chosen).pw_uid
    except KeyError:
        raise ConfigError("node_user", f"{chosen!r} is no user of this machine; give a name or a number") from None
