"""What a blocking engine under torture can do: load and check, store, give up, seal, under every identity."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tierkv.client import Client, Group, Lease, connect
from tierkv.core.keys import KEY_BYTES
from tierkv.torture.oracle import POISON, unfinished
from tierkv.torture.prompts import KINDS, blocks_of, find_wrong, keys_of, tokens_of
from tierkv.torture.stamped import poisoned
from tierkv.wire.messages import Holder


@dataclass
class Loaded:
    """`blocks` were leased in every rank, of which `valid` were proven; `wrong` says what is not right about them."""

    blocks: int
    valid: int
    wrong: str
    reason: str


class Engine:
    """Owns its client. `number` tells which prompts are its own, and how many engines there may have been. `device` is
    the one whose pool it uses, where there is one."""

    def __init__(
        self,
        endpoint: str | os.PathLike[str],
        number: int = 0,
        *,
        timeout_seconds: float = 1.0,
        device: str = "",
    ) -> None:
        self.endpoint = Path(endpoint)
        self.number = number
        self.client: Client = connect(endpoint, timeout_seconds=timeout_seconds)
        self.groups: dict[str, list[Group]] = {
            kind.name: [
                self.client.open(kind.identity, rank=rank, model_name=kind.name, persistent=kind.is_persistent)
                for rank in range(kind.ranks)
            ]
            for kind in KINDS.values()
        }
        self.pool = self.client.map_device(device) if device else None

    def match(self, kind: str, prompt: int, blocks: int) -> int:
        return self.groups[kind][0].match(keys=_keys(kind, prompt, blocks)).blocks

    def load(
        self, kind: str, prompt: int, blocks: int, *, deadline_seconds: float = 1.0, revocable: bool = False
    ) -> Loaded:
        token = self.client.session_token()
        groups = self.groups[kind]
        holders = tuple(Holder(rank, token) for rank in range(len(groups))) if len(groups) > 1 else ()
        with groups[0].acquire(
            keys=_keys(kind, prompt, blocks),
            deadline_seconds=deadline_seconds,
            holders=holders if token else (),
            revocable=revocable,
            device=self.pool,
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

    def _check(self, lease: Lease, kind: str, prompt: int, rank: int) -> Loaded:
        destination = poisoned(lease.blocks, KINDS[kind].block_bytes)
        valid = lease.copy_into(destination)
        return Loaded(lease.blocks, valid, self.find_wrong(destination[:valid], kind, prompt, rank), lease.reason or "")

    def find_wrong(self, rows: np.ndarray, kind: str, prompt: int, rank: int) -> str:
        return find_wrong(rows, kind, prompt, rank, range(1, self.number + 2))

    def store(
        self, kind: str, prompt: int, blocks: int, *, first: int = 0, commit: bool = True, wait: str = "visible"
    ) -> int:
        """Blocks that are visible afterwards, of this store. Not committed: aborted, half-written."""
        visible = 0
        for rank, group in enumerate(self.groups[kind]):
            with group.reserve(tokens_of(prompt, blocks), first_block=first, device=self.pool) as ticket:
                ticket.copy_from(Stamped(kind, prompt, rank) if commit else Unfinished())
                if commit:
                    visible = ticket.commit(wait=wait).visible
        return visible

    def seal(self, kind: str, prompt: int, blocks: int, *, deadline_seconds: float = 5.0, wait: str = "flushed") -> int:
        """Blocks that are flushed."""
        keys = _keys(kind, prompt, blocks)
        return self.groups[kind][0].seal(keys=keys, wait=wait, deadline_seconds=deadline_seconds).flushed_blocks

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Unfinished:
    """A source that leaves what a copy leaves that never came to its end."""

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        blocks[:] = unfinished(blocks.shape[1], os.getpid())


class Stamped:
    """A source of right bytes, over what an unfinished copy leaves."""

    def __init__(self, kind: str, prompt: int, rank: int) -> None:
        self._of = kind, prompt, rank

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        Unfinished().read_blocks(first_block, blocks)
        blocks[:] = blocks_of(*self._of, first_block, len(blocks))


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
        self.goes_on.wait()  # as long as whoever directs lives: the process ends with it
        self.rows[first_block + half : first_block + len(blocks)] = blocks[half:]


@dataclass
class Copy:
    """A copy out of a lease that goes on in a thread of its own."""

    kind: str
    prompt: int
    destination: SlowDestination
    thread: threading.Thread
    valid: list[int]

    @classmethod
    def begin(cls, lease: Any, kind: str, prompt: int) -> Copy:
        """Returns when half of the first stretch has been copied."""
        destination = SlowDestination(lease.blocks, KINDS[kind].block_bytes)
        valid: list[int] = []

        def copy() -> None:
            with lease:
                valid.append(lease.copy_into(destination))

        thread = threading.Thread(target=copy)
        thread.start()
        destination.is_halfway.wait()
        return cls(kind, prompt, destination, thread, valid)

    def end(self) -> int:
        """Blocks proven."""
        self.destination.goes_on.set()
        self.thread.join()
        (valid,) = self.valid
        return valid


def _keys(kind: str, prompt: int, blocks: int) -> bytes:
    return keys_of(kind, prompt)[: blocks * KEY_BYTES]
