"""Rows from disk become extents: what the storage worker found at start, put back into the tree."""

from __future__ import annotations

from tierkv.core.cascade import Cascade
from tierkv.core.extent import Extent
from tierkv.core.grants import GroupSpec
from tierkv.core.instructions import ExtentRow, GroupFound, Rows
from tierkv.core.keys import KEY_BYTES
from tierkv.core.ledger import Group, Ledger
from tierkv.core.residency import NvmeEvent


class RecoveredRows:
    """Extents whose rows are complete (every rank, equal keys) at `finish` stay; of the others the files are removed,
    for no match could ever use them."""

    def __init__(self, ledger: Ledger, cascade: Cascade) -> None:
        self._ledger = ledger
        self._cascade = cascade
        self.begin_again()

    def begin_again(self) -> None:
        """A worker begins to send; what a dead one sent is forgotten."""
        self._extents: dict[bytes, tuple[Extent, dict[int, ExtentRow]]] = {}
        self._conflicts: set[bytes] = set()

    def group_found(self, report: GroupFound) -> None:
        if report.group not in self._ledger.groups:
            self._ledger.add_group(
                GroupSpec(group=report.group, identity=report.identity, model_name=report.model_name)
            )

    def rows(self, report: Rows, now: float) -> None:
        group = self._ledger.groups.get(report.group)
        if group is None or group.spec.identity.weights != report.fingerprint or report.rank >= group.ranks:
            return
        for row in report.rows:
            known = self._extents.get(row.key)
            if known is None:
                self._extents[row.key] = (self._make_extent(group, row, now), {report.rank: row})
            elif known[0].keys == row.keys and known[0].parent == row.parent:
                known[1][report.rank] = row
            else:
                known[1].setdefault(report.rank, row)
                self._conflicts.add(row.key)

    def finish(self, now: float) -> None:
        ledger = self._ledger
        ledger.tree.begin_bulk()
        for extent, rows in self._extents.values():
            extent.move(NvmeEvent.RECOVERED)
            extent.nvme_bytes = sum(row.file_bytes for row in rows.values())
            ledger.group_of(extent).nvme_bytes += extent.nvme_bytes
            self._cascade.nvme_used += extent.nvme_bytes
            if self._is_fit(extent, rows):
                ledger.add_extent(extent, None, -1)
            else:
                self._cascade.discard(extent)
        ledger.tree.end_bulk()
        for extent in ledger.tree:
            ledger.reconsider(extent)
        self._extents.clear()

    def _is_fit(self, extent: Extent, rows: dict[int, ExtentRow]) -> bool:
        group = self._ledger.group_of(extent)
        return (
            len(rows) == group.ranks
            and extent.key not in self._conflicts
            and extent.num_blocks > 0
            and extent.key == extent.keys[:KEY_BYTES]
            and all(row.block_bytes == group.block_bytes for row in rows.values())
        )

    def _make_extent(self, group: Group, row: ExtentRow, now: float) -> Extent:
        extent = Extent(
            group=group.spec.group,
            key=row.key,
            parent=row.parent,
            first_token=row.first_token,
            ranks=group.ranks,
            created=min(row.created, now),
        )
        extent.keys = row.keys
        extent.num_blocks = extent.hot_blocks = len(row.keys) // KEY_BYTES
        extent.tokens = None
        extent.sealed = True
        extent.hits = row.hits
        extent.last_used = extent.tail_used = min(row.last_used, now)
        return extent
