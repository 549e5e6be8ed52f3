"""Who leaves NVMe, and where to: an extent with a copy in the disk tier at once, another one when it has been copied
there, or for good where that tier takes nothing."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.core.extent import Extent
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.tier_files import TierFiles
from tierkv.core.tier_leaving import Leaving

_MOST_KEPT_BACK = 64  # looked at in one step, that could go to the disk tier only, when it takes nothing

_TOLD = (Reason.DISK_BEHIND, Reason.DISK_DEGRADED, Reason.NAME_TAKEN)
"""Why something is lost for want of the disk tier, where that is not simply a matter of worth."""


def told_reason(reason: Reason, why_not: Reason) -> Reason:
    """Of an eviction for `reason` that had to drop what the disk tier did not take."""
    return why_not if reason is Reason.EVICTED and why_not in _TOLD else reason


class NvmeEviction:
    def __init__(self, ledger: Ledger, files: TierFiles, leaving: Leaving) -> None:
        self._ledger = ledger
        self._files = files
        self._leaving = leaving
        self.demote: Callable[[Extent, float, Reason], Reason | None] = lambda extent, now, reason: reason
        """Have it copied to the disk tier, and leave then. Returns why that is not possible."""
        self.why_no_demotion: Callable[[Extent, float], Reason | None] = lambda extent, now: Reason.DISK_DEGRADED

    def evict(self, now: float) -> bool:
        """Have the next victim leave. False: nothing may."""
        ledger = self._ledger
        if not self._files.can_remove:
            return False
        kept_back: list[Extent] = []
        has_evicted = False
        while len(kept_back) < _MOST_KEPT_BACK and not has_evicted:
            victim = ledger.nvme_order.pop(now)
            if victim is None:
                break
            if ledger.may_leave_nvme(victim):
                has_evicted = self.send_off(victim, now)
                if not has_evicted:
                    kept_back.append(victim)
        for extent in kept_back:
            ledger.reconsider(extent)
        return has_evicted

    def send_off(self, victim: Extent, now: float, reason: Reason = Reason.EVICTED) -> bool:
        """It `may_leave_nvme`. False: it has to stay, as the disk tier does not take it and others hang on it."""
        ledger = self._ledger
        if victim.disk is FileState.PRESENT or not ledger.has_disk:
            self._leaving.leave(victim, now, reason)
            return True
        why_not = self.demote(victim, now, reason)
        if why_not is None:
            return True
        if victim.has_kids:
            return False
        ledger.counts.dropped_demotions[why_not] += 1
        self._leaving.leave(victim, now, told_reason(reason, why_not))
        return True

    def may_go_now(self, extent: Extent, now: float) -> bool:
        """Whether `send_off` would have it go."""
        ledger = self._ledger
        if not ledger.may_leave_nvme(extent):
            return False
        if not ledger.has_disk or extent.disk is FileState.PRESENT or not extent.has_kids:
            return True
        return self.why_no_demotion(extent, now) is None
