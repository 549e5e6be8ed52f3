"""A real node as processes: start it, look at it, kill parts of it, and see that nothing of it is left.

    with Node(folder) as node:                   # `tierkv serve` on folder/data
        node.start()                             # waits until it answers and has recovered
        node.kill("front")                       # SIGKILL; also "storage" and "supervisor"
        with node.paused("storage"): ...         # SIGSTOP, SIGCONT
        ended = node.stop()                      # SIGTERM; exit code, and what it said
    # leaving the `with` kills what is left; `stop` raises NodeLeftover when a process or socket outlived the node

Every wait has a deadline and says what it waited for.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import tierkv
from tierkv.client import connect_operator
from tierkv.errors import NodeUnreachable
from tierkv.torture.interruption import in_slices
from tierkv.torture.processes import descendants, is_same, look, num_descriptors
from tierkv.torture.waits import wait_until
from tierkv.wire.messages import StatusReply

READY_SECONDS = 180.0
END_SECONDS = 120.0
STATUS_SECONDS = 5.0  # a busy machine is no node that does not answer

SMALL = {
    "host_bytes": "32MiB",
    "slab_bytes": "1MiB",
    "extent_bytes": "128KiB",
    "nvme_bytes": "256MiB",
    "seal_after_seconds": "1",
}
"""Sizes that keep it quick; what is given wins."""


class NodeLeftover(AssertionError):
    """A process or socket outlived its node."""


@dataclass(frozen=True)
class Ended:
    """How a node ended. `flushed` and `dropped` are the bytes that it reported, None where it did not; `extents` is how
    many extents those were."""

    exit_code: int
    output: str
    seconds: float

    @property
    def flushed(self) -> int | None:
        return self._number("flushed")

    @property
    def dropped(self) -> int | None:
        return self._number("dropped")

    @property
    def extents(self) -> tuple[int, int] | None:
        found = re.search(r"stopped: .* of (\d+) and (\d+) extents", self.output)
        return (int(found[1]), int(found[2])) if found else None

    def _number(self, name: str) -> int | None:
        found = re.search(rf"stopped: .*{name}=(\d+)", self.output)
        return int(found[1]) if found else None


class Node:
    """One node: its data directory is `folder`/data and stays over restarts, its sockets lie in a short path of their
    own. `replaced` are arguments of tierkv.torture.node_with. Options are settings by field name; None takes one of
    SMALL away."""

    def __init__(
        self, folder: Path, *, replaced: tuple[str, ...] = (), memory_only: bool = False, **options: str | None
    ) -> None:
        self.folder = folder
        self.data_dir = None if memory_only else folder / "data"
        self._own_socket_dir = Path(tempfile.mkdtemp(prefix="tkv"))
        self.endpoint = self._own_socket_dir / "node"
        self.log_path = folder / "node.log"
        self._replaced = replaced
        self._options = dict(SMALL | options)
        if memory_only:
            self._options["nvme_bytes"] = None
        self._process: subprocess.Popen[str] | None = None
        self._pids: dict[str, int] = {}
        self._seen: dict[int, int] = {}  # every process of this node, ever: pid -> start time

    # ---- start and end

    def start(self, *, wait_ready: bool = True, wrapper: tuple[str, ...] = ()) -> None:
        """`wrapper` goes before the command, strace for example."""
        assert self._process is None, "it runs already"
        self._process = self.spawn(wrapper=wrapper)
        self._note(self._process.pid)
        if wait_ready:
            self.wait_ready()

    def spawn(self, *, wrapper: tuple[str, ...] = (), log: Path | None = None) -> subprocess.Popen[str]:
        """One more process with the same arguments, not followed by this object."""
        with (log or self.log_path).open("a") as stderr:
            return subprocess.Popen(
                [*wrapper, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(),
                cwd=self.folder,
                start_new_session=True,  # Ctrl-C in a terminal is for whoever directs it
            )

    def command(self) -> list[str]:
        options = {**self._options, "socket_dir": str(self.endpoint)}
        if self.data_dir is not None:
            options["data_dir"] = str(self.data_dir)
        arguments = ["serve"]
        for name, value in options.items():
            if value is not None:
                arguments += [f"--{name.replace('_', '-')}", *([value] if value else [])]  # "": a switch
        if self._replaced:
            return [sys.executable, "-P", "-m", "tierkv.torture.node_with", *self._replaced, "--", *arguments]
        return [sys.executable, "-P", "-m", "tierkv_cli.main", *arguments]

    def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> StatusReply:
        def is_ready() -> StatusReply | None:
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                raise AssertionError(f"the node ended with {code} instead of starting:\n{self.log()}")
            status = self.status()
            if status is None or status.state not in ("ready", "degraded"):
                return None
            # It serves while its arena still grows, and an early reservation finds less room: all of it is wanted.
            host = next(tier for tier in status.tiers if tier.tier == "host")
            return status if host.overhead_bytes == 0 else None

        return wait_until(is_ready, "the node is ready", timeout_seconds)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_seconds: float = END_SECONDS) -> Ended:
        """Tell it to end, and wait for that."""
        self.signal("supervisor", number)
        return self.wait_ended(timeout_seconds)

    def wait_ended(self, timeout_seconds: float = END_SECONDS) -> Ended:
        """Until it has ended by itself. All its processes must be gone then, and after an orderly end its sockets."""
        assert self._process is not None
        began = time.monotonic()
        output = said_until_end(self._process, timeout_seconds)
        ended = Ended(self._process.returncode, output, time.monotonic() - began)
        self._process = None
        if self.survivors():
            raise NodeLeftover(f"processes {self.survivors()} outlived their node")
        if self.sockets():
            raise NodeLeftover(f"sockets left: {self.sockets()}")
        return ended

    # ---- looking

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def status(self) -> StatusReply | None:
        """None when it does not answer."""
        with connect_operator(self.endpoint, timeout_seconds=STATUS_SECONDS) as operator:
            try:
                status = operator.status()
            except NodeUnreachable:
                return None
        for worker in status.workers:
            self._pids[worker.name] = worker.pid
            self._note(worker.pid)
        return status

    def pid(self, name: str) -> int:
        """Of "supervisor", "front" or "storage", as of the last time that it told."""
        if name == "supervisor" and self._process is not None and not self._is_wrapped:
            return self._process.pid
        if name not in self._pids:
            self.status()
        return self._pids[name]

    def wait_status(
        self, condition: Callable[[StatusReply], bool], what: str, timeout_seconds: float = 60.0
    ) -> StatusReply:
        def look() -> StatusReply | None:
            status = self.status()
            return status if status is not None and condition(status) else None

        return wait_until(look, what, timeout_seconds)

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def descriptors(self, name: str) -> int:
        return num_descriptors(self.pid(name))

    def cpu_seconds(self, name: str) -> float:
        stat = look(self.pid(name))
        assert stat is not None, f"{name} has ended"
        return stat.cpu_seconds

    # ---- faults

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)

    def kill(self, name: str) -> int:
        """SIGKILL of the one that runs now; the pid that is no more, when it is. Of the supervisor: waits until all of
        the node is gone."""
        wait_until(lambda: self._runs_now(name), f"{name} runs, so that it can be killed")
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_same(pid, self._seen[pid]), f"{name} is dead")
        if name == "supervisor":
            self.wait_gone()
        return pid

    def wait_gone(self) -> None:
        """After a kill of the supervisor: until all of the node is gone."""
        assert self._process is not None
        said_until_end(self._process, END_SECONDS)
        self._process = None
        wait_until(lambda: not self.survivors(), "all processes of a killed supervisor are gone")

    def _runs_now(self, name: str) -> bool:
        """Also takes note of the others, so that what dies with it is known."""
        return self.status() is not None and is_same(self.pid(name), self._seen.get(self.pid(name), 0))

    @contextmanager
    def paused(self, name: str) -> Iterator[int]:
        """SIGSTOP for the length of the block."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):  # it was killed meanwhile
                os.kill(pid, signal.SIGCONT)

    # ---- the census

    def survivors(self) -> list[int]:
        """Processes of this node that still run, whenever they were started."""
        return [pid for pid, started in self._seen.items() if is_same(pid, started)]

    def sockets(self) -> list[Path]:
        return [path for path in self._own_socket_dir.rglob("*") if path.is_socket()]

    def close(self) -> None:
        """Kill what still runs, and wait until it is gone. Sockets of a killed supervisor remain by design: the next
        start replaces them."""
        for pid in self.survivors():
            with suppress(ProcessLookupError):  # it ended with the one before it
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.communicate(timeout=END_SECONDS)
            self._process = None
        try:
            wait_until(lambda: not self.survivors(), "no process of the node is left")
        finally:
            shutil.rmtree(self._own_socket_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(f"the node's log:\n{self.log()[-5_000:]}")
        self.close()

    @property
    def _is_wrapped(self) -> bool:
        assert self._process is not None
        return Path(str(self._process.args[0])).name != Path(sys.executable).name  # type: ignore[index]

    def _note(self, pid: int) -> None:
        stat = look(pid)
        if stat is None:
            return
        for one in (stat, *descendants(pid)):
            self._seen[one.pid] = one.started


def said_until_end(process: subprocess.Popen[str], timeout_seconds: float) -> str:
    """Its whole output, when it has ended; subprocess.TimeoutExpired when it does not."""
    output, _ = in_slices(lambda left: process.communicate(timeout=left), timeout_seconds, subprocess.TimeoutExpired)
    return output


def environment() -> dict[str, str]:
    """For processes of a torture or test: these modules, and no settings of whoever runs it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
    here = str(Path(tierkv.__file__).resolve().parents[1])
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "XDG_CONFIG_HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
