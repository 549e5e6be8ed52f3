"""The way to a running node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierkv_cli.options import Where

if TYPE_CHECKING:
    from tierkv.client.blocking import Operator
    from tierkv_cli.progress import Meter

REACH_SECONDS = 1.5
"""How long a node may take to answer before a command says that there is none (and exits, within 3 s of its start)."""

PATIENCE_SECONDS = 60.0
"""How long a recovering node may show no progress before a command that needs it ready gives up."""

LOOK_AGAIN_SECONDS = 0.2


def operator(where: Where) -> Operator:
    """Who asks the node; a context manager. Its verbs raise NodeUnreachable when no node answers."""
    from tierkv.client import connect_operator

    return connect_operator(where.socket_directory(), timeout_seconds=REACH_SECONDS)


@contextmanager
def or_silent(where: Where) -> Iterator[None]:
    """The data directory is used in here, without the node. When somebody has its lock, and that is a node which does
    not answer, NodeSilent is raised in place of DataDirectoryInUse."""
    from tierkv.errors import DataDirectoryInUse, NodeSilent, NodeUnreachable

    try:
        yield
    except DataDirectoryInUse:
        try:
            with operator(where) as node:  # one that has met no answer yet, and so waits for it
                node.status()
        except NodeSilent:
            raise
        except NodeUnreachable:
            pass  # another node has it, or this one is just starting
        raise


def wait_ready(node: Operator, meter: Meter) -> None:
    """Wait while the node is recovering, for as long as it gets on with it. Raises IncompleteError when it doesn't."""
    from tierkv.errors import IncompleteError

    seen, since = None, time.monotonic()
    while (status := node.status()).state == "recovering":
        stage = (status.recovery_stage, status.recovery_done, status.recovery_total)
        if stage != seen:
            seen, since = stage, time.monotonic()
        if time.monotonic() - since >= PATIENCE_SECONDS:
            raise IncompleteError(f"the node is still recovering, and stands at {stage[0]}, {stage[1]} of {stage[2]}")
        meter.say(f"node is recovering, {stage[0]}", stage[1], stage[2])
        time.sleep(LOOK_AGAIN_SECONDS)
