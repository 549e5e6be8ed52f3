"""Rows of files, and the extents that are known by them."""

from __future__ import annotations

from tierkv.core.extent import Extent
from tierkv.core.instructions import ExtentRow
from tierkv.core.keys import KEY_BYTES
from tierkv.core.ledger import Group
from tierkv.core.value.kinds import UNKNOWN_GAP_SECONDS, UNKNOWN_NEW, kind_of_used
from tierkv.core.value.tuning import Tuning


def extent_of_row(group: Group, row: ExtentRow, now: float, tuning: Tuning) -> Extent:
    """With the blocks of the file and its history; where the file is, is still to be said."""
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
    extent.hits = extent.tail_hits = row.hits
    extent.kind = extent.tail_kind = kind_of_used(row.hits, UNKNOWN_GAP_SECONDS, tuning) if row.hits else UNKNOWN_NEW
    extent.last_used = extent.tail_used = min(row.last_used, now)
    return extent


def row_of(extent: Extent, block_bytes: int) -> ExtentRow:
    """Of one rank's file: they are about equal."""
    return ExtentRow(
        key=extent.key,
        parent=extent.parent,
        first_token=extent.first_token,
        keys=extent.keys,
        block_bytes=block_bytes,
        file_bytes=extent.disk_bytes // len(extent.slots),
        created=extent.created,
        last_used=extent.last_used,
        hits=extent.hits,
    )
