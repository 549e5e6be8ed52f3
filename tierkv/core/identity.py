"""Identity: everything that can change the bytes of a block, and the digests made from it.

    group key     = BLAKE3 of the tagged, length-framed encoding of the identity
    namespace     = (group key, rank): one shard's share of the cache

Encoding (version 1), so that no two identities encode alike:

    "tierkv identity 1" | for each field, in the order of declaration:
        u16 length of the name | name | u8 kind | u64 length of the value | value

A text is UTF-8, a number eight bytes little-endian, a tuple the concatenation of its items, each framed
like a field with its index as the name, a nested type the concatenation of its fields.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import msgspec
from blake3 import blake3

_MAGIC = b"tierkv identity 1"
_KIND_TEXT, _KIND_NUMBER, _KIND_TUPLE, _KIND_TYPE = 1, 2, 3, 4

GROUP_KEY_BYTES = 32
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the bytes of one block of one shard are laid out.

    `block_bytes` has one entry per layer group: bytes of a block in it. `axes` names the order of the axes,
    outermost first (for example "layer,kv,head,token,dim"). `engine` names backend, packing and instruction set.
    """

    dtype: str
    block_bytes: tuple[int, ...]
    axes: str
    block_tokens: int
    engine: str
    codec: str = ""

    @property
    def total_block_bytes(self) -> int:
        return sum(self.block_bytes)


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parallel sizes. `shards` is how many different shards the group has: the product of the sizes, or fewer
    where ranks hold the same KV (latent attention), of which one is stored."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shards: int = 1


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Design section 4. Every field is in the digest; names, paths, hosts and times are not here.

    `weights` and `adapter` are fingerprints (64 hex digits) of file contents, `adapter` empty for none;
    `config` is the digest of the settings that change KV bytes. `epoch` is set after an in-place weight update
    that has no files: such a group is not persistent.
    """

    weights: str
    config: str
    layout: Layout
    adapter: str = ""
    parallel: Parallel = Parallel()
    salt: str = ""
    epoch: str = ""

    def encode(self) -> bytes:
        return _MAGIC + _encode_fields(self)

    def group_key(self) -> bytes:
        return blake3(self.encode()).digest()

    @property
    def is_persistent(self) -> bool:
        return not self.epoch

    def find_gap(self) -> tuple[str, str] | None:
        """The field that leaves open what the bytes depend on, and what it should hold: two models that say nothing
        would share their blocks. None: every field says something."""
        layout = self.layout
        if not _FINGERPRINT.fullmatch(self.weights) and not (self.epoch and not self.weights):
            return (
                "weights",
                f"{self.weights[:80]!r} is no fingerprint of 64 hex digits; `tierkv fingerprint DIR` prints one",
            )
        if not self.config:
            return "config", "empty; it is the digest of the settings that change KV bytes"
        for name in ("dtype", "axes", "engine"):
            if not getattr(layout, name):
                return f"layout.{name}", "empty; equal sizes are no proof of an equal layout"
        return None


def _encode_fields(value: msgspec.Struct) -> bytes:
    return b"".join(_frame(name, getattr(value, name)) for name in value.__struct_fields__)


def _frame(name: str, value: Any) -> bytes:
    kind, body = _encode_value(value)
    encoded_name = name.encode()
    return struct.pack("<H", len(encoded_name)) + encoded_name + struct.pack("<BQ", kind, len(body)) + body


def _encode_value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return _KIND_TEXT, value.encode()
    if isinstance(value, int):
        return _KIND_NUMBER, struct.pack("<q", value)
    if isinstance(value, tuple):
        return _KIND_TUPLE, b"".join(_frame(str(index), item) for index, item in enumerate(value))
    if isinstance(value, msgspec.Struct):
        return _KIND_TYPE, _encode_fields(value)
    raise TypeError(f"an identity can't hold a {type(value).__name__}")
