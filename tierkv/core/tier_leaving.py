"""How an extent leaves a tier: what is told of its blocks, and of a tier of files what becomes of them."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.core.changes import Changes
from tierkv.core.extent import Extent
from tierkv.core.grants import Evicted
from tierkv.core.ledger import Departure, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.tier_files import TierFiles


def tell_evicted(
    ledger: Ledger,
    extent: Extent,
    first: int,
    end: int,
    *,
    tier: str,
    to: str,
    num_bytes: int,
    reason: Reason,
    value: float,
) -> None:
    """Blocks [first, end) leave `tier`, and are in `to` from now on. Before they do: what they were is read here."""
    block_tokens = ledger.group_of(extent).block_tokens
    ledger.effects.append(
        Evicted(
            group=extent.group,
            key=extent.block_key(first),
            tier=tier,
            to=to,
            blocks=end - first,
            num_bytes=num_bytes,
            reason=reason,
            first_token=extent.first_token + first * block_tokens,
            tokens=(end - first) * block_tokens,
            created=extent.created,
            last_used=extent.used_at(first),
            hits=extent.hits_at(first),
            value=value,
        )
    )


def parts_of_file(extent: Extent, tier: str, in_memory: int) -> Iterator[tuple[int, int, int, str]]:
    """What becomes of the blocks of a file that goes: first, end, bytes of the file, and the tier where they still are.
    The last ones first, which are nowhere else. So many are `in_memory`, of the host or of a device."""
    size, other, state = (
        (extent.nvme_bytes, "disk", extent.disk) if tier == "nvme" else (extent.disk_bytes, "nvme", extent.nvme)
    )
    stay, blocks = in_memory, extent.num_blocks
    if state is FileState.PRESENT:
        yield 0, blocks, size, other
        return
    bytes_that_stay = size * stay // blocks
    if stay < blocks:
        yield stay, blocks, size - bytes_that_stay, "dropped"
    if stay:
        yield 0, stay, bytes_that_stay, "host" if extent.host_blocks >= stay else "gpu"


class Leaving:
    """Of one tier."""

    def __init__(self, ledger: Ledger, files: TierFiles, changes: Changes) -> None:
        self._ledger = ledger
        self._files = files
        self._changes = changes

    def leave(self, victim: Extent, now: float, reason: Reason = Reason.EVICTED) -> None:
        """Its file goes, and with it what is in no other tier."""
        ledger, books = self._ledger, self._files.books
        tier = books.tier
        ledger.counts.evicted_bytes[tier, reason] += books.size(victim)
        ledger.counts.evicted_blocks[tier, reason] += victim.num_blocks
        in_memory = ledger.devices.memory_blocks(victim)
        for first, end, num_bytes, to in parts_of_file(victim, tier, in_memory):
            value = books.order.value(victim, first, now)
            tell_evicted(ledger, victim, first, end, tier=tier, to=to, num_bytes=num_bytes, reason=reason, value=value)
        self._files.lose(victim, FileEvent.EVICT, reason)
        if not victim.has_file:
            ledger.cut_extent(victim, in_memory, Departure(tier, reason, now))
        self._changes.note(victim)
