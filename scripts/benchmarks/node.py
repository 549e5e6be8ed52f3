"""A real node in processes of its own, for as long as a measurement takes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COMMAND = Path(sys.executable).with_name("tierkv")
READY_SECONDS = 120.0
END_SECONDS = 30.0
LOOK_SECONDS = 0.05


class NodeFailed(Exception):
    """The node did not do what a measurement needs; its log says more."""


class Node:
    """`tierkv serve` with settings, ready to be spoken to."""

    def __init__(self, socket_dir: Path, **settings: object) -> None:
        self.endpoint = socket_dir
        self._log_path = socket_dir.with_suffix(".log")
        options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        with self._log_path.open("ab") as log:
            start = time.perf_counter()
            self._process = subprocess.Popen(
                [COMMAND, "serve", f"--socket-dir={socket_dir}", *options],
                stdout=subprocess.PIPE,
                stderr=log,
                env=_own_environment(),
            )
        try:
            self._wait_ready(start + READY_SECONDS)
        except BaseException:
            self.kill()
            raise

    def _wait_ready(self, until: float) -> None:
        assert self._process.stdout is not None
        heard = b""
        while b"ready:" not in heard:
            left = until - time.perf_counter()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise NodeFailed(f"not ready after {READY_SECONDS:g} s: {self._log_tail()}")
            part = os.read(self._process.stdout.fileno(), 4096)
            if not part:
                raise NodeFailed(f"it ended before it was ready: {self._log_tail()}")
            heard += part

    def host_memory(self) -> int:
        """Bytes of the arena that are in memory by now: a memfd that the supervisor holds."""
        for descriptor in Path(f"/proc/{self._process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed between the listing and the look
                if os.readlink(descriptor).startswith("/memfd:tierkv arena"):
                    return os.stat(descriptor).st_blocks * 512
        return 0

    def stop(self) -> None:
        """In good order: what is not on disk yet is written."""
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise NodeFailed(f"it did not end within {END_SECONDS:g} s: {self._log_tail()}") from None
        self._close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(END_SECONDS)
        self._close()

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _log_tail(self) -> str:
        return " | ".join(self._log_path.read_text(errors="replace").splitlines()[-5:])


@contextmanager
def started_node(**settings: object) -> Iterator[Node]:
    """A node that is stopped at the end. Its sockets lie in a short directory: their paths may have 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as folder:
        node = Node(Path(folder) / "node", **settings)
        try:
            yield node
        except BaseException:
            node.kill()
            raise
        node.stop()


@contextmanager
def running_node(*, host_bytes: int, **settings: object) -> Iterator[Node]:
    """A node that has all of its host memory: it serves before that, with what it has got so far."""
    with started_node(host_bytes=host_bytes, **settings) as node:
        until = time.monotonic() + READY_SECONDS
        while (found := node.host_memory()) < host_bytes:
            if time.monotonic() > until:
                raise NodeFailed(f"after {READY_SECONDS:g} s it has {found} of {host_bytes} bytes of host memory")
            time.sleep(LOOK_SECONDS)
        yield node


def _own_environment() -> dict[str, str]:
    """Nothing of the user's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
    return kept | {"XDG_CONFIG_HOME": os.devnull, "OMP_NUM_THREADS": "1"}
