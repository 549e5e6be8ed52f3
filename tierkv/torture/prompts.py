"""What engines under torture store: identities, prompts, and what each block must hold.

Prompts are numbers. The same prompt under each identity has the same tokens and other bytes, prompts of a family begin
alike, and everything follows from the numbers, so that whoever loads a block knows what must be in it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.torture.oracle import SOMEBODY, Oracle, first_wrong
from tierkv.torture.stamped import layers_of
from tierkv.torture.streams import rows_of

BLOCK_TOKENS = 16
MAX_BLOCKS = 24
FAMILY = 4
"""So many prompts share their first blocks."""

COMMON_PROMPTS = 24  # every engine's, from 0 on
DOERS_PROMPTS = 100  # from there on, those of the engine that does what it is told
OWN_PROMPTS = 10_000  # from the engine's seed times this on, those that only one engine stores
_MOST_OF_AN_ENGINE = 400


@dataclass(frozen=True)
class Kind:
    """One group. `ranks` shards, all of which one engine plays."""

    name: str
    block_bytes: int = 16_384
    ranks: int = 1
    salt: str = ""
    weights: str = "c4" * 32
    epoch: str = ""

    @functools.cached_property
    def identity(self) -> Identity:
        layout = Layout(
            dtype="uint8", block_bytes=self.layers, axes="layer,byte", block_tokens=BLOCK_TOKENS, engine="torture"
        )
        parallel = Parallel(tensor=self.ranks, shards=self.ranks)
        return Identity(
            weights=self.weights,
            config="torture",
            layout=layout,
            parallel=parallel,
            salt=self.salt,
            epoch=self.epoch,
        )

    @property
    def layers(self) -> tuple[int, ...]:
        return layers_of(self.block_bytes)

    @property
    def is_persistent(self) -> bool:
        return not self.epoch


KINDS = {
    kind.name: kind
    for kind in (
        Kind("even"),
        Kind("salted", salt="one tenant"),
        Kind("other-salt", salt="another tenant"),
        Kind("retrained", weights="d5" * 32),
        Kind("odd", 19_999),  # ends within a page
        Kind("ranks", 8_192, ranks=2),
        Kind("fleeting", epoch="never on disk"),
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
    """Packed keys of all MAX_BLOCKS blocks."""
    return chain_keys(KINDS[kind].identity.group_key(), pack_tokens(tokens_of(prompt)), BLOCK_TOKENS)


def blocks_of(kind: str, prompt: int, rank: int, first: int, blocks: int) -> np.ndarray:
    """[blocks, block_bytes], from block `first` on."""
    keys = keys_of(kind, prompt)[first * KEY_BYTES : (first + blocks) * KEY_BYTES]
    return rows_of(keys, KINDS[kind].layers, rank=rank)


def find_wrong(found: np.ndarray, kind: str, prompt: int, rank: int, engines: Iterable[int]) -> str:
    """Of rows that should be a prompt's first: which is not right, and whose bytes it holds; empty when all are.
    `engines` are the numbers of those that may have stored something."""
    expected = blocks_of(kind, prompt, rank, 0, len(found))
    block = first_wrong(found, expected)
    if block is None:
        return ""
    told = oracle_of([prompt]).explain(found[block], expected[block])
    if SOMEBODY in told:  # knowing everybody takes seconds
        told = oracle_of(_all_prompts(engines)).explain(found[block], expected[block])
    return f"{kind} prompt {prompt} block {block} rank {rank}: {told}"


def _all_prompts(engines: Iterable[int]) -> list[int]:
    starts = {0, *(engine * OWN_PROMPTS for engine in engines)}
    return [start + number for start in sorted(starts) for number in range(_MOST_OF_AN_ENGINE)]


def oracle_of(prompts: Iterable[int]) -> Oracle:
    """Knows these under each identity."""
    oracle = Oracle()
    several = list(prompts)
    for kind in KINDS.values():
        for prompt in several:
            for rank in range(kind.ranks):
                oracle.know(kind.name, prompt, keys_of(kind.name, prompt), kind.layers, rank=rank)
    return oracle
