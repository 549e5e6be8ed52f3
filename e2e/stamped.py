"""An engine with plain memory: the bytes of a block are its own key, over and over.

So a right block can be recognised without keeping a copy, and a foreign one traced to the prompt it belongs to.
Destinations are poisoned before each load.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierkv.client import Client, Group, Sealed, connect
from tierkv.core.identity import Identity, Layout
from tierkv.core.keys import KEY_BYTES

BLOCK_TOKENS = 16
BLOCK_BYTES = 16_384
POISON = 0xA5


@dataclass(frozen=True)
class Loaded:
    """`blocks` were leased, `valid` of them proven, and `right` of those, counted from the first, carry their stamp. A
    cache that is never wrong has `right == valid`. `reason` is why there are not more."""

    blocks: int
    valid: int
    right: int
    nvme_blocks: int
    reason: str

    @property
    def is_wrong(self) -> bool:
        return self.right != self.valid


def identity(salt: str = "", *, block_bytes: int = BLOCK_BYTES, weights: str = "5a" * 32) -> Identity:
    layout = Layout(dtype="uint8", block_bytes=(block_bytes,), axes="byte", block_tokens=BLOCK_TOKENS, engine="stamped")
    return Identity(weights=weights, config="none", layout=layout, salt=salt)


def tokens_of(prompt: int, num_blocks: int) -> np.ndarray:
    """The first blocks of prompt number `prompt`: always the same, and no two prompts begin alike."""
    rest = np.random.default_rng(prompt).integers(0, 50_000, num_blocks * BLOCK_TOKENS - 1)
    return np.concatenate([[prompt], rest]).astype(np.uint32)


def stamps(keys: bytes, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """[blocks, block_bytes]"""
    each = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
    return np.tile(each, (1, block_bytes // KEY_BYTES))


class StampedEngine:
    """Owns its client."""

    def __init__(
        self,
        endpoint: str | os.PathLike[str],
        *,
        salt: str = "",
        block_bytes: int = BLOCK_BYTES,
        persistent: bool = True,
        timeout_seconds: float = 5.0,
    ) -> None:
        self.block_bytes = block_bytes
        self.client: Client = connect(endpoint, timeout_seconds=timeout_seconds)
        self.group: Group = self.client.open(
            identity(salt, block_bytes=block_bytes), model_name="stamped", persistent=persistent
        )

    def keys(self, prompt: int, num_blocks: int) -> bytes:
        return bytes(self.group.keys(tokens_of(prompt, num_blocks)))

    def store(self, prompt: int, num_blocks: int, *, deadline_seconds: float = 5.0) -> int:
        """How many blocks of it are visible afterwards."""
        tokens = tokens_of(prompt, num_blocks)
        keys = self.keys(prompt, num_blocks)
        with self.group.reserve(tokens, deadline_seconds=deadline_seconds) as ticket:
            ticket.copy_from(stamps(keys, self.block_bytes))
            ticket.commit()
        return self.match(prompt, num_blocks)

    def seal(self, prompt: int, num_blocks: int, *, flushed: bool = True, deadline_seconds: float = 20.0) -> Sealed:
        wait = "flushed" if flushed else "sealed"
        return self.group.seal(keys=self.keys(prompt, num_blocks), wait=wait, deadline_seconds=deadline_seconds)

    def store_flushed(self, prompt: int, num_blocks: int) -> None:
        visible = self.store(prompt, num_blocks)
        sealed = self.seal(prompt, num_blocks)
        assert (visible, sealed.flushed_blocks) == (num_blocks, num_blocks), f"{visible} visible, {sealed}"

    def match(self, prompt: int, num_blocks: int) -> int:
        return self.group.match(keys=self.keys(prompt, num_blocks)).blocks

    def load(self, prompt: int, num_blocks: int, *, deadline_seconds: float = 5.0) -> Loaded:
        keys = self.keys(prompt, num_blocks)
        with self.group.acquire(keys=keys, deadline_seconds=deadline_seconds) as lease:
            destination = np.full((lease.blocks, self.block_bytes), POISON, np.uint8)
            valid = lease.copy_into(destination)
            right = count_right(destination, keys, valid)
            return Loaded(lease.blocks, valid, right, lease.nvme_blocks, lease.reason or "")

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> StampedEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def count_right(blocks: np.ndarray, keys: bytes, valid: int) -> int:
    """How many of the first `valid` rows, from the first on, carry the stamps of `keys`."""
    same = (blocks[:valid] == stamps(keys[: valid * KEY_BYTES], blocks.shape[1])).all(axis=1)
    return valid if same.all() else int(np.argmin(same))
