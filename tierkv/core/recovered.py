"""Rows from disk become extents: what the storage worker found at start, put back into the tree."""

from __future__ import annotations

from collections import Counter

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.extent_rows import extent_of_row
from tierkv.core.grants import GroupSpec
from tierkv.core.instructions import ExtentRow, GroupFound, Rows
from tierkv.core.keys import KEY_BYTES
from tierkv.core.ledger import Group, Ledger


class RecoveredRows:
    """Extents whose rows are complete (every rank, equal keys) at `finish` stay; of the others the files are removed,
    for no match could ever use them: unless what is missing may be there and just could not be read."""

    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self.begin_again()

    def begin_again(self) -> None:
        """A worker begins to send; what a dead one sent is forgotten."""
        self._extents: dict[bytes, Extent] = {}
        self._unfit: set[bytes] = set()
        self._ranks_found: Counter[bytes] = Counter()  # bit n for rank n
        self._numbers: dict[int, int] = {}  # sizes and positions repeat, and each would be an object of its own

    def group_found(self, report: GroupFound) -> None:
        if report.group not in self._ledger.groups:
            group = self._ledger.add_group(
                GroupSpec(group=report.group, identity=report.identity, model_name=report.model_name)
            )
            group.wants_folder = True

    def rows(self, report: Rows, now: float) -> None:
        group = self._ledger.groups.get(report.group)
        if group is None or group.spec.identity.weights != report.fingerprint or report.rank >= group.ranks:
            return
        extents = self._extents
        bit = 1 << report.rank
        for row in report.rows:
            extent = extents.get(row.key)
            if extent is None:
                extent = extents[row.key] = self._make_extent(group, row, now)
            is_same = (extent.group, extent.keys, extent.parent, extent.first_token) == (
                report.group,
                row.keys,
                row.parent,
                row.first_token,
            )
            if not (is_same and row.block_bytes == group.block_bytes and row.key == row.keys[:KEY_BYTES]):
                self._unfit.add(row.key)
            if not self._ranks_found[row.key] & bit:
                self._ranks_found[row.key] |= bit
                extent.nvme_bytes += row.file_bytes

    def finish(self, *, saw_all: bool) -> None:
        """`saw_all`: every file that is there could be read."""
        ledger = self._ledger
        ledger.tree.begin_bulk()
        for extent in self._extents.values():
            group = ledger.groups[extent.group]
            is_whole = self._ranks_found[extent.key] == (1 << group.ranks) - 1
            is_fit = is_whole and extent.key not in self._unfit
            if not is_whole and not saw_all:
                self._cascade.nvme.strand(extent.nvme_bytes)
                continue
            extent.nvme_bytes = self._numbers.setdefault(extent.nvme_bytes, extent.nvme_bytes)
            self._cascade.nvme.found(extent, extent.nvme_bytes)
            if is_fit:
                ledger.add_extent(extent, None, -1)
            else:
                self._cascade.losses.discard(extent)
        ledger.tree.end_bulk()
        for extent in self._extents.values():
            if not extent.in_tree:
                continue
            if ledger.pins.concerns(extent):
                ledger.settle_pins(extent)
                ledger.reconsider(extent)
            elif not extent.branch_points:  # nothing of it is in host memory or held
                ledger.nvme_order.offer(extent, 0)
        self._extents.clear()
        self._ranks_found.clear()
        self._numbers.clear()

    def _make_extent(self, group: Group, row: ExtentRow, now: float) -> Extent:
        extent = extent_of_row(group, row, now, self._ledger.reuse.tuning)
        extent.first_token = self._numbers.setdefault(row.first_token, row.first_token)
        return extent
