"""Engines that come by fork, hold a lease and a ticket, and wait to be killed: a hundred of them cost no more than one
start of Python.

    python -m e2e.mortal_engines ENDPOINT        for each line on stdin one engine comes; a line on stdout has its pid
"""

from __future__ import annotations

import os
import signal
import sys

from tierkv.torture.stamped import StampedEngine, stamps, tokens_of

BLOCKS = 4


def live(endpoint: str, number: int) -> None:
    engine = StampedEngine(endpoint)
    lease = engine.group.acquire(keys=engine.keys(1, BLOCKS), deadline_seconds=20.0)
    ticket = engine.group.reserve(tokens_of(1_000 + number, BLOCKS), deadline_seconds=20.0)
    ticket.copy_from(stamps(engine.keys(1_000 + number, BLOCKS)))
    print(os.getpid(), lease.blocks, len(ticket.granted), flush=True)
    signal.pause()


def main(endpoint: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for number, _ in enumerate(sys.stdin):
        if os.fork() == 0:
            live(endpoint, number)
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
