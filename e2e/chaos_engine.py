"""An engine of a chaos run: a process that stores, loads, seals and aborts without end, and can be killed at any point.

    python -m e2e.chaos_engine ENDPOINT SEED        JSON objects in on stdin; on stdout, one a line:
        {"reply": ...}                              to each that came in
        {"event": "flushed" | "checked" | "wrong" | "fault", ...}

What it was told is flushed it says at once, so that a harness knows it however this process ends. A verb of the
harness holds it at a point where an engine can be caught: between reserve and commit, with a commit on its way, inside
a lease, in the middle of a copy.
"""

from __future__ import annotations

import json
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from e2e.chaos_bytes import (
    COMMON_PROMPTS,
    KINDS,
    MAX_BLOCKS,
    OWN_PROMPTS,
    PERSISTENT,
    POISON,
    explain,
    first_wrong,
    garbage,
    keys_of,
    rows_of,
    tokens_of,
)
from tierkv.client import Client, Group, connect
from tierkv.core.keys import KEY_BYTES
from tierkv.wire.frames import encode
from tierkv.wire.messages import Commit, Holder

PACE_SECONDS = 0.03
FRESH_SECONDS = 0.7
"""An engine begins a prompt that nobody has stored yet at most so often, which bounds what a run writes."""


@dataclass
class Loaded:
    """`blocks` were leased in every rank, of which `valid` were proven; `wrong` says what is not right about them."""

    blocks: int
    valid: int
    wrong: str
    reason: str


class Engine:
    """The verbs. Owns its client."""

    def __init__(self, endpoint: str | os.PathLike[str], *, timeout_seconds: float = 1.0) -> None:
        self.endpoint = Path(endpoint)
        self.client: Client = connect(endpoint, timeout_seconds=timeout_seconds)
        self.groups: dict[str, list[Group]] = {
            kind.name: [
                self.client.open(kind.identity, rank=rank, model_name="chaos", persistent=kind.is_persistent)
                for rank in range(kind.ranks)
            ]
            for kind in KINDS.values()
        }
        self.max_prompt = 0

    def keys(self, kind: str, prompt: int, blocks: int) -> bytes:
        self.max_prompt = max(prompt, self.max_prompt)
        return keys_of(kind, prompt)[: blocks * KEY_BYTES]

    def match(self, kind: str, prompt: int, blocks: int) -> int:
        return self.groups[kind][0].match(keys=self.keys(kind, prompt, blocks)).blocks

    def load(
        self, kind: str, prompt: int, blocks: int, *, deadline_seconds: float = 1.0, revocable: bool = False
    ) -> Loaded:
        token = self.client.session_token()
        groups = self.groups[kind]
        holders = tuple(Holder(rank, token) for rank in range(len(groups))) if len(groups) > 1 else ()
        with groups[0].acquire(
            keys=self.keys(kind, prompt, blocks),
            deadline_seconds=deadline_seconds,
            holders=holders if token else (),
            revocable=revocable,
        ) as lease:
            loaded = self._check(lease, kind, prompt, 0)
            parts = {part.rank: part for part in lease.parts}
            for rank in range(1, len(groups)):
                if rank in parts:
                    with groups[rank].hold(lease.grant, token, parts[rank]) as part:
                        other = self._check(part, kind, prompt, rank)
                        loaded.valid = min(loaded.valid, other.valid)
                        loaded.wrong = loaded.wrong or other.wrong
            return loaded

    def _check(self, lease: Any, kind: str, prompt: int, rank: int) -> Loaded:
        destination = np.full((lease.blocks, KINDS[kind].block_bytes), POISON, np.uint8)
        valid = lease.copy_into(destination)
        return Loaded(lease.blocks, valid, self.find_wrong(destination[:valid], kind, prompt, rank), lease.reason or "")

    def find_wrong(self, rows: np.ndarray, kind: str, prompt: int, rank: int) -> str:
        block = first_wrong(rows, kind, prompt, rank)
        return "" if block is None else explain(rows[block], kind, prompt, rank, block, self.max_prompt)

    def store(self, kind: str, prompt: int, blocks: int, *, first: int = 0, commit: bool = True) -> int:
        """Blocks that are visible afterwards, of this store. Not committed: aborted, half-written."""
        visible = 0
        self.keys(kind, prompt, blocks)
        for rank, group in enumerate(self.groups[kind]):
            with group.reserve(tokens_of(prompt, blocks), first_block=first) as ticket:
                ticket.copy_from(Unfinished() if not commit else Stamped(kind, prompt, rank))
                if commit:
                    visible = ticket.commit().visible
        return visible

    def seal(self, kind: str, prompt: int, blocks: int, *, deadline_seconds: float = 5.0, wait: str = "flushed") -> int:
        """Blocks that are flushed."""
        keys = self.keys(kind, prompt, blocks)
        return self.groups[kind][0].seal(keys=keys, wait=wait, deadline_seconds=deadline_seconds).flushed_blocks

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stamped:
    """A source of right bytes, over what an unfinished copy leaves."""

    def __init__(self, kind: str, prompt: int, rank: int) -> None:
        self._of = kind, prompt, rank

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        Unfinished().read_blocks(first_block, blocks)
        blocks[:] = rows_of(*self._of, first_block, len(blocks))


