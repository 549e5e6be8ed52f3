"""What holds for the blocks of any request: their keys, how many may be loaded, which are still to be stored.

tokens    | block | block | block | block | tail |
loaded     at most so many that a token is left to compute
offered    from token 0 on: the node has these, or they have been given to it
to offer                   behind those, full and final
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tierkv.client import KeyChain
from tierkv.client.prompt import Extras, TokenIds, pack_prompt
from tierkv.core.keys import KEY_BYTES, NO_EXTRAS

MOST_TRIES = 3
"""How often in a row blocks are offered that came too late to be copied."""


class Prefix:
    """One request; its blocks are counted from token 0. `tokens(begin, end)` gives ids of its tokens, those of the
    answer so far included; only final ones are asked for. `extras` are the inputs of blocks besides tokens."""

    def __init__(
        self,
        group_key: bytes,
        block_tokens: int,
        tokens: Callable[[int, int], TokenIds],
        extras: Extras = NO_EXTRAS,
    ) -> None:
        self._chain = KeyChain(group_key, block_tokens)
        self._block_tokens = block_tokens
        self._tokens = tokens
        self._extras = extras
        self._offered = 0
        self._ended = False
        self._tries = 0
        self.due_at: float = block_tokens
        """Once so many tokens are final `to_offer` has blocks. Kept at hand, for every step of the engine looks."""

    def full_blocks(self, tokens: int) -> int:
        return tokens // self._block_tokens

    def loadable_blocks(self, tokens: int) -> int:
        """Of a prompt of so many tokens: at least one is left to compute."""
        return max(0, tokens - 1) // self._block_tokens

    def keys(self, blocks: int) -> bytes:
        """Packed keys of the first `blocks` blocks."""
        if self._chain.num_blocks < blocks:
            end = blocks * self._block_tokens
            self._chain.extend(self._tokens(self._chain.num_tokens, end), self._extras)
        return self._chain.keys[: blocks * KEY_BYTES]

    def packed_tokens(self, first_block: int, end_block: int) -> bytes:
        return pack_prompt(self._tokens(first_block * self._block_tokens, end_block * self._block_tokens))

    def extras(self, first_block: int, end_block: int) -> dict[int, list[bytes]]:
        return {block: list(extra) for block, extra in self._extras.items() if first_block <= block < end_block}

    # ---- what the node has

    @property
    def offered(self) -> int:
        """The first so many blocks are in the node, or have been given to it."""
        return self._offered

    def found(self, blocks: int) -> None:
        """The node has the first `blocks` blocks."""
        self._is_offered(max(self._offered, blocks))

    def lost(self, blocks: int) -> None:
        """Of what was found only the first `blocks` blocks could be loaded, and the others are computed: whether the
        node still has them nobody knows."""
        self._is_offered(min(self._offered, blocks))

    def begin_again(self) -> None:
        """The node has lost what it had in memory, or it is another one."""
        self._tries, self._ended = 0, False
        self._is_offered(0)

    def to_offer(self, final_tokens: int) -> range:
        """Blocks of the first `final_tokens` tokens that are still to be given to the node, none where no more are."""
        return range(0) if self._ended else range(self._offered, self.full_blocks(final_tokens))

    def give(self, end_block: int) -> None:
        """The blocks up to `end_block` go to the node now."""
        self._is_offered(max(self._offered, end_block))

    def stored(self) -> None:
        """Some of what was given is in the node."""
        self._tries = 0

    def came_late(self, first_block: int) -> None:
        """Blocks from `first_block` on were given, and could not be copied in time: they are offered again, but not for
        ever. Told more than once of the same, by one rank after the other, it counts once."""
        if first_block < self._offered:
            self._tries += 1
            self._is_offered(first_block)
            if self._tries == MOST_TRIES:
                self.end()

    def end(self) -> None:
        """Nothing more is given: what lies behind a gap would never be found."""
        self._ended = True
        self._is_offered(self._offered)

    def _is_offered(self, blocks: int) -> None:
        self._offered = blocks
        self.due_at = math.inf if self._ended else (blocks + 1) * self._block_tokens
