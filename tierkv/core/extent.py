"""Extents: runs of consecutive blocks along one prefix, and where their bytes are.

    block   0 1 2 3 4 5 6 7        keys, parent: fixed for a block once it is visible
    host    # # # # # . . .        per rank, a length: len(slots)
    nvme    # # # # # # # #        a file per rank, whole or not there
    disk    # # # # # # # # # #    a file per rank, whole or not there; it may go on behind what is known here

Invariant: each block has a usable copy in every rank: a file is PRESENT, or the host length of the rank is the
extent's, or that on some device is, of which core/device_books.py keeps the books.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType

from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState, next_state
from tierkv.core.value.kinds import kind_of_used
from tierkv.core.value.tuning import Tuning

# There may be a million extents, most of them at rest: what they have none of they share.
_NO_EXTRAS: Mapping[int, list[bytes]] = MappingProxyType({})
_NO_HOLDS: Mapping[Hashable, int] = MappingProxyType({})
_NO_READS: Mapping[int, int] = MappingProxyType({})
_NO_SLOTS: dict[int, tuple[tuple[int, ...], ...]] = {}  # by the number of ranks


class Branch:
    """The place behind one block where extents begin: who owns that block, and who hangs there."""

    __slots__ = ("_kids", "disk_kids", "host_kids", "index", "nvme_kids", "owner")

    def __init__(self) -> None:
        self.owner: Extent | None = None
        self.index = -1  # of the block within the owner
        self._kids: Extent | set[Extent] | None = None  # one, as a rule, and thousands behind a system prompt
        self.host_kids = 0  # how many of them have blocks in host memory
        self.nvme_kids = 0  # a file on NVMe
        self.disk_kids = 0  # a file in the disk tier

    @property
    def kids(self) -> Collection[Extent]:
        if self._kids is None:
            return ()
        return self._kids if isinstance(self._kids, set) else (self._kids,)

    def add(self, kid: Extent) -> None:
        if self._kids is None or self._kids is kid:
            self._kids = kid
        elif isinstance(self._kids, set):
            self._kids.add(kid)
        else:
            self._kids = {self._kids, kid}

    def count(self, kid: Extent, sign: int) -> None:
        """It comes (+1) or goes (-1) with what it has in each tier."""
        self.host_kids += sign * (kid.longest_host_blocks > 0)
        self.nvme_kids += sign * (kid.nvme is FileState.PRESENT)
        self.disk_kids += sign * (kid.disk is FileState.PRESENT)

    def remove(self, kid: Extent) -> None:
        if isinstance(self._kids, set):
            self._kids.discard(kid)
            if len(self._kids) == 1:
                (self._kids,) = self._kids
        elif self._kids is kid:
            self._kids = None


class Growth:
    """What matters of an extent only as long as it grows: when it last did, and the longest it ever paused."""

    __slots__ = ("last_append", "longest_gap")

    def __init__(self, began: float) -> None:
        self.last_append = began
        self.longest_gap = 0.0

    def appended(self, now: float) -> None:
        self.longest_gap = max(self.longest_gap, now - self.last_append)
        self.last_append = now


class Doomed:
    """Slots of blocks that are gone from the tree while somebody may still touch them."""

    __slots__ = ("slots", "waits_for", "wipe")

    def __init__(self, slots: list[int], waits_for: set[Hashable]) -> None:
        self.slots = slots
        self.waits_for = waits_for
        self.wipe = False  # a purge may mean what is in them


class Extent:
    """`keys` are packed; `slots[rank]` are the host copies, from the first block on.

    Two segments of use: blocks [0, hot_blocks) were last used at `last_used` and have `hits`, `misses` and `kind`; the
    cold tail behind them has its own. `hits` are leases that found them, `misses` uses while no tier had them.
    """

    __slots__ = (
        "_branches",
        "above",
        "created",
        "disk",
        "disk_bytes",
        "doomed",
        "extras",
        "first_token",
        "group",
        "hits",
        "holds",
        "hot_blocks",
        "in_tree",
        "key",
        "keys",
        "kind",
        "last_used",
        "misses",
        "num_blocks",
        "nvme",
        "nvme_bytes",
        "parent",
        "purged",
        "reading",
        "sealed",
        "slots",
        "tail_hits",
        "tail_kind",
        "tail_misses",
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
        self.purged = False  # its slots are wiped before anybody else gets them
        self.why_not_there: Reason | None = None  # on NVMe: why its last write did not happen, or its file went
        self.slots: Sequence[Sequence[int]] = _no_slots(ranks)
        self.nvme = FileState.ABSENT
        self.nvme_bytes = 0  # of all ranks, counted from WRITING until ABSENT
        self.disk = FileState.ABSENT
        self.disk_bytes = 0
        self.reading: Mapping[int, int] = _NO_READS  # rank -> op of the read that fills its slots
        self.holds: Mapping[Hashable, int] = _NO_HOLDS  # who -> how many blocks from the first must stay
        self.doomed: tuple[Doomed, ...] = ()
        self.above: Branch | None = None
        self._branches: Branch | tuple[Branch, ...] = ()
        self.created = created
        self.last_used = created
        self.tail_used = created
        self.hot_blocks = 0
        self.hits = 0
        self.misses = 0
        self.kind = 0  # core/value/kinds.py
        self.tail_hits = 0
        self.tail_misses = 0
        self.tail_kind = 0

    def __repr__(self) -> str:
        host = "/".join(str(len(slots)) for slots in self.slots)
        return (
            f"<extent {self.key[:4].hex()} at token {self.first_token}: {self.num_blocks} blocks, "
            f"{'sealed' if self.sealed else 'growing'}, host {host}, nvme {self.nvme}, disk {self.disk}, "
            f"holds {len(self.holds)}>"
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

    def hold(self, who: Hashable, blocks: int) -> None:
        if isinstance(self.holds, dict):
            self.holds[who] = blocks
        else:
            self.holds = {who: blocks}

    def unhold(self, who: Hashable) -> bool:
        """Whether it was held by `who`."""
        if not isinstance(self.holds, dict) or self.holds.pop(who, None) is None:
            return False
        self.holds = self.holds or _NO_HOLDS
        return True

    def begin_read(self, rank: int, op: int) -> None:
        self.reading = {**self.reading, rank: op}

    def end_read(self, rank: int) -> None:
        self.reading = {other: op for other, op in self.reading.items() if other != rank} or _NO_READS

    def append_slots(self, rank: int, slots: Iterable[int]) -> None:
        self.slots = tuple((*own, *slots) if rank == at else own for at, own in enumerate(self.slots))

    def cut_slots(self, rank: int, num_blocks: int) -> None:
        left = tuple(own[:num_blocks] if rank == at else own for at, own in enumerate(self.slots))
        self.slots = left if any(left) else _no_slots(len(left))

    @property
    def branch_points(self) -> tuple[Branch, ...]:
        """In no order; each knows behind which block it is."""
        return self._branches if isinstance(self._branches, tuple) else (self._branches,)

    def add_branch(self, branch: Branch) -> None:
        self._branches = (*self.branch_points, branch) if self._branches else branch

    def remove_branch(self, branch: Branch) -> None:
        left = tuple(other for other in self.branch_points if other is not branch)
        self._branches = left[0] if len(left) == 1 else left

    def branch_at(self, index: int) -> Branch | None:
        """What hangs behind block `index`."""
        return next((branch for branch in self.branch_points if branch.index == index), None)

    @property
    def has_file(self) -> bool:
        """In some tier, all of its blocks are in files."""
        return self.nvme is FileState.PRESENT or self.disk is FileState.PRESENT

    @property
    def has_kids(self) -> bool:
        return any(branch.kids for branch in self.branch_points)

    def move(self, event: FileEvent) -> None:
        """Its file on NVMe."""
        before, self.nvme = self.nvme, next_state(self.nvme, event, self)
        if self.above is not None:
            self.above.nvme_kids += (self.nvme is FileState.PRESENT) - (before is FileState.PRESENT)

    def move_on_disk(self, event: FileEvent) -> None:
        before, self.disk = self.disk, next_state(self.disk, event, self)
        if self.above is not None:
            self.above.disk_kids += (self.disk is FileState.PRESENT) - (before is FileState.PRESENT)

    def used_at(self, index: int) -> float:
        """When block `index` was last used."""
        return self.last_used if index < self.hot_blocks else self.tail_used

    def hits_at(self, index: int) -> int:
        return self.hits if index < self.hot_blocks else self.tail_hits

    def misses_at(self, index: int) -> int:
        return self.misses if index < self.hot_blocks else self.tail_misses

    @property
    def uses(self) -> int:
        """Since its first blocks were new: hits, and what would have been one."""
        return self.hits + self.misses

    def uses_at(self, index: int) -> int:
        return self.hits_at(index) + self.misses_at(index)

    def kind_at(self, index: int) -> int:
        return self.kind if index < self.hot_blocks else self.tail_kind

    def touch(self, blocks: int, now: float, tuning: Tuning) -> None:
        """A hit that reached `blocks` blocks deep."""
        if blocks < self.hot_blocks:
            self._join_tail()
        gap = max(0.0, now - self.last_used)
        self.hot_blocks = blocks
        self.last_used = now
        self.hits += 1
        self.kind = kind_of_used(self.uses, gap, tuning)
        if blocks >= self.num_blocks:
            self._join_tail()

    def _join_tail(self) -> None:
        """The tail has the history of the head."""
        self.tail_used, self.tail_kind = self.last_used, self.kind
        self.tail_hits, self.tail_misses = self.hits, self.misses


def _no_slots(ranks: int) -> tuple[tuple[int, ...], ...]:
    return _NO_SLOTS.setdefault(ranks, ((),) * ranks)
