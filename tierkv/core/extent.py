"""Extents: runs of consecutive blocks along one prefix, and where their bytes are.

    block   0 1 2 3 4 5 6 7        keys, parent: fixed for a block once it is visible
    host    # # # # # . . .        per rank, a length: len(slots)
    nvme    # # # # # # # #        a file per rank, whole or not there

Invariant: each block has a usable copy in every rank: the file is PRESENT, or every rank's host length is the extent's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason
from tierkv.core.residency import NvmeEvent, NvmeState, next_state
from tierkv.core.value.kinds import kind_of_used

HALF_LIFE_SECONDS = 300.0
"""Of `heat`: uses, each counting half as much after so long."""

_NO_EXTRAS: Mapping[int, list[bytes]] = {}


class Branch:
    """The place behind one block where extents begin: who owns that block, and who hangs there."""

    __slots__ = ("host_kids", "index", "kids", "owner")

    def __init__(self) -> None:
        self.owner: Extent | None = None
        self.index = -1  # of the block within the owner
        self.kids: set[Extent] = set()
        self.host_kids = 0  # how many of them have blocks in host memory


class Doomed:
    """Slots of blocks that are gone from the tree while somebody may still touch them."""

    __slots__ = ("slots", "waits_for", "wipe")

    def __init__(self, slots: list[int], waits_for: set[Hashable]) -> None:
        self.slots = slots
        self.waits_for = waits_for
        self.wipe = False  # a purge may mean what is in them


class Extent:
    """`keys` are packed; `slots[rank]` are the host copies, from the first block on.

    Two segments of use: blocks [0, hot_blocks) were last used at `last_used` and have `hits` and `kind`; the cold tail
    behind them has its own.
    """

    __slots__ = (
        "above",
        "branch_points",
        "condemned",
        "created",
        "cut_at",
        "doomed",
        "extras",
        "first_token",
        "group",
        "heat",
        "hits",
        "holds",
        "hot_blocks",
        "in_tree",
        "is_stray",
        "key",
        "keys",
        "kind",
        "last_append",
        "last_used",
        "longest_gap",
        "lost",
        "num_blocks",
        "nvme",
        "nvme_bytes",
        "ops",
        "parent",
        "purged",
        "ranks_found",
        "reading",
        "sealed",
        "slots",
        "tail_hits",
        "tail_kind",
        "tail_used",
        "tokens",
        "why_not_there",
    )

    def __init__(
        self, *, group: bytes, key: bytes, parent: bytes, first_token: int, ranks: int, created: float
    ) -> None:
        self.group = group
        self.key = key
        self.parent = parent
        self.first_token = first_token
        self.keys = b""
        self.num_blocks = 0
        self.tokens: bytes | None = b""  # None: only in the file's header
        self.extras: Mapping[int, list[bytes]] = _NO_EXTRAS
        self.sealed = False
        self.in_tree = False
        self.condemned = False  # its file must go as soon as the operations on it end
        self.purged = False  # its slots are wiped before anybody else gets them
        self.lost: Reason | None = None  # why its file is to go, once the reads of the other ranks have ended
        self.is_stray = False  # a worker that died may have left a file of it
        self.why_not_there: Reason | None = None  # on NVMe: why its last write did not happen, or its file went
        self.slots: list[list[int]] = [[] for _ in range(ranks)]
        self.nvme = NvmeState.ABSENT
        self.nvme_bytes = 0  # of all ranks, counted from WRITING until ABSENT
        self.ranks_found = 0  # at recovery: bit n for rank n
        self.ops: tuple[int, ...] = ()  # writes or removes in flight
        self.reading: dict[int, int] = {}  # rank -> op of the read that fills its slots
        self.holds: dict[Hashable, int] = {}  # who -> how many blocks from the first must stay
        self.doomed: list[Doomed] = []
        self.cut_at = b""  # key of the first block that was cut off, as long as none is in its place
        self.above: Branch | None = None
        self.branch_points: dict[int, Branch] = {}
        self.created = created
        self.last_used = created
        self.tail_used = created
        self.hot_blocks = 0
        self.hits = 0
        self.kind = 0  # core/value/kinds.py
        self.heat = 1.0
        self.tail_hits = 0
        self.tail_kind = 0
        self.last_append = created
        self.longest_gap = 0.0

    def __repr__(self) -> str:
        host = "/".join(str(len(slots)) for slots in self.slots)
        return (
            f"<extent {self.key[:4].hex()} at token {self.first_token}: {self.num_blocks} blocks, "
            f"{'sealed' if self.sealed else 'growing'}, host {host}, nvme {self.nvme}, holds {len(self.holds)}>"
        )

    def block_key(self, index: int) -> bytes:
        return self.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    @property
    def host_blocks(self) -> int:
        """Blocks in host memory in every rank."""
        return min(map(len, self.slots))

    @property
    def longest_host_blocks(self) -> int:
        """Blocks in host memory in some rank."""
        return max(map(len, self.slots))

    @property
    def held_blocks(self) -> int:
        return max(self.holds.values(), default=0)

    @property
    def is_orphan(self) -> bool:
        return self.parent != self.group and (self.above is None or self.above.owner is None)

    def end_op(self, op: int) -> None:
        self.ops = tuple(other for other in self.ops if other != op)

    def move(self, event: NvmeEvent) -> None:
        self.nvme = next_state(self.nvme, event, self)

    def used_at(self, index: int) -> float:
        """When block `index` was last used."""
        return self.last_used if index < self.hot_blocks else self.tail_used

    def hits_at(self, index: int) -> int:
        return self.hits if index < self.hot_blocks else self.tail_hits

    def kind_at(self, index: int) -> int:
        return self.kind if index < self.hot_blocks else self.tail_kind

    def heat_at(self, index: int) -> float:
        return self.heat if index < self.hot_blocks else 1.0

    def touch(self, blocks: int, now: float) -> None:
        """A hit that reached `blocks` blocks deep."""
        if blocks < self.hot_blocks:
            self.tail_used, self.tail_hits, self.tail_kind = self.last_used, self.hits, self.kind
        gap = max(0.0, now - self.last_used)
        self.hot_blocks = blocks
        self.last_used = now
        self.hits += 1
        self.kind = kind_of_used(self.hits, gap)
        self.heat = 1 + self.heat * 2 ** (-gap / HALF_LIFE_SECONDS)
        if blocks >= self.num_blocks:
            self.tail_used, self.tail_hits, self.tail_kind = now, self.hits, self.kind

    def use_segments(self, hot_blocks: int, hits: int, kind: int, tail_hits: int, tail_kind: int, now: float) -> None:
        """Both segments are in use now, and it is no hit."""
        self.hot_blocks = hot_blocks
        self.hits, self.kind = hits, kind
        self.tail_hits, self.tail_kind = tail_hits, tail_kind
        self.last_used = self.tail_used = now
