"""The last acquires, with what they asked and what they got, and the last blocks that were refused a slot.

For questions of an operator only: nothing is decided by them. Bounded, by bytes and by number; the oldest go first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Set
from dataclasses import dataclass

from tierkv.core.absence import Absence
from tierkv.core.explanation import Left
from tierkv.core.keys import KEY_BYTES
from tierkv.core.reasons import Reason

RECENT_BYTES = 16 * 2**20
"""What is kept of acquires, about: some 5,000 with prompts of 2,400 tokens, some 500 with prompts of 20,000."""

BLOCKS_BEHIND = 64
"""So many keys are kept behind what was cached: where a prompt leaves the cache, and a look at what followed."""

REFUSALS = 1_024
_RECORD_BYTES = 600  # of a record beside its keys and its name, about


@dataclass(slots=True, eq=False)
class RecentAcquire:
    """`keys` are the first of those asked for. `cached_blocks` were cached when it was asked, `host_blocks` of them in
    host memory; `blocks` were granted, fewer for `reason`. `absence` is why the first block that was not cached was
    not, as far as was known then (None where all were), and `left` what was remembered of it if it had been evicted.
    Times are the node's; `answered_at` 0: not yet, and the time of asking where it was ended before it was answered."""

    grant: bytes
    name: str
    session: bytes
    group: bytes
    keys: bytes
    asked_blocks: int
    cached_blocks: int
    host_blocks: int
    absence: Absence | None
    asked_at: float
    left: Left | None = None
    blocks: int = 0
    nvme_blocks: int = 0
    disk_blocks: int = 0
    reason: Reason | None = None
    answered_at: float = 0.0

    @property
    def is_answered(self) -> bool:
        return self.answered_at > 0.0

    @property
    def is_miss(self) -> bool:
        """It got less than it asked for."""
        return self.is_answered and self.blocks < self.asked_blocks

    def answer(self, blocks: int, nvme_blocks: int, reason: Reason | None, now: float, disk_blocks: int = 0) -> None:
        self.blocks, self.nvme_blocks, self.reason, self.answered_at = blocks, nvme_blocks, reason, now
        self.disk_blocks = disk_blocks

    @property
    def num_bytes(self) -> int:
        return _RECORD_BYTES + len(self.keys) + len(self.name)


class RecentAcquires:
    def __init__(self, capacity_bytes: int = RECENT_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._records: deque[RecentAcquire] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RecentAcquire]:
        """The latest first."""
        return reversed(self._records)

    def oldest(self) -> RecentAcquire | None:
        return self._records[0] if self._records else None

    def note(self, record: RecentAcquire) -> None:
        """Kept with no more keys than are needed to explain it."""
        kept = (record.cached_blocks + BLOCKS_BEHIND) * KEY_BYTES
        if len(record.keys) > 2 * kept:  # else the copy would cost more than it saves
            record.keys = record.keys[:kept]
        self._records.append(record)
        self.num_bytes += record.num_bytes
        while self.num_bytes > self.capacity_bytes:
            self.num_bytes -= self._records.popleft().num_bytes

    def forget(self, groups: Set[bytes]) -> None:
        """Nothing of these groups is remembered."""
        self._records = deque(record for record in self._records if record.group not in groups)
        self.num_bytes = sum(record.num_bytes for record in self._records)


@dataclass(frozen=True, slots=True)
class Refusal:
    """`blocks` of a prompt, from the one with the key on, were given no slot."""

    blocks: int
    reason: Reason
    at: float


class Refusals:
    def __init__(self, capacity: int = REFUSALS) -> None:
        self._capacity = capacity
        self._refusals: OrderedDict[tuple[bytes, bytes], Refusal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refusals)

    def note(self, group: bytes, key: bytes, refusal: Refusal) -> None:
        self._refusals[group, key] = refusal
        self._refusals.move_to_end((group, key))
        if len(self._refusals) > self._capacity:
            self._refusals.popitem(last=False)

    def find(self, group: bytes, key: bytes) -> Refusal | None:
        return self._refusals.get((group, key))

    def forget(self, groups: Set[bytes]) -> None:
        for place in [place for place in self._refusals if place[0] in groups]:
            del self._refusals[place]
