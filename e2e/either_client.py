"""A stamped engine whose client is the blocking or the asyncio one, with the same verbs: what a test says once holds
for both. Its loop runs while it is asked something, and at no other time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tierkv.client import aio, connect
from tierkv.torture.stamped import Loaded, count_right, identity, poisoned, stamps, tokens_of

KINDS = ("blocking", "asyncio")


class EitherEngine:
    """Owns its client, and its loop. `told_seconds` of time can be put forward, for breakers and repetitions."""

    def __init__(self, kind: str, endpoint: Path, *, salt: str = "", timeout_seconds: float = 20.0) -> None:
        self.kind = kind
        self._runner = asyncio.Runner() if kind == "asyncio" else None
        self._ahead = 0.0
        made = aio.connect if self._runner else connect
        self.client: Any = self.do(made(endpoint, timeout_seconds=timeout_seconds))
        self.state = self.client._state
        self.state.clock = lambda: time.monotonic() + self._ahead
        self.group: Any = self.do(self.client.open(identity(salt), model_name="stamped"))

    def do(self, called: Any) -> Any:
        """The value of what a verb gave back, awaited where it is to be."""
        if self._runner is None or not inspect.isawaitable(called):
            return called

        async def wait() -> Any:
            return await called

        return self._runner.run(wait())

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """One after the other, or, with asyncio, begun one after the other and under way at the same time."""
        if self._runner is None:
            return [call() for call in calls]

        async def one(call: Callable[[], Any]) -> Any:
            called = call()
            return await called if inspect.isawaitable(called) else called

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*map(one, calls))

        return self._runner.run(all_of_them())

    def skip(self, seconds: float) -> None:
        self._ahead += seconds

    def keys(self, prompt: int, blocks: int) -> bytes:
        return bytes(self.group.keys(tokens_of(prompt, blocks)))

    def reserve(self, prompt: int, blocks: int, **more: Any) -> Any:
        return self.do(self.group.reserve(tokens_of(prompt, blocks), **more))

    def fill(self, ticket: Any, prompt: int, blocks: int) -> None:
        self.do(ticket.copy_from(stamps(self.keys(prompt, blocks))))

    def store(self, prompt: int, blocks: int, **more: Any) -> int:
        ticket = self.reserve(prompt, blocks, **more)
        try:
            if len(ticket.granted):
                self.fill(ticket, prompt, blocks)
                self.do(ticket.commit())
        finally:
            self.do(ticket.abort())
        return self.match(prompt, blocks)

    def match(self, prompt: int, blocks: int) -> int:
        return int(self.do(self.group.match(keys=self.keys(prompt, blocks))).blocks)

    def load(self, prompt: int, blocks: int, **more: Any) -> Loaded:
        keys = self.keys(prompt, blocks)
        lease = self.do(self.group.acquire(keys=keys, **more))
        try:
            destination = poisoned(lease.blocks)
            valid = self.do(lease.copy_into(destination))
            right = count_right(destination, keys, valid)
            return Loaded(lease.blocks, valid, right, lease.nvme_blocks, lease.reason or "")
        finally:
            self.do(lease.release())

    def close(self) -> None:
        self.do(self.client.close())
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
