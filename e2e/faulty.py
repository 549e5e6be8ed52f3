"""Parts of a node that fail on purpose, for tierkv.torture.node_with."""

from __future__ import annotations

import os
import signal
import sys

from tierkv.workers.worker_config import WorkerConfig


def die_of_the_index() -> None:
    """A storage worker that dies of its index as a truncated LMDB file makes it, unless it is told to discard that."""
    if not WorkerConfig.decode(sys.argv[1]).discard_index:
        os.kill(os.getpid(), signal.SIGBUS)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tierkv.workers.storage", sys.argv[1]])


if __name__ == "__main__":
    die_of_the_index()
