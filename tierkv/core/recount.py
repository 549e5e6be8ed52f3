"""Recounting host memory: the slots of every extent against the sums of the books, and the arena's against their
owners.

In slices, while the cache goes on working: what changes about an extent that was counted is added, what changes about
one that was not is seen when its turn comes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.instructions import Difference
from tierkv.core.ledger import Ledger
from tierkv.core.wiping import Wiping

EXTENTS_AT_A_TIME = 10_000


class HostRecount:
    def __init__(self, ledger: Ledger, cascade: Cascade, wiping: Wiping) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self._wiping = wiping
        self._todo = deque(ledger.tree)
        self._waiting = set(self._todo)
        self._slots: Counter[bytes] = Counter()  # by group
        self.total = len(self._todo)
        ledger.on_host_change = self._changed

    @property
    def done(self) -> int:
        return self.total - len(self._todo)

    def step(self, now: float) -> list[Difference] | None:
        """Count a slice; what differs, when that was the last one."""
        for _ in range(min(EXTENTS_AT_A_TIME, len(self._todo))):
            extent = self._todo.popleft()
            self._waiting.discard(extent)
            if extent.in_tree:
                self._slots[extent.group] += sum(map(len, extent.slots))
        if self._todo:
            return None
        self.end()
        return [*self._groups(now), *self._arena(now)]

    @property
    def host_bytes(self) -> int:
        """Of the blocks that were counted."""
        groups = self._ledger.groups
        return sum(slots * groups[key].slot_bytes for key, slots in self._slots.items() if key in groups)

    def end(self) -> None:
        if self._ledger.on_host_change == self._changed:
            self._ledger.on_host_change = None

    def _changed(self, extent: Extent, slots: int) -> None:
        if extent not in self._waiting:
            self._slots[extent.group] += slots

    def _groups(self, now: float) -> Iterator[Difference]:
        for key, group in self._ledger.groups.items():
            if self._slots[key] != group.host_slots:
                yield Difference(
                    tier="host",
                    what="slots",
                    booked_bytes=group.host_slots * group.slot_bytes,
                    counted_bytes=self._slots[key] * group.slot_bytes,
                    found_at=now,
                    group=key.hex(),
                )

    def _arena(self, now: float) -> Iterator[Difference]:
        owned, counted = self._owned_bytes(), self._ledger.pool.count_used_bytes()
        if owned != counted:
            yield Difference(tier="host", what="slots", booked_bytes=owned, counted_bytes=counted, found_at=now)

    def _owned_bytes(self) -> int:
        """What the owners of slots have, all of them together."""
        ledger, groups = self._ledger, self._ledger.groups
        tickets = sum(len(one.offsets) * groups[one.group].slot_bytes for one in ledger.writers())
        staged = sum(len(one.slots) * groups[one.group].slot_bytes for one in ledger.staged.values())
        wiped = sum(wipe.num_bytes - sum(size for _, size in wipe.tails) for wipe in self._wiping.all())
        return self.host_bytes + tickets + staged + ledger.doomed_bytes + self._in_flight_bytes() + wiped

    def _in_flight_bytes(self) -> int:
        return self._cascade.reads.slot_bytes + self._cascade.devices.host_bytes
