"""What a warm-up brings, and in which order: what saves most prefill for the memory and the time it takes comes first,
each extent behind its ancestors.

Made in slices, for there may be a million extents and requests are answered in between. Of what is looked through only
as much is kept as fits the budget.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from blake3 import blake3

from tierkv.core.extent import Extent
from tierkv.core.ledger import Group, Ledger
from tierkv.core.value.cost import prefill_seconds

SLICE = 512
"""Extents looked at in one step: about a millisecond."""

TENANT_DIGITS = 8
"""Of the digest of a salt: as many as `Usage` shows."""

_AGE_SECONDS = 60.0  # uses less than this apart are told apart by how often, not by when
_AGEING = 1.5  # 1 to 2 save about as much; less brings back sessions of agents that are over


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupScope:
    """What is asked for. `budget_bytes` 0: as much as memory takes. `fingerprint`: of the weights, or how it begins.
    `tenant`: a salt, or the first digits of its digest; "" is who has none, None everybody. `used_since`: a time."""

    budget_bytes: int = 0
    fingerprint: str = ""
    tenant: str | None = None
    used_since: float = 0.0

    def holds(self, group: Group) -> bool:
        identity = group.spec.identity
        return identity.weights.startswith(self.fingerprint) and self._is_of_tenant(identity.salt)

    def _is_of_tenant(self, salt: str) -> bool:
        if self.tenant is None or self.tenant == salt:
            return True
        return bool(salt and self.tenant) and blake3(salt.encode()).hexdigest()[:TENANT_DIGITS] == self.tenant


def worth(extent: Extent, group: Group, latest: float, tokens_per_second: float) -> float:
    """What a byte of it is expected to save, to be compared with others': (1 + hits) / (a minute + age)^1.5, times the
    seconds that computing its tokens at their depth takes. The age counts from `latest`, the last use of anything:
    while a node is off nobody could use anything."""
    tokens = extent.num_blocks * group.block_tokens
    seconds = prefill_seconds(tokens, extent.first_token, tokens_per_second)
    aged = math.pow(_AGE_SECONDS + max(0.0, latest - extent.last_used), _AGEING)
    return (1 + extent.hits) / aged * seconds / host_bytes_of(extent, group)


def host_bytes_of(extent: Extent, group: Group) -> int:
    """When all of it is in host memory."""
    return extent.num_blocks * group.ranks * group.slot_bytes


class WarmupPlan:
    """`step` until it no longer `is_busy`; then `take` one extent after the other."""

    def __init__(
        self,
        ledger: Ledger,
        scope: WarmupScope,
        budget_bytes: int,
        slowness: Callable[[Extent], float] = lambda extent: 1.0,
    ) -> None:
        """`slowness(extent)`: how much longer a byte of it takes to read than one on NVMe."""
        self._slowness = slowness
        self._ledger = ledger
        self._scope = scope
        self._budget_bytes = budget_bytes
        self._groups = {key for key, group in ledger.groups.items() if scope.holds(group)}
        self._latest = max((ledger.groups[key].last_used for key in self._groups), default=0.0)
        self._to_look_at: Iterator[Extent] | None = iter(list(ledger.tree)) if self._groups else None
        self._best: list[tuple[float, int, int, Extent, int]] = []  # a heap, the least worth first; and bytes
        self._ranked: list[Extent] = []  # the most worth last
        self.looked_at = 0
        self._placed: set[Extent] = set()
        self._next: deque[Extent] = deque()
        self.extents = 0
        """That are wanted, whether they fit or not."""
        self.num_bytes = 0
        """Of those that are kept."""
        self.has_more = False
        """Some were left out, as they would not fit the budget beside what is worth more."""

    @property
    def is_busy(self) -> bool:
        return self._to_look_at is not None or bool(self._best)

    @property
    def has_left(self) -> bool:
        """Something may be taken."""
        return bool(self._next or self._ranked)

    def step(self) -> None:
        """A slice of the work that is to be done before anything can be taken."""
        if self._to_look_at is None:
            for _ in range(min(SLICE, len(self._best))):
                self._ranked.append(heapq.heappop(self._best)[3])
            return
        before = self.looked_at
        for extent in islice(self._to_look_at, SLICE):
            self.looked_at += 1
            if self._is_wanted(extent):
                self._keep(extent)
        if self.looked_at - before < SLICE:
            self._to_look_at = None

    def take(self) -> Extent | None:
        """The next extent, after those that it hangs on; None when there is no more. Its file may be gone by now."""
        while not self._next and self._ranked:
            self._place(self._ranked.pop())
        return self._next.popleft() if self._next else None

    def _is_wanted(self, extent: Extent) -> bool:
        return (
            extent.in_tree
            and extent.has_file
            and extent.group in self._groups
            and extent.last_used >= self._scope.used_since
        )

    def _keep(self, extent: Extent) -> None:
        group = self._ledger.group_of(extent)
        size = host_bytes_of(extent, group)
        self.extents += 1
        self.num_bytes += size
        rank = (
            worth(extent, group, self._latest, self._ledger.prefill_rate(group)) / self._slowness(extent),
            -extent.first_token,
            -self.extents,
        )
        heapq.heappush(self._best, (*rank, extent, size))
        while self.num_bytes - self._best[0][4] >= self._budget_bytes:
            self.num_bytes -= heapq.heappop(self._best)[4]
            self.has_more = True

    def _place(self, extent: Extent) -> None:
        """It and those of its ancestors that were not placed before. Of an orphan nothing can be hit."""
        path = []
        while extent not in self._placed:
            path.append(extent)
            if extent.above is None or extent.above.owner is None:
                break
            extent = extent.above.owner
        if path and path[-1].is_orphan:
            self.extents -= 1
            return
        for step in reversed(path):
            if not step.has_file and step is not path[0]:
                continue  # only in memory
            self._placed.add(step)
            self._next.append(step)
            is_needed_only = step is not path[0] and not self._is_wanted(step)  # older than what was asked for
            if is_needed_only:
                self.extents += 1
                self.num_bytes += host_bytes_of(step, self._ledger.group_of(step))
