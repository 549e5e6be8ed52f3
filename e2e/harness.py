"""Real nodes and engines as processes; see tierkv.torture.node, which they come from.

    with EngineProcess(node.endpoint) as engine: # a stamped engine that can be killed
        engine.ask("store", prompt=1, blocks=8)

Every wait has a deadline and says what it waited for.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tierkv.torture.node import END_SECONDS, READY_SECONDS, Ended, Node, NodeLeftover, environment
from tierkv.torture.stamped import StampedEngine
from tierkv.torture.waits import wait_until

logging.getLogger("tierkv.client").setLevel(logging.ERROR)  # nodes that are away are what these tests are about


def data_of(node: Node) -> Path:
    """Its data directory, which it has."""
    assert node.data_dir is not None
    return node.data_dir


_ports = itertools.count(10_000 + os.getpid() * 100 % 20_000)


def free_port() -> int:
    """On loopback, for whoever is told of it to listen on: from below those that the kernel hands out, so that no
    connection of anybody's gets it meanwhile, nor while a node is away; other processes that run tests begin elsewhere.
    """
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("counting has no end")


def files_below(folder: Path, suffix: str = "") -> list[Path]:
    """All files with such a name. Also while a node removes some of them, and folders on the way: pathlib's rglob
    raises where a folder goes between being named and being looked into."""
    return sorted(Path(inside, name) for inside, _, names in os.walk(folder) for name in names if name.endswith(suffix))


class EngineProcess:
    """A stamped engine (e2e.engine_process; one rank of it: e2e.rank_process) that can be asked, paused and killed."""

    def __init__(self, endpoint: Path, *, salt: str = "", rank: int | None = None, device: str = "") -> None:
        module = "e2e.engine_process" if rank is None else "e2e.rank_process"
        more = [salt, device] if rank is None else [str(rank)]
        arguments = [sys.executable, "-m", module, str(endpoint), *more]
        self._process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self.pid = self._process.pid
        self._answer(READY_SECONDS)

    def ask(self, do: str, *, timeout_seconds: float = END_SECONDS, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self._answer(timeout_seconds)

    def send(self, do: str, **arguments: Any) -> None:
        """Without waiting for the answer, which `ask` would confuse with the next one."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def _answer(self, timeout_seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_seconds)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            raise AssertionError(f"the engine gave no answer in {timeout_seconds:g} s (it may have died)")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.communicate()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


__all__ = [
    "Ended",
    "EngineProcess",
    "Node",
    "NodeLeftover",
    "StampedEngine",
    "environment",
    "files_below",
    "free_port",
    "wait_until",
]
