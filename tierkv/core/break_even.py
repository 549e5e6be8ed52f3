"""Load only when loading beats computing: what is in the disk tier alone is read for a request where that is expected
to take less time than an engine needs to compute it again.

    seconds to read      (bytes that the disk is still to read + those of the request) / bytes a second, as measured
    seconds to compute   of prefill, at the rate of the group's engines, for the tokens behind what need not be read

A request gets the prefix that saves the most. Now and then one is read all the same, so that the measurement does not
grow old: a disk that was slow an hour ago may be idle now.
"""

from __future__ import annotations

from tierkv.core.grants import Segment
from tierkv.core.ledger import Group, Ledger
from tierkv.core.reads import Reads
from tierkv.core.residency import FileState
from tierkv.core.tier_files import TierFiles
from tierkv.core.value.cost import prefill_seconds

PROBE_SECONDS = 60.0
"""After so long without a read from the disk tier one is made whatever it was expected to take."""


class BreakEven:
    def __init__(self, ledger: Ledger, disk: TierFiles, reads: Reads) -> None:
        self._ledger = ledger
        self._disk = disk
        self._reads = reads

    def blocks_worth_reading(self, group: Group, path: list[Segment], ranks: tuple[int, ...], now: float) -> int:
        """How many blocks from the first of a path to have; all of them where nothing is to be read from disk."""
        total = path[-1].start + path[-1].blocks if path else 0
        speed = self._reads.disk_speed
        if not self._ledger.has_disk or speed.bytes_per_second <= 0 or now - speed.measured_at > PROBE_SECONDS:
            return total
        num_bytes, first, best, most = 0, -1, total, 0.0
        for segment in path:
            missing = self._missing_bytes(segment, ranks, group)
            if missing and first < 0:
                first, best = segment.start, segment.start
                num_bytes = self._reads.disk_bytes_waiting
            num_bytes += missing
            if first >= 0:
                end = segment.start + segment.blocks
                saved = self._seconds_to_compute(group, first, end) - num_bytes / speed.bytes_per_second
                if saved > most:
                    best, most = end, saved
        return best

    def _missing_bytes(self, segment: Segment, ranks: tuple[int, ...], group: Group) -> int:
        """To be read from disk."""
        extent = segment.extent
        if extent.nvme is FileState.PRESENT or extent.disk is not FileState.PRESENT:
            return 0
        in_memory = self._ledger.devices.in_memory
        return sum(max(0, segment.blocks - in_memory(extent, rank)) for rank in ranks) * group.slot_bytes

    def _seconds_to_compute(self, group: Group, first: int, end: int) -> float:
        tokens = group.block_tokens
        return prefill_seconds((end - first) * tokens, first * tokens, self._ledger.prefill_rate(group))
