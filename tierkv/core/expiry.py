"""Retention: what a tenant has not used for so long leaves every tier, by itself.

Last use is what the files' rows have, so a restart forgets nothing. Extents are looked at in rounds, a slice with each
tick: a round ends with the time at which the next one may find something, since a use only puts that off. What is held,
pinned, or on its way to a disk stays until it is not; nothing goes before what hangs on it.
"""

from __future__ import annotations

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.ledger import Ledger
from tierkv.core.tenancy import TenantName
from tierkv.core.tier_room import EVICTIONS_AT_A_TIME

DEFAULT = "default"
"""Names every tenant that no other rule covers, those without a salt as well."""

LOOKED_AT = 4_000
"""Extents that one tick looks at: about a millisecond."""

_SHORTEST_ROUND, _LONGEST_ROUND = 1.0, 3_600.0  # seconds between two rounds
_PRECISION = 100  # what expires goes within one part in so many of its time, if no round is longer


class Expiry:
    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self._rules = [(TenantName(name), seconds) for name, seconds in ledger.limits.ttl if name != DEFAULT]
        self._default = next((seconds for name, seconds in ledger.limits.ttl if name == DEFAULT), None)
        self._shortest = min((seconds for _, seconds in ledger.limits.ttl), default=0.0)
        self._seconds: dict[bytes, float | None] = {}  # of groups
        self._todo: list[Extent] = []  # of this round
        self._soonest = 0.0
        self._due = 0.0  # the next round

    def seconds_of(self, group: bytes) -> float | None:
        """How long the group keeps what nobody uses. None: as long as there is room."""
        if group not in self._seconds:
            salt = self._ledger.groups[group].spec.identity.salt
            covering = (seconds for name, seconds in self._rules if name.covers(salt))
            self._seconds[group] = next(covering, self._default)
        return self._seconds[group]

    def tick(self, now: float) -> None:
        if not self._shortest or not self._cascade.nvme.is_open:
            return
        if not self._todo:
            if now < self._due:
                return
            self._todo = list(self._ledger.tree)  # parents first, as a rule: taken from the end, their kids are gone
            self._soonest = now + self._shortest
        went = 0
        for _ in range(min(LOOKED_AT, len(self._todo))):
            went += self._expire_upwards(self._todo.pop(), now)
            if went >= EVICTIONS_AT_A_TIME:
                break
        if not self._todo:
            self._due = max(self._soonest, now + self._interval)

    @property
    def _interval(self) -> float:
        return min(max(self._shortest / _PRECISION, _SHORTEST_ROUND), _LONGEST_ROUND)

    def _expire_upwards(self, extent: Extent, now: float) -> int:
        """The extent, and what is left without anything behind it: how many went."""
        went = 0
        following: Extent | None = extent
        while following is not None and following.in_tree and self._is_over(following, now):
            if not self._cascade.losses.may_expire(following):
                self._soonest = min(self._soonest, now + self._interval)  # looked at again
                break
            above = following.above.owner if following.above is not None else None
            self._cascade.losses.expire(following, now)
            went += 1
            following = above
        return went

    def _is_over(self, extent: Extent, now: float) -> bool:
        seconds = self.seconds_of(extent.group)
        if seconds is None:
            return False
        end = extent.last_used + seconds
        if end > now:
            self._soonest = min(self._soonest, end)
        return end <= now

    def next_wakeup(self) -> float | None:
        if not self._shortest or not self._cascade.nvme.is_open:
            return None
        return 0.0 if self._todo else self._due