class Unfinished:
    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        blocks[:] = garbage(blocks.shape[1], os.getpid())


class SlowDestination:
    """Takes the first half of the blocks it is given, then waits until it is told to go on."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.rows = np.full((blocks, block_bytes), POISON, np.uint8)
        self.is_halfway = threading.Event()
        self.goes_on = threading.Event()

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        half = len(blocks) // 2
        self.rows[first_block : first_block + half] = blocks[:half]
        self.is_halfway.set()
        self.goes_on.wait()
        self.rows[first_block + half : first_block + len(blocks)] = blocks[half:]


@dataclass
class Copy:
    """A copy out of a lease that goes on in a thread of its own."""

    kind: str
    prompt: int
    destination: SlowDestination
    thread: threading.Thread
    valid: list[int]


class Process:
    """What `engine` is told, and what it does by itself while it `runs`."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._first_fresh = self._next_fresh = seed * OWN_PROMPTS
        self._fresh_due = 0.0
        self._runs = False
        self._leases: dict[str, tuple[Any, str, int]] = {}
        self._copies: dict[str, Copy] = {}
        self._tickets: dict[str, tuple[Any, str, int]] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self._requests.put(json.loads(line))
        os._exit(0)  # the harness is gone

    def live(self) -> None:
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
            self._engine.store(kind, prompt, blocks, first=valid)

    def _grow(self, kind: str, prompt: int, blocks: int) -> None:
        """Decoding: a block now and then."""
        have = self._engine.match(kind, prompt, blocks)
        for block in range(have, min(blocks, have + 3)):
            self._engine.store(kind, prompt, block + 1, first=block)

    def _give_up(self, kind: str, prompt: int, blocks: int) -> None:
        self._engine.store(kind, prompt, blocks, commit=False)

    def _finish(self, kind: str, prompt: int, blocks: int) -> None:
        self.seal(kind, prompt, blocks)

    def _load(self, kind: str, prompt: int, blocks: int, *, revocable: bool = False) -> int:
        loaded = self._engine.load(kind, prompt, blocks, revocable=revocable)
        say({"event": "checked", "blocks": loaded.valid})
        if loaded.wrong:
            say({"event": "wrong", "what": loaded.wrong})
        return loaded.valid

    # ---- when told

    def run(self, on: bool) -> None:
        self._runs = on

    def store(self, kind: str, prompt: int, blocks: int) -> int:
        return self._engine.store(kind, prompt, blocks)

    def load(self, kind: str, prompt: int, blocks: int) -> int:
        return self._load(kind, prompt, blocks)

    def seal(self, kind: str, prompt: int, blocks: int, deadline_seconds: float = 5.0) -> int:
        flushed = self._engine.seal(kind, prompt, blocks, deadline_seconds=deadline_seconds)
        if flushed:
            say({"event": "flushed", "kind": kind, "prompt": prompt, "blocks": flushed})
        return flushed

    def start_seal(self, kind: str, prompt: int, blocks: int) -> int:
        """What is there goes to disk; nobody waits for it."""
        return self._engine.seal(kind, prompt, blocks, wait="sealed")

    def hold_ticket(self, name: str, kind: str, prompt: int, blocks: int) -> int:
        """Slots granted, of rank 0, filled with what a copy that has just begun leaves there."""
        ticket = self._engine.groups[kind][0].reserve(tokens_of(prompt, blocks))
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
        lease = self._engine.groups[kind][0].acquire(keys=self._engine.keys(kind, prompt, blocks), deadline_seconds=5.0)
        self._leases[name] = lease, kind, prompt
        return lease.blocks

    def begin_copy(self, name: str) -> None:
        """Returns when half of the first stretch has been copied; the rest waits for `end_copy`."""
        lease, kind, prompt = self._leases.pop(name)
        destination = SlowDestination(lease.blocks, KINDS[kind].block_bytes)
        valid: list[int] = []

        def copy() -> None:
            with lease:
                valid.append(lease.copy_into(destination))

        thread = threading.Thread(target=copy)
        self._copies[name] = Copy(kind, prompt, destination, thread, valid)
        thread.start()
        destination.is_halfway.wait()

    def end_copy(self, name: str) -> int:
        """Blocks proven, which are checked."""
        copy = self._copies.pop(name)
        copy.destination.goes_on.set()
        copy.thread.join()
        (valid,) = copy.valid
        wrong = self._engine.find_wrong(copy.destination.rows[:valid], copy.kind, copy.prompt, 0)
        say({"event": "checked", "blocks": valid})
        if wrong:
            say({"event": "wrong", "what": wrong})
        return valid


_saying = threading.Lock()


def say(what: dict[str, Any]) -> None:
    with _saying:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


def main(arguments: list[str]) -> None:
    try:
        with Engine(arguments[0]) as engine:
            Process(engine, int(arguments[1])).live()
    except BaseException:  # a client never raises because of its node: the harness is to see what was raised
        say({"event": "fault", "what": traceback.format_exc()})
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
