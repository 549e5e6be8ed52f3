"""A group as an engine declared it: what every verb about it needs, and what is sent to open it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from tierkv.client.prompt import Extras, KeyChain, TokenIds, pack_prompt
from tierkv.core.codec import BlockCodec, KVShape, codec_of
from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import ManifestEntry
from tierkv.core.keys import KEY_BYTES, NO_EXTRAS, chain_keys
from tierkv.core.tenancy import under_tenant
from tierkv.errors import ConfigError, LayoutMismatch
from tierkv.wire.messages import MAX_TEXT


@dataclass(slots=True, kw_only=True, eq=False)
class GroupRecord:
    """`persistent` and `persistence_reason` are the node's word, known once it was opened. `tenant` is the session's,
    and part of what the keys are rooted in: see `live_under`. `block_bytes` is what a slot holds of a block, coded
    where there is a `codec`; `raw_block_bytes` what the engine's buffers hold."""

    identity: Identity
    rank: int
    model_name: str
    adapter_name: str
    manifest: tuple[ManifestEntry, ...]
    wants_persistence: bool
    key: bytes = field(init=False)
    block_tokens: int = field(init=False)
    block_bytes: int = field(init=False)
    raw_block_bytes: int = field(init=False)
    persistent: bool | None = None
    persistence_reason: str = ""
    tenant: str = ""
    codec: BlockCodec | None = None

    def __post_init__(self) -> None:
        self.key = self.identity.group_key()
        self.block_tokens = self.identity.layout.block_tokens
        self.block_bytes = self.identity.layout.total_block_bytes
        self.raw_block_bytes = self.block_bytes if self.codec is None else sum(self.codec.raw_bytes)

    def live_under(self, tenant: str) -> None:
        """Root the keys as the node does for sessions of this tenant. Keys made before find nothing from now on."""
        self.tenant = tenant
        self.key = under_tenant(self.identity, tenant).group_key()

    def make_keys(self, tokens: TokenIds, extras: Extras = NO_EXTRAS) -> bytes:
        return chain_keys(self.key, pack_prompt(tokens), self.block_tokens, extras=extras)

    def make_chain(self) -> KeyChain:
        return KeyChain(self.key, self.block_tokens)

    def resolve_keys(self, tokens: TokenIds | None, keys: bytes | None) -> bytes:
        """Keys given, or made from tokens: exactly one of both."""
        if (tokens is None) == (keys is None):
            raise ValueError("give either tokens or keys")
        if keys is None:
            assert tokens is not None
            return self.make_keys(tokens)
        if len(keys) % KEY_BYTES:
            raise ValueError(f"keys: {len(keys)} bytes are no whole number of keys of {KEY_BYTES} bytes")
        return keys


class GroupCore:
    """What a group tells without asking the node."""

    def __init__(self, record: GroupRecord) -> None:
        self._record = record

    @property
    def identity(self) -> Identity:
        return self._record.identity

    @property
    def key(self) -> bytes:
        return self._record.key

    @property
    def rank(self) -> int:
        return self._record.rank

    @property
    def block_tokens(self) -> int:
        return self._record.block_tokens

    @property
    def block_bytes(self) -> int:
        """Of a block in its slot: coded, where the layout names a codec."""
        return self._record.block_bytes

    @property
    def raw_block_bytes(self) -> int:
        """Of a block in the engine's memory: what `copy_into` and `copy_from` move."""
        return self._record.raw_block_bytes

    @property
    def persistent(self) -> bool | None:
        """Whether the node writes it to disk; None until it was opened there. `persistence_reason` says why not."""
        return self._record.persistent

    @property
    def persistence_reason(self) -> str:
        return self._record.persistence_reason

    def keys(self, tokens: TokenIds, extras: Extras | None = None) -> bytes:
        """Packed keys, 32 bytes each, of the full blocks of a prompt. `extras` maps a block's index to its inputs
        besides tokens (digests of media). The same for all ranks."""
        return self._record.make_keys(tokens, extras or NO_EXTRAS)

    def key_chain(self) -> KeyChain:
        """For a prompt that grows: keys of what was there before are kept."""
        return self._record.make_chain()


def declare(
    identity: Identity,
    *,
    rank: int,
    model_name: str,
    adapter_name: str,
    manifest: tuple[ManifestEntry, ...],
    block_bytes: int | None,
    persistent: bool,
    kv_shape: KVShape | None = None,
    moves_coded: bool = False,
) -> GroupRecord:
    """Raises LayoutMismatch where the engine's buffers aren't what the identity says, ConfigError for nonsense. Who
    `moves_coded` is no engine: blocks pass through as they lie in their slots, whatever their codec."""
    if gap := identity.find_gap():
        raise ConfigError(f"identity.{gap[0]}", gap[1])
    layout = identity.layout
    sizes: object = layout.block_bytes
    if not isinstance(sizes, tuple):
        raise ConfigError("layout.block_bytes", f"{sizes!r}; one entry a layer group, so a tuple like (368_640,)")
    if layout.block_tokens < 1:
        raise ConfigError("layout.block_tokens", f"{layout.block_tokens}; a block has at least one token")
    if layout.total_block_bytes < 1 or min(layout.block_bytes) < 0:
        raise ConfigError("layout.block_bytes", f"{layout.block_bytes}; a block has at least one byte")
    if not 0 <= rank < identity.parallel.shards:
        raise ConfigError("rank", f"{rank}, but the identity has {identity.parallel.shards} shards")
    try:
        identity.encode()
    except (TypeError, ValueError, struct.error) as error:  # a number for a text, half a character, more than 64 bits
        raise ConfigError("identity", f"can't be made a key of: {error}") from error
    record = GroupRecord(
        identity=identity,
        rank=rank,
        model_name=_printable("model_name", model_name),
        adapter_name=_printable("adapter_name", adapter_name),
        manifest=manifest,
        wants_persistence=persistent,
        codec=None if moves_coded else _codec(layout, kv_shape),
    )
    if block_bytes is not None and block_bytes != record.raw_block_bytes:
        raise LayoutMismatch("block_bytes", record.raw_block_bytes, block_bytes)
    return record


def _codec(layout: Layout, kv_shape: KVShape | None) -> BlockCodec | None:
    if not layout.codec:
        if kv_shape is not None:
            raise ConfigError("kv_shape", "given, and the layout names no codec; blocks are stored as they are")
        return None
    if kv_shape is None:
        raise ConfigError("kv_shape", f"missing: the layout names the codec {layout.codec!r}, which needs it")
    if layout.dtype != kv_shape.element:
        raise LayoutMismatch("dtype", layout.dtype, kv_shape.element)
    codec = codec_of(layout.codec, kv_shape)
    if layout.block_bytes != codec.block_bytes:
        raise LayoutMismatch("block_bytes", layout.block_bytes, codec.block_bytes)
    return codec


def _printable(name: str, text: str) -> str:
    """Names are for people: what can't be encoded (a file name in another encoding) is replaced, not refused."""
    if len(text) > MAX_TEXT:
        raise ConfigError(name, f"longer than {MAX_TEXT} characters")
    return text.encode("utf-8", "replace").decode()
