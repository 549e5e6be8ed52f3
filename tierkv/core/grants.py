"""Leases and tickets, and the answers and notices of the core.

    ticket   the right to write given slots   ends with commit, abort, or the proven end of its holder
    lease    the right to read given slots    ends with release (of each rank), or the proven end of its holders

Grant ids are chosen by the client. An id lives once: what ended is remembered, so that a repeated or late message
finds the same answer, and an abort or release that overtakes its grant still counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.core.extent import Extent
from tierkv.core.identity import Identity
from tierkv.core.instructions import ManifestEntry
from tierkv.core.reasons import Reason
from tierkv.core.recent import RecentAcquire

# ---- what the core is told


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """A group as an engine (or identity.json on disk) declares it. Names and manifest are for people."""

    group: bytes
    identity: Identity
    model_name: str = ""
    adapter_name: str = ""
    manifest: tuple[ManifestEntry, ...] = ()
    persistent: bool = True


# ---- answers


@dataclass(frozen=True, slots=True)
class Match:
    """`blocks` from token 0 without a hole in every rank, the first `host_blocks` of them in host memory."""

    blocks: int
    host_blocks: int


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's slots, one for each block of the lease, and their generations when it was granted."""

    rank: int
    offsets: list[int]
    generations: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`blocks` from token 0 may be read until release. Some of them, behind those that were in host memory, were
    promoted for it: `nvme_blocks` from NVMe, `disk_blocks` from the disk tier. `device_blocks` of the first part's are
    in a device's pool."""

    grant: bytes
    blocks: int
    nvme_blocks: int
    cached_blocks: int
    parts: tuple[Part, ...]
    reason: Reason | None = None
    disk_blocks: int = 0
    device_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer comes later, as a notice with the same id, at the request's deadline at the latest."""


@dataclass(frozen=True, slots=True)
class Refused:
    reason: Reason


GRANTED, PRESENT, PENDING, NO_ROOM = 0, 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """`states` holds GRANTED, PRESENT, PENDING or NO_ROOM for each block asked for; `offsets` and `generations` one
    entry for each GRANTED one. With none granted there is no ticket to end."""

    grant: bytes
    states: bytes
    offsets: list[int]
    generations: list[int]
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """Blocks of this ticket that can be matched now, and those that wait for a predecessor or for other ranks."""

    visible: int
    staged: int


@dataclass(frozen=True, slots=True)
class SealAnswer:
    blocks: int
    flushed_blocks: int
    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class Dirty:
    """What would be lost if the node went away now: extents and bytes not yet flushed that are meant to be."""

    extents: int
    num_bytes: int


# ---- notices


@dataclass(frozen=True, slots=True)
class LeaseReady:
    grant: bytes
    lease: Lease


