"""Block keys: a chain of digests over the tokens of a prompt, rooted in the group.

    key[i] = BLAKE3( key[i-1] | u32 tokens | token ids, u32 each | u32 extras | for each: u32 length | bytes )
    key[-1] = the group key

Little-endian throughout. Packed keys are the concatenation of 32-byte keys. Extras are inputs of a block
besides its tokens (digests of media, of prompt embeddings).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    import numpy as np

KEY_BYTES = 32
TOKEN_BYTES = 4
NO_EXTRAS: Mapping[int, Sequence[bytes]] = {}

_NO_EXTRAS_FRAME = struct.pack("<I", 0)


def pack_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as little-endian u32. Raises ValueError for ids outside of 0 .. 2**32 - 1."""
    # Importing it takes a tenth of a second, which processes that are never given token ids need not spend.
    import numpy as np  # noqa: PLC0415

    wide = np.asarray(tokens)
    if wide.size == 0:
        return b""
    if wide.dtype.kind not in "iu":
        raise ValueError(f"token ids are whole numbers, not {wide.dtype}")
    if wide.dtype != np.uint32 and (int(wide.min()) < 0 or int(wide.max()) > 0xFFFFFFFF):
        raise ValueError("token ids lie in 0 .. 2**32 - 1")
    return wide.astype("<u4", copy=False).tobytes()


def chain_keys(
    parent: bytes,
    tokens: bytes,
    block_tokens: int,
    *,
    first_block: int = 0,
    extras: Mapping[int, Sequence[bytes]] = NO_EXTRAS,
) -> bytes:
    """Packed keys of the full blocks in packed `tokens`, the first of which follows `parent`.

    `extras` maps a block's index in the prompt (counted from `first_block`) to its extra inputs, in order.
    A last, partial block has no key.
    """
    step = block_tokens * TOKEN_BYTES
    frame = struct.pack("<I", block_tokens)
    key = parent
    packed = []
    for offset in range(0, len(tokens) - step + 1, step):
        tail = _frame_extras(extras.get(first_block + offset // step)) if extras else _NO_EXTRAS_FRAME
        key = blake3(key + frame + tokens[offset : offset + step] + tail).digest()
        packed.append(key)
    return b"".join(packed)


def key_at(keys: bytes, index: int) -> bytes:
    return keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]


def count_keys(keys: bytes) -> int:
    return len(keys) // KEY_BYTES


def split_keys(keys: bytes, first: int = 0) -> list[bytes]:
    """Packed keys one by one, from block `first` on."""
    return [keys[offset : offset + KEY_BYTES] for offset in range(first * KEY_BYTES, len(keys), KEY_BYTES)]


def _frame_extras(extras: Sequence[bytes] | None) -> bytes:
    if not extras:
        return _NO_EXTRAS_FRAME
    return struct.pack("<I", len(extras)) + b"".join(struct.pack("<I", len(extra)) + extra for extra in extras)
