"""An engine as a process: it stores, loads, seals and gives up without end, and can be killed at any point.

    python -m tierkv.torture.blocking_engine ENDPOINT NUMBER DEVICE     as saying.py says

What it was told is flushed it says at once, so that its director knows it however this process ends. A verb of the
director's holds it at a point where an engine can be caught: between reserve and commit, with a commit on its way,
inside a lease, in the middle of a copy.
"""

from __future__ import annotations

import queue
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import zmq

from tierkv.client import Lease, Ticket
from tierkv.core.keys import KEY_BYTES
from tierkv.torture.engine import Copy, Engine, Stamped, Unfinished
from tierkv.torture.prompts import COMMON_PROMPTS, MAX_BLOCKS, OWN_PROMPTS, PERSISTENT, keys_of, tokens_of
from tierkv.torture.saying import did, listen, say
from tierkv.wire.frames import encode
from tierkv.wire.messages import Commit

PACE_SECONDS = 0.03
FRESH_SECONDS = 0.7
"""An engine begins a prompt that nobody has stored yet at most so often, which bounds what a run writes."""


class Process:
    """What `engine` is told, and what it does by itself while it `runs`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = random.Random(engine.number)
        self._first_fresh = self._next_fresh = engine.number * OWN_PROMPTS
        self._fresh_due = 0.0
        self._runs = False
        self._leases: dict[str, tuple[Lease, str, int]] = {}
        self._copies: dict[str, Copy] = {}
        self._tickets: dict[str, tuple[Ticket, str, int]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()

    def live(self) -> None:
        listen(self._requests.put)
        say({"reply": "started"})
        while True:
            try:
                request = self._requests.get(timeout=PACE_SECONDS if self._runs else None)
            except queue.Empty:
                self._act()
            else:
                say({"reply": getattr(self, request.pop("do"))(**request)})

    # ---- by itself

    def _act(self) -> None:
        kind = self._random.choice(PERSISTENT) if self._random.random() < 0.9 else "fleeting"
        prompt, blocks = self._pick_prompt(), self._random.randint(1, MAX_BLOCKS)
        actions: list[tuple[int, Callable[[str, int, int], None]]] = [
            (10, self._serve),
            (3, self._grow),
            (2, self._give_up),
            (3, self._finish),
        ]
        (action,) = self._random.choices([a for _, a in actions], [weight for weight, _ in actions])
        action(kind, prompt, blocks)

    def _pick_prompt(self) -> int:
        now = time.monotonic()
        if now >= self._fresh_due and self._random.random() < 0.3:
            self._fresh_due = now + FRESH_SECONDS
            self._next_fresh += 1
        if self._next_fresh == self._first_fresh or self._random.random() < 0.5:
            return self._random.randrange(COMMON_PROMPTS)
        return self._random.randrange(self._first_fresh, self._next_fresh)

    def _serve(self, kind: str, prompt: int, blocks: int) -> None:
        """A request: load what there is, store the rest."""
        valid = self._load(kind, prompt, blocks, revocable=self._random.random() < 0.2)
        if valid < blocks:
            self._engine.store(kind, prompt, blocks, first=valid, wait=self._random.choice(["visible", "sent"]))
            did("store")

    def _grow(self, kind: str, prompt: int, blocks: int) -> None:
        """Decoding: a block now and then."""
        have = self._engine.match(kind, prompt, blocks)
        for block in range(have, min(blocks, have + 3)):
            self._engine.store(kind, prompt, block + 1, first=block)
            did("store")

    def _give_up(self, kind: str, prompt: int, blocks: int) -> None:
        self._engine.store(kind, prompt, blocks, commit=False)
        did("abort")

    def _finish(self, kind: str, prompt: int, blocks: int) -> None:
        self.seal(kind, prompt, blocks)

    def _load(self, kind: str, prompt: int, blocks: int, *, revocable: bool = False) -> int:
        loaded = self._engine.load(kind, prompt, blocks, revocable=revocable)
        self._tell_checked(loaded.valid, loaded.wrong)
        return loaded.valid

    def _tell_checked(self, blocks: int, wrong: str) -> None:
        did("load")
        say({"event": "checked", "blocks": blocks})
        if wrong:
            say({"event": "wrong", "what": wrong})

    # ---- when told

    def run(self, on: bool) -> None:
        self._runs = on

    def store(self, kind: str, prompt: int, blocks: int) -> int:
        visible = self._engine.store(kind, prompt, blocks)
        did("store")
        return visible

    def load(self, kind: str, prompt: int, blocks: int) -> int:
        return self._load(kind, prompt, blocks)

    def seal(self, kind: str, prompt: int, blocks: int, deadline_seconds: float = 5.0) -> int:
        flushed = self._engine.seal(kind, prompt, blocks, deadline_seconds=deadline_seconds)
        did("seal")
        if flushed:
            say({"event": "flushed", "kind": kind, "prompt": prompt, "blocks": flushed})
        return flushed

    def start_seal(self, kind: str, prompt: int, blocks: int) -> int:
        """What is there goes to disk; nobody waits for it."""
        return self._engine.seal(kind, prompt, blocks, wait="sealed")

    def hold_ticket(self, name: str, kind: str, prompt: int, blocks: int) -> int:
        """Slots granted, of rank 0, filled with what a copy that has just begun leaves there."""
        ticket = self._engine.groups[kind][0].reserve(tokens_of(prompt, blocks), device=self._engine.pool)
        ticket.copy_from(Unfinished())
        self._tickets[name] = ticket, kind, prompt
        return len(ticket.granted)

    def fill(self, name: str) -> None:
        ticket, kind, prompt = self._tickets[name]
        ticket.copy_from(Stamped(kind, prompt, 0))

    def scribble(self, name: str) -> None:
        self._tickets[name][0].copy_from(Unfinished())

    def send_commit(self, name: str) -> None:
        """On its way when this returns; the answer is not read."""
        ticket, _, _ = self._tickets[name]
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{self._engine.endpoint}/node.sock")
        token = self._engine.client.session_token()
        dealer.send(encode(Commit(id=1, session=token, grant=ticket.grant)))

    def commit(self, name: str) -> int:
        """Blocks that were taken on; those whose other ranks are missing are not visible yet."""
        committed = self._tickets.pop(name)[0].commit()
        return int(committed.visible + committed.staged)

    def hold_lease(self, name: str, kind: str, prompt: int, blocks: int) -> int:
        keys = keys_of(kind, prompt)[: blocks * KEY_BYTES]
        lease = self._engine.groups[kind][0].acquire(keys=keys, deadline_seconds=5.0, device=self._engine.pool)
        self._leases[name] = lease, kind, prompt
        return lease.blocks

    def begin_copy(self, name: str) -> None:
        """Returns when half of the first stretch has been copied; the rest waits for `end_copy`."""
        self._copies[name] = Copy.begin(*self._leases.pop(name))

    def end_copy(self, name: str) -> int:
        """Blocks proven, which are checked."""
        copy = self._copies.pop(name)
        valid = copy.end()
        self._tell_checked(valid, self._engine.find_wrong(copy.destination.rows[:valid], copy.kind, copy.prompt, 0))
        return valid


def main(arguments: list[str]) -> None:
    try:
        with Engine(arguments[0], int(arguments[1]), device=arguments[2]) as engine:
            Process(engine).live()
    except BaseException:  # a client never raises because of its node: the director is to see what was raised
        say({"event": "fault", "what": traceback.format_exc()})
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
