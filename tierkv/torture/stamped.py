"""An engine with plain memory whose blocks are stamped: each layer of a block is a stream of its own (`streams`).

A right block is recognised without keeping a copy, and a wrong byte traced to its owner. Destinations are poisoned
before each load, so that what was never copied shows as well.

    with StampedEngine(endpoint, salt="tenant a") as engine:
        engine.store_flushed(prompt=1, num_blocks=8)
    with StampedEngine(endpoint, device="cpu") as engine:   # in the node's pool there, as far as it has one
        engine.store(prompt=1, num_blocks=8)
        loaded = engine.load(1, 8)                  # loaded.is_wrong, and loaded.wrong says whose bytes are there
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierkv.client import Client, Group, Sealed, connect
from tierkv.core.identity import Identity, Layout
from tierkv.core.keys import KEY_BYTES
from tierkv.torture.oracle import POISON, Oracle, first_wrong
from tierkv.torture.streams import rows_of

BLOCK_TOKENS = 16
BLOCK_BYTES = 16_384
NUM_LAYERS = 4


@dataclass(frozen=True)
class Loaded:
    """`blocks` were leased, `valid` of them proven, and `right` of those, counted from the first, carry their stamp. A
    cache that is never wrong has `right == valid`; `wrong` says of the first that is not whose bytes it holds. `reason`
    is why there are not more."""

    blocks: int
    valid: int
    right: int
    nvme_blocks: int
    reason: str
    wrong: str = ""
    disk_blocks: int = 0
    device_blocks: int = 0

    @property
    def is_wrong(self) -> bool:
        return self.right != self.valid


def layers_of(block_bytes: int) -> tuple[int, ...]:
    """A block's bytes as layers, the last of which takes the rest."""
    each = block_bytes // NUM_LAYERS
    return (*([each] * (NUM_LAYERS - 1)), block_bytes - each * (NUM_LAYERS - 1))


def identity(salt: str = "", *, block_bytes: int = BLOCK_BYTES, weights: str = "5a" * 32) -> Identity:
    layout = Layout(
        dtype="uint8",
        block_bytes=layers_of(block_bytes),
        axes="layer,byte",
        block_tokens=BLOCK_TOKENS,
        engine="stamped",
    )
    return Identity(weights=weights, config="none", layout=layout, salt=salt)


def tokens_of(prompt: int, num_blocks: int) -> np.ndarray:
    """The first blocks of prompt number `prompt`: always the same, and no two prompts begin alike."""
    rest = np.random.default_rng(prompt).integers(0, 50_000, num_blocks * BLOCK_TOKENS - 1)
    return np.concatenate([[prompt], rest]).astype(np.uint32)


def stamps(keys: bytes, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """What the blocks of packed `keys` hold: [blocks, block_bytes]."""
    return rows_of(keys, layers_of(block_bytes))


class StampedEngine:
    """Owns its client. Engines that share an `oracle` can name each other's bytes. `device`: whose pool it uses."""

    def __init__(
        self,
        endpoint: str | os.PathLike[str],
        *,
        salt: str = "",
        block_bytes: int = BLOCK_BYTES,
        persistent: bool = True,
        timeout_seconds: float = 5.0,
        oracle: Oracle | None = None,
        device: str = "",
    ) -> None:
        self.name = f"salt {salt!r}"
        self.block_bytes = block_bytes
        self.oracle = oracle or Oracle()
        self.client: Client = connect(endpoint, timeout_seconds=timeout_seconds)
        self.group: Group = self.client.open(
            identity(salt, block_bytes=block_bytes), model_name="stamped", persistent=persistent
        )
        self.pool = self.client.map_device(device) if device else None

    def keys(self, prompt: int, num_blocks: int) -> bytes:
        keys = bytes(self.group.keys(tokens_of(prompt, num_blocks)))
        self.oracle.know(self.name, prompt, keys, layers_of(self.block_bytes))
        return keys

    def store(self, prompt: int, num_blocks: int, *, deadline_seconds: float = 5.0) -> int:
        """How many blocks of it are visible afterwards; of those on a device when the node has copied them."""
        tokens = tokens_of(prompt, num_blocks)
        keys = self.keys(prompt, num_blocks)
        with self.group.reserve(tokens, deadline_seconds=deadline_seconds, device=self.pool) as ticket:
            ticket.copy_from(stamps(keys, self.block_bytes))
            committed = ticket.commit()
        deadline = time.monotonic() + deadline_seconds if self.pool is not None and committed.staged else 0.0
        while (visible := self.match(prompt, num_blocks)) < num_blocks and time.monotonic() < deadline:
            time.sleep(0.005)  # between two looks at a condition that has a deadline
        return visible

    def seal(self, prompt: int, num_blocks: int, *, flushed: bool = True, deadline_seconds: float = 20.0) -> Sealed:
        wait = "flushed" if flushed else "sealed"
        return self.group.seal(keys=self.keys(prompt, num_blocks), wait=wait, deadline_seconds=deadline_seconds)

    def store_flushed(self, prompt: int, num_blocks: int) -> None:
        visible = self.store(prompt, num_blocks)
        sealed = self.seal(prompt, num_blocks)
        if (visible, sealed.flushed_blocks) != (num_blocks, num_blocks):
            raise AssertionError(f"{visible} visible, {sealed}")

    def match(self, prompt: int, num_blocks: int) -> int:
        return self.group.match(keys=self.keys(prompt, num_blocks)).blocks

    def load(self, prompt: int, num_blocks: int, *, deadline_seconds: float = 5.0) -> Loaded:
        keys = self.keys(prompt, num_blocks)
        with self.group.acquire(keys=keys, deadline_seconds=deadline_seconds, device=self.pool) as lease:
            destination = poisoned(lease.blocks, self.block_bytes)
            valid = lease.copy_into(destination)
            right = count_right(destination, keys, valid)
            wrong = "" if right == valid else self.explain(destination[right], keys, right)
            return Loaded(
                lease.blocks,
                valid,
                right,
                lease.nvme_blocks,
                lease.reason or "",
                wrong,
                lease.disk_blocks,
                lease.device_blocks,
            )

    def explain(self, row: np.ndarray, keys: bytes, block: int) -> str:
        """Where the block of that number among `keys` is wrong, and whose bytes are there."""
        expected = stamps(keys[block * KEY_BYTES : (block + 1) * KEY_BYTES], self.block_bytes)[0]
        return f"block {block}: {self.oracle.explain(row, expected)}"

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> StampedEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def poisoned(num_blocks: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """A destination in which nothing was copied yet."""
    return np.full((num_blocks, block_bytes), POISON, np.uint8)


def count_right(blocks: np.ndarray, keys: bytes, valid: int) -> int:
    """How many of the first `valid` rows, from the first on, carry the stamps of `keys`."""
    wrong = first_wrong(blocks[:valid], stamps(keys[: valid * KEY_BYTES], blocks.shape[1]))
    return valid if wrong is None else wrong