@dataclass(frozen=True, slots=True)
class SealReady:
    seal_id: int
    answer: SealAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """Blocks of an extent left a tier; `to` is the tier where they still are, or "dropped".

    `key` and `first_token` are of the first block that went; `created` is of its extent; `hits` are leases that found
    it. A file of which the first blocks are in memory is told in two parts: a block is "dropped" once, with the last
    tier that had it. `value` is what the order in force ranked it by: seconds saved per byte and second, 0.0 where it
    ranks by something else."""

    group: bytes
    key: bytes
    tier: str
    to: str
    blocks: int
    num_bytes: int
    reason: Reason
    first_token: int
    tokens: int
    created: float
    last_used: float
    hits: int
    value: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A write to NVMe that will not happen; the blocks stay in host memory for as long as they are not evicted."""

    group: bytes
    key: bytes
    blocks: int
    num_bytes: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverHit:
    """A group has been written to NVMe many times over, and no lease ever found anything of it: told once a group."""

    group: bytes
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regretted:
    """An acquire asked for blocks that were cached once and are in no tier any more: what it has to compute again, in
    tokens and in seconds of prefill. `key` is the first of them, `tier` the last that had them."""

    group: bytes
    key: bytes
    tier: str
    blocks: int
    tokens: int
    seconds: float
    evicted_at: float
    reason: Reason


Notice = LeaseReady | SealReady | Evicted | Dropped | NeverHit | Regretted


# ---- what the core remembers of live grants


@dataclass(slots=True, kw_only=True, eq=False)
class TicketState:
    grant: bytes
    session: bytes
    holder: bytes
    group: bytes
    rank: int
    keys: bytes  # the chain from token 0
    first: int
    tokens: bytes  # of blocks [first, end)
    extras: Mapping[int, Sequence[bytes]]
    blocks: list[int]  # indices of the granted blocks in the chain
    block_keys: list[bytes]  # theirs
    offsets: list[int]
    suffix_tokens: int  # of the prompt, behind what was cached and has been hit
    path: list[Extent]  # extents held so that the prefix stays while its continuation is written
    answer: Reservation
    device: int = -1  # whose pool some of its slots' twins are in; -1: none
    is_device_lost: bool = False  # that pool is no more: its commit is refused
    seals: bool = False  # what it makes visible is to be sealed: that was asked for while it landed
    purged: bool = False  # its commit is refused, its slots are wiped
    unclean: bool = False  # what was purged may lie in its slots until they are written to

    def is_asked_by(self, session: bytes, group: bytes, rank: int, keys: bytes, first: int) -> bool:
        """Whether this is the request that the ticket was made for, come again."""
        return (self.session, self.group, self.rank, self.keys, self.first) == (session, group, rank, keys, first)


@dataclass(slots=True, eq=False)
class Segment:
    """A stretch of a prompt that lies in one extent: blocks [start, start + blocks) are its first `blocks`."""

    extent: Extent
    start: int
    blocks: int


def reused_blocks(path: list[Segment]) -> int:
    """Up to where blocks of the path have ever been used again."""
    for segment in reversed(path):
        extent = segment.extent
        if (extent.tail_hits or extent.tail_misses) and segment.blocks > extent.hot_blocks:
            return segment.start + segment.blocks
        if extent.uses:
            return segment.start + min(segment.blocks, extent.hot_blocks)
    return 0


def path_blocks(path: list[Segment]) -> int:
    return path[-1].start + path[-1].blocks if path else 0


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseState:
    grant: bytes
    session: bytes
    group: bytes
    keys: bytes
    holders: dict[int, bytes]  # rank -> session, of the parts not yet ended
    parties: frozenset[bytes]  # sessions that it concerns: the asker, and whoever has held a part
    ranks: tuple[int, ...]
    path: list[Segment]
    asked_blocks: int
    cached_blocks: int
    host_blocks: int  # resident when it was asked for
    from_disk: tuple[tuple[int, int], ...]  # blocks that only the disk tier had then: first, end
    from_device: tuple[tuple[int, int], ...]  # and those that were in no file: those not in host memory, on a device
    deadline: float
    revocable: bool
    on_device: bool  # of the device that a holder has mapped it gets what is there
    record: RecentAcquire  # what is remembered of it, to be told the answer
    granted_at: float = 0.0
    shortened: Reason | None = None
    problem: Reason | None = None  # the first that a read for it met: another rank's read may still be under way then
    answer: Lease | None = None  # None while promotions run

    def is_asked_by(self, session: bytes, group: bytes, keys: bytes) -> bool:
        """Whether this is the request that the lease was made for, come again."""
        return (self.session, self.group, self.keys) == (session, group, keys)


@dataclass(slots=True)
class EndedGrants:
    """Ids that are over, with the answer that a repeated message gets. Bounded: the oldest are forgotten."""

    capacity: int = 65_536
    _answers: OrderedDict[bytes, Committed | Refused] = field(default_factory=OrderedDict)

    def remember(self, grant: bytes, answer: Committed | Refused) -> None:
        self._answers[grant] = answer
        self._answers.move_to_end(grant)
        if len(self._answers) > self.capacity:
            self._answers.popitem(last=False)

    def get(self, grant: bytes) -> Committed | Refused | None:
        return self._answers.get(grant)
