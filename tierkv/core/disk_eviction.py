"""Who leaves the disk tier. Other nodes may use its files: what one has used since stays, and is found again."""

from __future__ import annotations

from tierkv.core.extent import Extent
from tierkv.core.extent_rows import row_of
from tierkv.core.instructions import ExtentRow
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason
from tierkv.core.tier_files import TierFiles
from tierkv.core.tier_leaving import Leaving


class DiskEviction:
    def __init__(self, ledger: Ledger, files: TierFiles, leaving: Leaving) -> None:
        self._ledger = ledger
        self._files = files
        self._leaving = leaving
        self.rows: dict[Extent, ExtentRow] = {}
        """What is known of those whose files are being removed; of one rank."""

    def evict(self, now: float) -> bool:
        """Have the next victim leave. False: nothing may."""
        ledger = self._ledger
        if not self._files.can_remove:
            return False
        victim = ledger.disk_order.pop(now)
        while victim is not None and not ledger.may_leave_disk(victim):
            victim = ledger.disk_order.pop(now)
        if victim is None:
            return False
        self.leave(victim, now)
        return True

    def leave(self, victim: Extent, now: float, reason: Reason = Reason.EVICTED) -> None:
        self.rows[victim] = row_of(victim, self._ledger.group_of(victim).block_bytes)
        self._leaving.leave(victim, now, reason)
