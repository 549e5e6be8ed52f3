"""From token ids to packed block keys: at once, or for a conversation piece by piece."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from tierkv.core.keys import KEY_BYTES, NO_EXTRAS, TOKEN_BYTES, chain_keys, pack_tokens

TokenIds = Sequence[int] | np.ndarray
Extras = Mapping[int, Sequence[bytes]]

_NATIVE_TOKENS = sys.byteorder == "little" and array("I").itemsize == TOKEN_BYTES


def pack_prompt(tokens: TokenIds) -> bytes:
    """Token ids as little-endian u32. Raises ValueError for what is no token id."""
    if _NATIVE_TOKENS and isinstance(tokens, list | tuple):
        try:
            return array("I", tokens).tobytes()  # a quarter of the time that numpy takes with a list
        except (OverflowError, TypeError):
            pass  # pack_tokens says in words what is wrong with them
    return pack_tokens(tokens)


class KeyChain:
    """The keys of a prompt that grows: a conversation's next turn hashes only what is new.

    `extend` adds tokens behind those given before and returns the packed keys of all full blocks so far. For another
    branch of a conversation start a new chain. Not thread-safe.
    """

    def __init__(self, root: bytes, block_tokens: int) -> None:
        self._root = root
        self._block_tokens = block_tokens
        self._keys = b""
        self._rest = b""  # packed tokens behind the last full block

    @property
    def keys(self) -> bytes:
        return self._keys

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self._block_tokens + len(self._rest) // TOKEN_BYTES

    @property
    def num_blocks(self) -> int:
        return len(self._keys) // KEY_BYTES

    def extend(self, tokens: TokenIds, extras: Extras = NO_EXTRAS) -> bytes:
        """`extras` maps block indices, counted from the start of the prompt, to the extra inputs of a block. They
        must be known when the block's last token is given."""
        packed = self._rest + pack_prompt(tokens)
        parent = self._keys[-KEY_BYTES:] or self._root
        first = self.num_blocks
        self._keys += chain_keys(parent, packed, self._block_tokens, first_block=first, extras=extras)
        self._rest = packed[(self.num_blocks - first) * self._block_tokens * TOKEN_BYTES :]
        return self._keys
