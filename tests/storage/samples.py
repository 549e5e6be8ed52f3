"""Small extents for the tests of storage: an arena, an identity, instructions, and files made of them."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from blake3 import blake3

from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import Read, Write
from tierkv.core.keys import KEY_BYTES, TOKEN_BYTES, chain_keys, pack_tokens
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome, WrittenFile, read_blocks, write_extent
from tierkv.storage.format import stored_bytes
from tierkv.storage.names import ExtentName

FINGERPRINT = "ab" * 32
BLOCK_TOKENS = 4
POISON = 0xEE


def identity(block_bytes: int = 4096, **changes: str) -> Identity:
    layout = Layout(
        dtype=changes.pop("dtype", "bfloat16"),
        codec=changes.pop("codec", ""),
        block_bytes=(block_bytes,),
        axes=changes.pop("axes", "layer,kv,head,token,dim"),
        block_tokens=BLOCK_TOKENS,
        engine="test",
    )
    return Identity(weights=FINGERPRINT, config="", layout=layout, **changes)


def noise(name: str, num_bytes: int) -> bytes:
    return blake3(name.encode()).digest(length=num_bytes)


def numbers(name: str, num_bytes: int) -> bytes:
    """Of something like a bell curve, each in the two bytes that bfloat16 keeps of it: the same on every machine."""
    count = num_bytes // 2 + 1
    drawn = np.frombuffer(noise(name, 8 * count), "<u2").reshape(4, count).astype(np.int32).sum(axis=0) - 2 * 65_535
    return (drawn.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()[:num_bytes]


class Sample:
    """One extent in an arena of its own: its blocks in the lower slots, the upper ones filled with poison to read into.

    What lies behind a block in its last page is poison too: it must get into no file.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 3,
        block_bytes: int = 4096,
        first_token: int = 0,
        extras: dict[int, list[bytes]] | None = None,
        seed: int = 1,
        like_kv: bool = False,
        **layout: str,
    ) -> None:
        """`like_kv`: blocks of numbers as a model makes them, which a lossless codec makes smaller; else of noise.
        `layout` is what differs in the identity."""
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.slot_bytes = stored_bytes(block_bytes)
        self.identity = identity(block_bytes, **layout)
        self.group = self.identity.group_key()
        self.first_token = first_token
        self.parent = self.group if not first_token else bytes([7]) * KEY_BYTES
        self.tokens = pack_tokens(list(range(seed, seed + num_blocks * BLOCK_TOKENS)))
        self.extras = extras or {}
        self.keys = chain_keys(self.parent, self.tokens, BLOCK_TOKENS, extras=self.extras)
        self.name = ExtentName(FINGERPRINT, self.group, 0, self.keys[:KEY_BYTES])
        self.arena = memoryview(mmap.mmap(-1, 2 * num_blocks * self.slot_bytes))
        self.arena[:] = bytes([POISON]) * len(self.arena)
        make = numbers if like_kv else noise
        self.blocks = [make(f"{seed} {index}", block_bytes) for index in range(num_blocks)]
        for index, block in enumerate(self.blocks):
            self.put(index, block)

    def put(self, index: int, block: bytes) -> None:
        """Other content of a block."""
        self.blocks[index] = block
        self.arena[index * self.slot_bytes : index * self.slot_bytes + self.block_bytes] = block

    def write_order(self, **changes: object) -> Write:
        fields: dict[str, object] = {
            "op": 1,
            "fingerprint": FINGERPRINT,
            "group": self.group,
            "rank": 0,
            "key": self.keys[:KEY_BYTES],
            "parent": self.parent,
            "first_token": self.first_token,
            "block_tokens": BLOCK_TOKENS,
            "block_bytes": self.block_bytes,
            "keys": self.keys,
            "tokens": self.tokens,
            "slots": [index * self.slot_bytes for index in range(self.num_blocks)],
            "created": 1_700_000_000.25,
            "last_used": 1_700_000_000.5,
            "extras": self.extras,
        }
        return Write(**(fields | changes))  # type: ignore[arg-type]

    def read_order(self, first: int = 0, count: int | None = None, **changes: object) -> Read:
        count = self.num_blocks - first if count is None else count
        fields: dict[str, object] = {
            "op": 2,
            "fingerprint": FINGERPRINT,
            "group": self.group,
            "rank": 0,
            "key": self.keys[:KEY_BYTES],
            "parent": self.parent,
            "first_token": self.first_token,
            "block_tokens": BLOCK_TOKENS,
            "block_bytes": self.block_bytes,
            "keys": self.keys[: (first + count) * KEY_BYTES],
            "first": first,
            "slots": [(self.num_blocks + index) * self.slot_bytes for index in range(count)],
        }
        return Read(**(fields | changes))  # type: ignore[arg-type]

    def write(self, directory: DataDirectory) -> WrittenFile:
        written = write_extent(directory, self.arena, self.write_order(), identity=self.identity)
        assert isinstance(written, WrittenFile), written
        return written

    def read(self, directory: DataDirectory, first: int = 0, count: int | None = None) -> ReadOutcome:
        return read_blocks(directory, self.arena, self.read_order(first, count), identity=self.identity)

    def read_back(self, index: int) -> bytes:
        """What was read into the slot of the `index`-th block asked for."""
        start = (self.num_blocks + index) * self.slot_bytes
        return bytes(self.arena[start : start + self.block_bytes])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


def path_of(directory: DataDirectory, name: ExtentName) -> Path:
    return directory.path.joinpath(*name.parts)


def temp_files(directory: DataDirectory) -> list[str]:
    return sorted(entry.name for entry in (directory.path / "tmp").iterdir())
