"""Shares of the tiers, by model and by tenant: who may keep how much when others want it too.

    llama uses 55 % and has 40, acme uses 5 % and has 20: 15 are borrowed
    room is needed: victims come from llama until it is down to 40; then, and where nobody is beyond a share, from all

A layer around the orders of eviction: one of the policy's orders for each share, and the choice among them. A share
that is exceeded makes what is in it rank like orphans, before all that is within a share; among those the policy
decides. So whoever uses less than its share has it back from those who borrowed it, a victim at a time, and nothing is
moved for it. What somebody is asking for counts as used already: who would pass its share gives up of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tierkv.core.extent import Extent
from tierkv.core.ghosts import Ghost
from tierkv.core.grants import GroupSpec
from tierkv.core.tenancy import TenantName
from tierkv.core.value.order import EvictionOrder, Rank

MODEL, TENANT = "model:", "tenant:"
REST = "rest"

HEX = frozenset("0123456789abcdef")
MIN_DIGITS = 6


@dataclass(slots=True, eq=False)
class Share:
    """What groups of one name use in all, kept as it changes, and which part of a tier is theirs. In host memory what
    their tickets hold counts too, of files what is being written; what is on its way out does not."""

    name: str
    part: float
    host_bytes: int = 0
    nvme_bytes: int = 0
    disk_bytes: int = 0
    host_asked: int = 0  # just now
    nvme_asked: int = 0
    disk_asked: int = 0

    def is_exceeded(self, tier: str, capacity_bytes: int) -> bool:
        if tier == "host":
            used = self.host_bytes + self.host_asked
        else:
            used = self.nvme_bytes + self.nvme_asked if tier == "nvme" else self.disk_bytes + self.disk_asked
        return used > self.part * capacity_bytes

    @contextmanager
    def asking(self, *, host_bytes: int = 0, nvme_bytes: int = 0, disk_bytes: int = 0) -> Iterator[None]:
        """While room is made for so many bytes more."""
        self.host_asked, self.nvme_asked, self.disk_asked = host_bytes, nvme_bytes, disk_bytes
        try:
            yield
        finally:
            self.host_asked = self.nvme_asked = self.disk_asked = 0


@dataclass(frozen=True, slots=True)
class ShareName:
    """A model, by name or 6 or more digits of its fingerprint ("model:llama"), or a TenantName ("tenant:acme"). Raises
    ValueError that says what to write."""

    text: str

    def __post_init__(self) -> None:
        if self.text.startswith(TENANT):
            TenantName(self.text.removeprefix(TENANT))
        elif not self.text.startswith(MODEL) or self.text == MODEL:
            raise ValueError(f"{self.text!r} is neither a model nor a tenant; write model:llama or tenant:acme")

    def covers(self, spec: GroupSpec) -> bool:
        if self.text.startswith(TENANT):
            return TenantName(self.text.removeprefix(TENANT)).covers(spec.identity.salt)
        name = self.text.removeprefix(MODEL)
        is_digits = len(name) >= MIN_DIGITS and HEX.issuperset(name)
        return spec.model_name == name or (is_digits and spec.identity.weights.startswith(name))


class Shares:
    """`rules` are names and parts of the whole; of several that cover a group the first counts."""

    def __init__(self, rules: Iterable[tuple[str, float]]) -> None:
        self._named = [(ShareName(name), Share(name, part)) for name, part in rules]
        self.rest = Share(REST, max(0.0, 1.0 - sum(share.part for _, share in self._named)))

    @property
    def all(self) -> list[Share]:
        """As they are set, the rest last."""
        return [*(share for _, share in self._named), self.rest]

    @property
    def is_set(self) -> bool:
        return bool(self._named)

    def of(self, spec: GroupSpec) -> Share:
        return next((share for name, share in self._named if name.covers(spec)), self.rest)


_Known = tuple[tuple[float, list[EvictionOrder]], tuple[Rank, EvictionOrder] | None]
"""When, and with which orders of exceeded shares, what was found to go first."""


class SharedOrder:
    """An EvictionOrder that has one of its own for each share. `capacity` tells how large the tier is now."""

    def __init__(
        self,
        tier: str,
        capacity: Callable[[], int],
        share_of: Callable[[bytes], Share],
        make: Callable[[], EvictionOrder],
    ) -> None:
        self._tier = tier
        self._capacity = capacity
        self._share_of = share_of  # of a group
        self._make = make
        self._orders: dict[Share, EvictionOrder] = {}
        self._new = make()  # knows what new blocks are worth, and holds nothing
        self._known: _Known | None = None  # what was found last: it is asked for several times before it is taken

    def _order(self, share: Share) -> EvictionOrder:
        order = self._orders.get(share)
        if order is None:
            order = self._orders[share] = self._make()
        return order

    def _of(self, extent: Extent) -> EvictionOrder:
        return self._order(self._share_of(extent.group))

    def _is_within(self, share: Share) -> bool:
        return not share.is_exceeded(self._tier, self._capacity())

    def _first(self, now: float) -> tuple[Rank, EvictionOrder] | None:
        """The order that holds the next victim, and how that ranks among all: of an exceeded share, if there is one
        with anything to give. So the others are not even looked at as long as somebody has borrowed."""
        exceeded = [order for share, order in self._orders.items() if not self._is_within(share)]
        if self._known is None or self._known[0] != (now, exceeded):
            self._known = (now, exceeded), self._find_first(exceeded, now)
        return self._known[1]

    def _find_first(self, exceeded: list[EvictionOrder], now: float) -> tuple[Rank, EvictionOrder] | None:
        for orders in (exceeded, self._orders.values()):
            found: tuple[Rank, EvictionOrder] | None = None
            for order in orders:
                rank = order.cheapest(now)
                if rank is not None and (found is None or rank < found[0]):
                    found = rank, order
            if found is not None:
                stays, value = found[0]
                return (stays and orders is not exceeded, value), found[1]
        return None

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._of(extent)

    def offer(self, extent: Extent, index: int) -> None:
        self._known = None
        self._of(extent).offer(extent, index)

    def withdraw(self, extent: Extent) -> None:
        self._known = None
        self._of(extent).withdraw(extent)

    def next_victim(self, now: float) -> Extent | None:
        found = self._first(now)
        return None if found is None else found[1].next_victim(now)

    def pop(self, now: float) -> Extent | None:
        found, self._known = self._first(now), None
        return None if found is None else found[1].pop(now)

    def cheapest(self, now: float) -> Rank | None:
        found = self._first(now)
        return None if found is None else found[0]

    def rank(self, extent: Extent, index: int, now: float) -> Rank:
        share = self._share_of(extent.group)
        stays, value = self._order(share).rank(extent, index, now)
        return stays and self._is_within(share), value

    def rank_of_new(self, kind: int, worth: float) -> Rank | None:
        return self._new.rank_of_new(kind, worth)

    def value(self, extent: Extent, index: int, now: float) -> float:
        return self._of(extent).value(extent, index, now)

    def regretted(self, ghost: Ghost) -> None:
        self._known = None
        self._order(self._share_of(ghost.group)).regretted(ghost)

    def repriced(self) -> None:
        self._known = None
        for order in (*self._orders.values(), self._new):
            order.repriced()
