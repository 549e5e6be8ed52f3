"""What the scheduler's process tells its workers in one step, and what they tell it back. Plain values: they are
pickled by the engine on their way.

A *page* is the engine's own unit: the place of one block in one of its page groups (a model whose layers are all alike
has one page group). `pages` holds, for each page group, the page of each block in order; NO_PAGE where the engine keeps
none (a block outside of a sliding window).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tierkv.core.codec import KVShape
from tierkv.core.identity import Identity
from tierkv.core.instructions import ManifestEntry
from tierkv.core.reasons import Reason
from tierkv.wire.messages import LeasePart

NO_PAGE = -1

Pages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """All that is needed to open a group, whichever process does it. `kv_shape` where the layout names a codec."""

    identity: Identity
    model_name: str = ""
    adapter_name: str = ""
    manifest: tuple[ManifestEntry, ...] = ()
    kv_shape: KVShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPart:
    """A rank's part of a lease, and the session that was named as its holder."""

    token: bytes
    part: LeasePart


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadJob:
    """Copy the blocks [first_block, first_block + blocks) of a lease into `pages`. The lease covers the prompt from
    token 0; `group` numbers a GroupSpec that this plan or an earlier one has told. `keys` of its blocks, where they may
    be found to be damaged when they are decoded."""

    request: str
    group: int
    grant: bytes
    parts: Mapping[int, HeldPart]
    first_block: int
    pages: Pages
    keys: bytes = b""

    @property
    def blocks(self) -> int:
        return len(self.pages[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob:
    """Store the blocks [first_block, first_block + n) from `pages`. `keys` are packed and of all blocks from token 0;
    `tokens`, packed, those of the blocks from `first_block` on."""

    request: str
    group: int
    keys: bytes
    first_block: int
    tokens: bytes
    extras: Mapping[int, list[bytes]]
    pages: Pages

    @property
    def blocks(self) -> int:
        return len(self.pages[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SealJob:
    """The request is finished: nothing will be appended to these blocks."""

    group: int
    keys: bytes


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `groups` are those told for the first time, `dropped_groups` are used no more. `is_idle`: the engine
    computes nothing in it, so that a copy keeps nobody waiting. `broken_loads` are requests for whose load the engine
    waits though it could not be planned: workers say at once that it has failed. Most plans are empty, and one is made
    and pickled for every step: a Struct does both in a fraction of the time."""

    groups: Mapping[int, GroupSpec] = {}
    dropped_groups: tuple[int, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    broken_loads: tuple[str, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    seals: tuple[SealJob, ...] = ()
    is_idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The blocks [first_block, first_block + blocks) of a request are in the node, as far as this rank goes."""

    rank: int
    request: str
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStored:
    """Blocks of a request from `first_block` on were not stored. `reason` None: there was no time before the engine
    might have used the pages for something else; worth another try."""

    request: str
    first_block: int
    reason: Reason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What workers tell the scheduler's process. `tokens` are the sessions of the ranks, told when they have changed
    (empty bytes: the node is away)."""

    tokens: Mapping[int, bytes] = field(default_factory=dict)
    stored: tuple[Stored, ...] = ()
    not_stored: tuple[NotStored, ...] = ()
    failed_loads: frozenset[str] = frozenset()

    def merge(self, other: Report) -> Report:
        return Report(
            tokens={**self.tokens, **other.tokens},
            stored=self.stored + other.stored,
            not_stored=self.not_stored + other.not_stored,
            failed_loads=self.failed_loads | other.failed_loads,
        )
