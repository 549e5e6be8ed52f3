"""Room in a tier of files: what has to go for what comes, and for capacity that was taken."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.core.extent import Extent
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason
from tierkv.core.tier_files import TierFiles

EVICTIONS_AT_A_TIME = 128
"""When much is to go at once, for capacity that was taken: between two of these slices others are answered."""

_FOLDERS_OF_A_WRITE = 2  # inodes that a file may need beside its own
_FILES_AT_A_TIME = 8  # evicted beyond what is needed when inodes are short


class TierRoom:
    """`evict` has one extent leave the tier, or says that nothing may."""

    def __init__(self, ledger: Ledger, files: TierFiles, evict: Callable[[float], bool]) -> None:
        self._ledger = ledger
        self._files = files
        self._evict = evict
        self.is_behind = False  # `shrink` has more to evict

    def find(self, extent: Extent, now: float, is_worth_room: Callable[[Extent], bool]) -> Reason | None:
        """For the files of an extent. None: there is room. PENDING: there will be when removals end. Else why there is
        none."""
        files = self._files
        capacity = files.books.capacity_bytes
        num_files = self._ledger.group_of(extent).ranks + _FOLDERS_OF_A_WRITE
        need = files.need(extent)
        if need > capacity - files.overhead_bytes:
            return Reason.LARGER_THAN_TIER
        if files.spare_files is not None and files.spare_files < num_files:
            return self._find_inodes(num_files, now)
        need -= files.books.size(extent)  # which are reserved
        if files.free_bytes >= need:
            return None
        if files.free_bytes + files.going_bytes < need and not is_worth_room(extent):
            return Reason.WORTH_LESS
        slack = capacity // 64  # evict in batches, not one for each write
        evicted = 0
        while files.free_bytes + files.going_bytes < need + slack and self._evict(now):
            evicted += 1
            if evicted >= EVICTIONS_AT_A_TIME:
                slack = 0  # enough for others to wait for
        if files.free_bytes >= need:
            return None
        if files.free_bytes + files.going_bytes >= need or files.writes_in_flight or files.going_bytes:
            return Reason.PENDING
        return files.books.why_full

    def _find_inodes(self, num_files: int, now: float) -> Reason:
        """Inodes are short while bytes may be free: files make room for files, in batches."""
        files = self._files
        assert files.spare_files is not None
        wanted = num_files + _FILES_AT_A_TIME
        while files.spare_files + files.num_going < wanted and self._evict(now):
            pass
        return Reason.PENDING if files.num_going or files.writes_in_flight else Reason.NO_INODES

    def shrink(self, now: float, *, at_once: bool = False) -> None:
        """Evict down to capacity: after recovery, `at_once`, or when what lies beside the extents has grown, a slice
        with each event and each tick."""
        if not self._files.is_open:
            return
        evicted = 0
        self.is_behind = False
        while self._is_beyond_capacity():
            if evicted == EVICTIONS_AT_A_TIME and not at_once:
                self.is_behind = True
                return
            if not self._evict(now):
                return
            evicted += 1

    def _is_beyond_capacity(self) -> bool:
        files = self._files
        if files.free_bytes + files.going_bytes < 0:
            return True
        return files.spare_files is not None and files.spare_files < 0 and files.spare_files + files.num_going < 0
