"""How an extent leaves NVMe: which one is next, and what becomes of its blocks."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.grants import Evicted
from tierkv.core.ledger import Departure, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent
from tierkv.core.tier_files import TierFiles


def parts_on_nvme(extent: Extent) -> Iterator[tuple[int, int, int, str]]:
    """What becomes of the blocks of a file that goes: first, end, bytes of the file, and the tier where they still are.
    The last ones first, which are nowhere else."""
    stay, blocks = extent.host_blocks, extent.num_blocks
    bytes_that_stay = extent.nvme_bytes * stay // blocks
    if stay < blocks:
        yield stay, blocks, extent.nvme_bytes - bytes_that_stay, "dropped"
    if stay:
        yield 0, stay, bytes_that_stay, "host"


class NvmeEviction:
    def __init__(self, ledger: Ledger, files: TierFiles, changes: Changes) -> None:
        self._ledger = ledger
        self._files = files
        self._changes = changes

    def evict(self, now: float) -> bool:
        """Have the next victim leave. False: nothing may."""
        ledger = self._ledger
        if not self._files.can_remove:
            return False
        victim = ledger.nvme_order.pop(now)
        while victim is not None and not ledger.may_leave_nvme(victim):
            victim = ledger.nvme_order.pop(now)
        if victim is None:
            return False
        self.leave(victim, now)
        return True

    def leave(self, victim: Extent, now: float, reason: Reason = Reason.EVICTED) -> None:
        """Its file goes, and with it what is not in host memory."""
        ledger = self._ledger
        stays_in_host = victim.host_blocks
        ledger.counts.evicted_bytes["nvme", reason] += victim.nvme_bytes
        ledger.counts.evicted_blocks["nvme", reason] += victim.num_blocks
        block_tokens = ledger.group_of(victim).block_tokens
        for first, end, num_bytes, to in parts_on_nvme(victim):
            ledger.effects.append(
                Evicted(
                    group=victim.group,
                    key=victim.block_key(first),
                    tier="nvme",
                    to=to,
                    blocks=end - first,
                    num_bytes=num_bytes,
                    reason=reason,
                    first_token=victim.first_token + first * block_tokens,
                    tokens=(end - first) * block_tokens,
                    created=victim.created,
                    last_used=victim.used_at(first),
                    hits=victim.hits_at(first),
                    value=ledger.nvme_order.value(victim, first, now),
                )
            )
        self._files.lose(victim, FileEvent.EVICT, reason)
        ledger.cut_extent(victim, stays_in_host, Departure("nvme", reason, now))
        self._changes.note(victim)
