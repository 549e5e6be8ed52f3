"""The processes of the demo: a node and an engine that can be killed, and started again."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tierkv.client import connect_operator
from tierkv.errors import NodeUnreachable

READY_SECONDS = 300.0
STEP_SECONDS = 600.0
POLL_SECONDS = 0.05


class ProcessFailed(Exception):
    pass


class Process:
    """One child with a log file. Leaving its `with` ends it."""

    name = "process"

    def __init__(self, log_folder: Path) -> None:
        self.log_path = log_folder / f"{self.name}.log"
        self._child: subprocess.Popen[str] | None = None

    @property
    def child(self) -> subprocess.Popen[str]:
        if self._child is None:
            raise ProcessFailed(f"the {self.name} is not running")
        return self._child

    def spawn(self, *command: str, stdin: int, stdout: int | None = None) -> None:
        """Without `stdout` that goes to the log, as stderr does."""
        with self.log_path.open("a") as log:
            self._child = subprocess.Popen(
                command, stdin=stdin, stdout=stdout or log, stderr=log, text=True, bufsize=1, env=_environment()
            )

    def kill(self) -> None:
        """SIGKILL: it gets no chance to tidy up."""
        self.child.send_signal(signal.SIGKILL)
        self._forget()

    def stop(self) -> None:
        if self._child is not None:
            self.child.send_signal(signal.SIGTERM)
            self._forget()

    def _forget(self) -> None:
        self.child.wait(timeout=30)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()
        self._child = None

    def failed(self, what: str) -> ProcessFailed:
        tail = self.log_path.read_text().splitlines()[-15:]
        return ProcessFailed("\n".join([f"the {self.name} {what}; the end of {self.log_path}:", *tail]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Node(Process):
    name = "node"

    def __init__(self, data_dir: Path, log_folder: Path, *, host_bytes: str) -> None:
        super().__init__(log_folder)
        self.data_dir = data_dir
        self._host_bytes = host_bytes

    def start(self) -> float:
        """Seconds until it says that it is ready."""
        started = time.monotonic()
        self.spawn(
            *(_tierkv(), "serve", "--data-dir", str(self.data_dir)),
            *("--host-bytes", self._host_bytes, "--nvme-bytes", "8GiB"),
            stdin=subprocess.DEVNULL,
        )
        while not self._is_ready():
            if self.child.poll() is not None:
                raise self.failed(f"ended with {self.child.returncode} while it started")
            if time.monotonic() - started > READY_SECONDS:
                raise self.failed("was not ready in time")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - started

    def warm_up(self) -> str:
        """`tierkv warmup`; what it said."""
        command = [_tierkv(), "warmup", "--data-dir", str(self.data_dir)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_SECONDS, check=False)
        if done.returncode:
            raise ProcessFailed(f"tierkv warmup exited with {done.returncode}: {done.stdout}{done.stderr}")
        return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]

    def _is_ready(self) -> bool:
        try:
            with connect_operator(data_dir=self.data_dir) as operator:
                return operator.status().state == "ready"
        except NodeUnreachable:
            return False


class EngineProcess(Process):
    name = "engine"

    def __init__(self, model: Path, data_dir: Path, dtypes: list[str], log_folder: Path) -> None:
        super().__init__(log_folder)
        self._arguments = [str(model), str(data_dir), *dtypes]

    def start(self) -> float:
        """Seconds until its models are loaded."""
        started = time.monotonic()
        command = (sys.executable, "-P", "-m", "demo_lib.engine", *self._arguments)
        self.spawn(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read(READY_SECONDS)
        return time.monotonic() - started

    def ask(self, verb: str, **arguments: Any) -> Any:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
        return self._read(STEP_SECONDS)["answer"]

    def _read(self, seconds: float) -> dict[str, Any]:
        stdout = self.child.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise self.failed(f"gave no answer for {seconds:.0f} s")
        line = stdout.readline()
        if not line:
            self.child.wait(timeout=30)
            raise self.failed(f"ended with {self.child.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environment() -> dict[str, str]:
    """Ours, and the folder that holds this package on the path."""
    scripts = str(Path(__file__).resolve().parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [scripts, os.environ.get("PYTHONPATH")]))}


def _tierkv() -> str:
    return os.path.join(os.path.dirname(sys.executable), "tierkv")
