"""An engine as a process on asyncio: several requests at a time over one client, some of which are cancelled.

    python -m tierkv.torture.asyncio_engine ENDPOINT NUMBER DEVICE      as saying.py says; it understands `run` only

A task that is cancelled in the middle of a verb or of a copy must leave nothing held and nothing wrong.
"""

from __future__ import annotations

import asyncio
import random
import sys
import traceback
from typing import Any

from tierkv.client import aio
from tierkv.client.device.pool import DevicePool
from tierkv.core.keys import KEY_BYTES
from tierkv.torture.engine import Stamped, Unfinished
from tierkv.torture.prompts import COMMON_PROMPTS, KINDS, MAX_BLOCKS, find_wrong, keys_of, tokens_of
from tierkv.torture.saying import did, listen, say
from tierkv.torture.stamped import poisoned

AT_A_TIME = 3
PACE_SECONDS = 0.08
PATIENCE_SECONDS = (None, None, None, 0.001, 0.005, 0.02)
"""What a user waits for an answer before closing the window."""

ONE_RANK = [kind.name for kind in KINDS.values() if kind.ranks == 1]


class AsyncEngine:
    def __init__(self, groups: dict[str, aio.Group], number: int, pool: DevicePool | None) -> None:
        self._groups = groups
        self._pool = pool
        self._number = number
        self._random = random.Random(number)
        self._may_run = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._busy = 0

    async def run(self, on: bool) -> None:
        """Off: returns when nothing is under way any more."""
        if on:
            self._may_run.set()
            return
        self._may_run.clear()
        while self._busy:
            self._is_idle.clear()
            await self._is_idle.wait()

    async def serve(self) -> None:
        """One request after the other; some are given up in the middle."""
        while True:
            await self._may_run.wait()
            self._busy += 1
            try:
                async with asyncio.timeout(self._random.choice(PATIENCE_SECONDS)):
                    await self._request()
            except TimeoutError:
                did("cancel")
            finally:
                self._busy -= 1
                self._is_idle.set()
            await asyncio.sleep(PACE_SECONDS * self._random.random() * 2)

    async def _request(self) -> None:
        kind, prompt = self._random.choice(ONE_RANK), self._random.randrange(COMMON_PROMPTS)
        blocks = self._random.randint(1, MAX_BLOCKS)
        valid = await self._load(kind, prompt, blocks)
        if valid < blocks:
            await self._store(kind, prompt, blocks, valid)
        if self._random.random() < 0.1:
            await self._seal(kind, prompt, blocks)

    async def _load(self, kind: str, prompt: int, blocks: int) -> int:
        keys = keys_of(kind, prompt)[: blocks * KEY_BYTES]
        revocable = self._random.random() < 0.2
        async with self._groups[kind].acquire(keys=keys, revocable=revocable, device=self._pool) as lease:
            destination = poisoned(lease.blocks, KINDS[kind].block_bytes)
            valid = await lease.copy_into(destination)
        did("load")
        say({"event": "checked", "blocks": valid})
        if wrong := find_wrong(destination[:valid], kind, prompt, 0, range(1, self._number + 2)):
            say({"event": "wrong", "what": wrong})
        return valid

    async def _store(self, kind: str, prompt: int, blocks: int, first: int) -> None:
        tokens = tokens_of(prompt, blocks)
        async with self._groups[kind].reserve(tokens, first_block=first, device=self._pool) as ticket:
            if self._random.random() < 0.2:
                await ticket.copy_from(Unfinished())
                did("abort")
                return
            await ticket.copy_from(Stamped(kind, prompt, 0))
            await ticket.commit(wait=self._random.choice(["visible", "sent"]))
        did("store")

    async def _seal(self, kind: str, prompt: int, blocks: int) -> None:
        keys = keys_of(kind, prompt)[: blocks * KEY_BYTES]
        sealed = await self._groups[kind].seal(keys=keys, wait="flushed", deadline_seconds=5.0)
        did("seal")
        if sealed.flushed_blocks and KINDS[kind].is_persistent:
            say({"event": "flushed", "kind": kind, "prompt": prompt, "blocks": sealed.flushed_blocks})


async def live(endpoint: str, number: int, device: str) -> None:
    async with await aio.connect(endpoint, timeout_seconds=1.0) as client:
        groups = {
            name: await client.open(KINDS[name].identity, model_name=name, persistent=KINDS[name].is_persistent)
            for name in ONE_RANK
        }
        pool = await client.map_device(device) if device else None
        engine = AsyncEngine(groups, number, pool)
        requests = asyncio.Queue[dict[str, Any]]()
        loop = asyncio.get_running_loop()
        listen(lambda request: loop.call_soon_threadsafe(requests.put_nowait, request))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_A_TIME):
                tasks.create_task(engine.serve())
            say({"reply": "started"})
            while True:
                request = await requests.get()
                say({"reply": await getattr(engine, request.pop("do"))(**request)})


def main(arguments: list[str]) -> None:
    try:
        asyncio.run(live(arguments[0], int(arguments[1]), arguments[2]))
    except BaseException:  # a client never raises because of its node: the director is to see what was raised
        say({"event": "fault", "what": traceback.format_exc()})
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
