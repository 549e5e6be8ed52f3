"""What every block of a chaos run must hold, and whose bytes a wrong one holds instead.

The bytes of a block are a stream of BLAKE3 over its key and its rank. The key stands for the identity and all tokens so
far, so a byte that is wrong, or right but in a wrong place of the block, belongs to somebody, who can be named.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens, split_keys

BLOCK_TOKENS = 16
MAX_BLOCKS = 24
FAMILY = 4
"""So many prompts share their first blocks."""

COMMON_PROMPTS = 24  # every engine's, from 0 on
DOERS_PROMPTS = 100  # from there on, those of the engine that does what it is told
OWN_PROMPTS = 10_000  # from the engine's seed times this on, those that only one engine stores

PAGE_BYTES = 4096
POISON = 0xA5
GARBAGE = b"half-written by "
_OWNER_BYTES = 16


@dataclass(frozen=True)
class Kind:
    """One group of a run. `ranks` shards, all of which one engine plays."""

    name: str
    block_bytes: int
    ranks: int = 1
    epoch: str = ""

    @property
    def identity(self) -> Identity:
        layout = Layout(
            dtype="uint8", block_bytes=(self.block_bytes,), axes="byte", block_tokens=BLOCK_TOKENS, engine="chaos"
        )
        parallel = Parallel(tensor=self.ranks, shards=self.ranks)
        return Identity(weights="c4" * 32, config=self.name, layout=layout, parallel=parallel, epoch=self.epoch)

    @property
    def is_persistent(self) -> bool:
        return not self.epoch


KINDS = {
    kind.name: kind
    for kind in (
        Kind("even", 16_384),
        Kind("odd", 19_999),  # ends within a page
        Kind("ranks", 8_192, ranks=2),
        Kind("fleeting", 16_384, epoch="never on disk"),
    )
}
PERSISTENT = [kind.name for kind in KINDS.values() if kind.is_persistent]


def tokens_of(prompt: int, num_blocks: int = MAX_BLOCKS) -> np.ndarray:
    """The first blocks of a prompt: always the same. Prompts of a family begin alike and part in the middle."""
    shared = shared_blocks(prompt) * BLOCK_TOKENS
    begin = np.random.default_rng([1, prompt // FAMILY]).integers(0, 50_000, shared)
    rest = np.random.default_rng([2, prompt]).integers(0, 50_000, MAX_BLOCKS * BLOCK_TOKENS - shared)
    return np.concatenate([begin, rest]).astype(np.uint32)[: num_blocks * BLOCK_TOKENS]


def shared_blocks(prompt: int) -> int:
    return 2 + prompt // FAMILY * 5 % 11


@functools.lru_cache(4_096)
def keys_of(kind: str, prompt: int) -> bytes:
    return chain_keys(KINDS[kind].identity.group_key(), pack_tokens(tokens_of(prompt)), BLOCK_TOKENS)


@functools.lru_cache(2_048)
def bytes_of(key: bytes, rank: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer(blake3(key + bytes([rank])).digest(length=num_bytes), np.uint8)


def rows_of(kind: str, prompt: int, rank: int, first: int, blocks: int) -> np.ndarray:
    """[blocks, block_bytes], from block `first` on."""
    keys = keys_of(kind, prompt)[first * KEY_BYTES : (first + blocks) * KEY_BYTES]
    return np.stack([bytes_of(key, rank, KINDS[kind].block_bytes) for key in split_keys(keys)])


def garbage(num_bytes: int, who: int) -> np.ndarray:
    """What is in slots that an engine has not finished writing."""
    mark = GARBAGE + who.to_bytes(16, "little")
    return np.frombuffer((mark * (num_bytes // len(mark) + 1))[:num_bytes], np.uint8)


def first_wrong(found: np.ndarray, kind: str, prompt: int, rank: int) -> int | None:
    """The first row that is not what the prompt's block of that number must be."""
    if not len(found):
        return None
    same = (found == rows_of(kind, prompt, rank, 0, len(found))).all(axis=1)
    return None if same.all() else int(np.argmin(same))


def explain(row: np.ndarray, kind: str, prompt: int, rank: int, block: int, max_prompt: int) -> str:
    """Where a wrong block is wrong, and whose bytes are there; slow, for a run that has failed anyhow. `max_prompt` is
    the highest that may have been stored."""
    expected = rows_of(kind, prompt, rank, block, 1)[0]
    owners = _owners(max_prompt)
    told = []
    for at in range(0, len(row), PAGE_BYTES):
        page, wanted = row[at : at + PAGE_BYTES], expected[at : at + PAGE_BYTES]
        if (page != wanted).any():
            wrong = int(np.argmax(page != wanted))
            told.append(f"page {at // PAGE_BYTES} from byte {wrong} on: {_owner(page, owners)}")
    return f"{kind} prompt {prompt} block {block} rank {rank}: {'; '.join(told)}"


def _owner(page: np.ndarray, owners: dict[bytes, str]) -> str:
    start = page[:_OWNER_BYTES].tobytes()
    if start == GARBAGE:
        return f"not finished by process {int.from_bytes(page[16:32].tobytes(), 'little')}"
    if not page.any():
        return "zeros"
    if (page == POISON).all():
        return "never copied"
    return owners.get(start, f"of nobody: {start.hex()}")


def _owners(max_prompt: int) -> dict[bytes, str]:
    owners: dict[bytes, str] = {}
    prompts = [p for p in range(max_prompt + OWN_PROMPTS) if p % OWN_PROMPTS < 10 * DOERS_PROMPTS]
    for kind in KINDS.values():
        for prompt in prompts:
            for block, key in enumerate(split_keys(keys_of(kind.name, prompt))):
                for rank in range(kind.ranks):
                    content = blake3(key + bytes([rank])).digest(length=kind.block_bytes)
                    for at in range(0, kind.block_bytes, PAGE_BYTES):
                        where = f"{kind.name} prompt {prompt} block {block} rank {rank} page {at // PAGE_BYTES}"
                        owners.setdefault(content[at : at + _OWNER_BYTES], where)
    return owners
