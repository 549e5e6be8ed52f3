"""Answers to "why was this a miss?": values only, which travel as they are. Made by tierkv.core.explain."""

from __future__ import annotations

import msgspec


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [first_token, first_token + tokens) of the prompt lie in `tiers`. `growing`: not sealed, so not written
    yet. `nvme` is where the file stands (absent, queued, writing, present, removing), and `why_not_there` why it was
    not written, or went; `disk` where the one in the disk tier stands. `being_read`: on its way to host memory.
    `extents` were taken together."""

    first_token: int
    tokens: int
    tiers: tuple[str, ...]
    growing: bool
    nvme: str
    why_not_there: str
    being_read: bool
    extents: int
    hits: int
    last_used: float
    disk: str = "absent"


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of blocks that left the last tier that had them, or were refused (worth_less)."""

    tier: str
    reason: str
    at: float
    tokens: int
    hits: int
    last_used: float


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cached prefix ends before the prompt does. `absence` is that of the first missing block; `tokens_by`
    has the first `looked_at_tokens` of the missing ones by what is known of them. STAGED: `ranks_there` of `ranks` have
    committed the block. `reason` and `at` of a refusal or of what left, `at` of a purge."""

    token: int
    tokens: int
    absence: str
    tokens_by: dict[str, int]
    looked_at_tokens: int
    ranks: int
    ranks_there: int
    left: Left | None = None
    reason: str = ""
    at: float = 0.0


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt leaves what others have cached: they go on behind its last cached block, `others` of them, and
    the one that agrees longest has another token at `token`. `asked` and `cached` are the two ids. With
    `tokens_known` false nobody's tokens are in memory, and it is one of the block at `token`. `same_tokens`: the
    block's tokens are the same, and its other inputs (media) differ."""

    token: int
    others: int
    tokens_known: bool
    asked: int | None = None
    cached: int | None = None
    same_tokens: bool = False


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt finds in one namespace: `cached_blocks` of `asked_blocks`, from token 0, in `stretches`."""

    group: bytes
    block_tokens: int
    asked_blocks: int
    cached_blocks: int
    host_blocks: int
    stretches: tuple[Stretch, ...]
    missing: Missing | None = None
    leaving: Leaving | None = None


class FieldDifference(msgspec.Struct, frozen=True):
    """A field of the identity by its name, and both values as they may be shown."""

    name: str
    wanted: str
    has: str


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """A group, its identity as it may be shown, and in what it differs from what was asked for; `equal_fields` of those
    that were asked for are the same."""

    group: bytes
    model_name: str
    adapter_name: str
    fields: dict[str, str]
    differences: tuple[FieldDifference, ...]
    equal_fields: int
    block_tokens: int
    extents: int
    tokens: int
    last_used: float
    persistent: bool
    reachable: bool


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An acquire that is remembered. It got `tokens` of the `asked_tokens` of its whole blocks; `cached_tokens` were
    there, `host_tokens` of them in host memory, and `reason` says why it did not get these. `absence` is why the first
    token that was not cached was not, as it was known then. Times are the node's; `answered_at` 0: it still waits."""

    name: str
    grant: bytes
    group: bytes
    model_name: str
    asked_tokens: int
    cached_tokens: int
    host_tokens: int
    tokens: int
    nvme_tokens: int
    reason: str
    absence: str
    asked_at: float
    answered_at: float
    left: Left | None = None
    disk_tokens: int = 0


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """`namespaces`: those nearest to what was asked for, nearest first. `trace`: what the keys find, or those of the
    first of `asked`. `tokens`: packed ids of that one's first tokens, as far as extents in memory tell them."""

    namespaces: tuple[Namespace, ...] = ()
    trace: Trace | None = None
    asked: tuple[Asked, ...] = ()
    tokens: bytes = b""
    remembered: int = 0
    remembered_since: float = 0.0
