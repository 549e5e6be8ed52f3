"""Engines as processes, seen by whoever directs them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierkv.torture.interruption import in_slices
from tierkv.torture.node import environment

ANSWER_SECONDS = 180.0

BLOCKING, ASYNCIO = "tierkv.torture.blocking_engine", "tierkv.torture.asyncio_engine"


class EngineProcess:
    """A process of one of the modules above. `take_events` gives what it has said by itself since the last time."""

    def __init__(self, module: str, endpoint: Path, number: int, device: str = "") -> None:
        self.number = number
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(endpoint), str(number), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it died of it says on stdout
            text=True,
            env=environment(),
            start_new_session=True,  # Ctrl-C in a terminal is for whoever directs it
        )
        self.pid = self._process.pid
        self._replies: queue.Queue[Any] = queue.Queue()
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._owed = 1
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                return  # it was killed while it spoke
            said = json.loads(line)
            if "event" in said:
                self._events.put(said)
            else:
                self._replies.put(said["reply"])

    def take_events(self) -> Iterator[dict[str, Any]]:
        while not self._events.empty():
            yield self._events.get()

    def send(self, do: str, **arguments: Any) -> None:
        """Its reply comes before those to what follows."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        self._owed += 1

    def ask(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.last_reply()

    def last_reply(self) -> Any:
        """To what was sent last; those before are let go."""
        reply = None
        while self._owed:
            try:
                reply = in_slices(lambda left: self._replies.get(timeout=left), ANSWER_SECONDS, queue.Empty)
            except queue.Empty:
                raise AssertionError(f"engine {self.pid} gave no answer: {[*self.take_events()]}") from None
            self._owed -= 1
        return reply

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
