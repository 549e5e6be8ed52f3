"""Automatic pins: the hottest prefixes stay in memory, within a share of it, for as long as they are hot.

Chosen anew every minute, the hottest first; one that is chosen again lasts on, one that is not ends by itself. They
take of what pins may hold and give way to everybody who pins something. A restart forgets them: nobody wished for them.
"""

from __future__ import annotations

from tierkv.core.hottest import HALF_LIFE_SECONDS
from tierkv.core.keys import split_keys
from tierkv.core.ledger import Ledger
from tierkv.core.pins import Pins

ROUND_SECONDS = 60.0
LIFETIME_SECONDS = 600.0
MIN_HITS = 8
MOST = 32
"""Prefixes that are pinned at one time."""

_CONSIDERED = 128


class AutoPins:
    def __init__(self, ledger: Ledger, pins: Pins) -> None:
        self._ledger = ledger
        self._pins = pins
        self._due = 0.0

    def tick(self, now: float) -> None:
        if not self._is_on or now < self._due:
            return
        self._due = now + ROUND_SECONDS
        budget = int(self._ledger.limits.host_bytes * self._ledger.limits.auto_pin_share)
        chosen: set[bytes] = set()
        pinned = 0
        for prefix in self._ledger.hottest.prefixes(self._ledger.groups, _CONSIDERED, now):
            extent = self._ledger.tree.heads.get(prefix.key)
            if extent is None or prefix.hits < MIN_HITS or now - prefix.last_used > HALF_LIFE_SECONDS:
                continue
            keys = self._pins.chain_to(extent, max(1, extent.hot_blocks) - 1)
            group = self._ledger.group_of(extent)
            new = set(split_keys(keys)) - chosen
            size = len(new) * group.ranks * group.slot_bytes
            if keys and size <= budget and self._pins.keep(group, keys, LIFETIME_SECONDS, now):
                budget -= size
                chosen |= new
                pinned += 1
            if pinned == MOST:
                break

    def next_wakeup(self) -> float | None:
        return self._due if self._is_on else None

    @property
    def _is_on(self) -> bool:
        return self._ledger.limits.auto_pin_share > 0 and len(self._ledger.hottest) > 0
