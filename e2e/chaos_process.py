"""The engines of a chaos run as processes, and what they say."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from e2e.harness import environment

ANSWER_SECONDS = 60.0


class EngineProcess:
    """e2e.chaos_engine as a process. `take_events` gives what it has said by itself since the last time."""

    def __init__(self, endpoint: Path, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "e2e.chaos_engine", str(endpoint), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what it died of it says on stdout
            text=True,
            env=environment(),
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
                reply = self._replies.get(timeout=ANSWER_SECONDS)
            except queue.Empty:
                raise AssertionError(f"engine {self.pid} gave no answer: {[*self.take_events()]}") from None
            self._owed -= 1
        return reply

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
