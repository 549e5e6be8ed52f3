"""What is found in the disk tier: extents of an earlier life, and what other nodes put there while this one runs.

    not known yet                      joins the tree as an extent
    known, with the same keys          gets a copy there
    known, and goes on otherwise       stays there, and takes room: its file is another node's
    not all ranks are there            stays, and takes room, until the others come

Rows come at any time. Those that come before NVMe is recovered, or before the group is known, wait for that. A file of
more blocks than are known here is as good: what is read of it begins with these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from tierkv.core.changes import Changes
from tierkv.core.demotions import Demotions
from tierkv.core.disk_eviction import DiskEviction
from tierkv.core.extent import Extent
from tierkv.core.extent_rows import extent_of_row, row_of
from tierkv.core.file_ops import Ended, Gone
from tierkv.core.grants import GroupSpec
from tierkv.core.instructions import ExtentRow, FileLost, GroupFound, PurgeScope, Rows
from tierkv.core.journal import Account
from tierkv.core.keys import KEY_BYTES, split_keys
from tierkv.core.ledger import Group, Ledger
from tierkv.core.losses import Losses
from tierkv.core.purge_scope import is_wholly_in
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileState
from tierkv.core.tier_files import TierFiles

ROWS_AT_A_TIME = 100
"""A few milliseconds: requests are answered in between."""

SLICE = 2_000
"""Extents looked at in one step for the parents of those that were found: some milliseconds."""


@dataclass(slots=True)
class _Others:
    """Files of one name, by rank, that are no extent's of ours."""

    group: bytes
    rows: dict[int, ExtentRow] = field(default_factory=dict)


class FoundOnDisk:
    def __init__(
        self,
        ledger: Ledger,
        files: TierFiles,
        nvme: TierFiles,
        eviction: DiskEviction,
        demotions: Demotions,
        losses: Losses,
        changes: Changes,
    ) -> None:
        self._ledger = ledger
        self._files = files
        self._nvme = nvme
        self._eviction = eviction
        self._demotions = demotions
        self._losses = losses
        self._changes = changes
        self._waiting: deque[Rows | FileLost] = deque()  # in the order in which they were told
        self._held: list[Rows] = []  # of groups that are not known, or are being purged
        self._others: dict[bytes, _Others] = {}  # by key
        self._to_adopt: Iterator[Extent] | None = None
        self._has_strays = False  # extents whose parent was not looked for yet
        self.is_covered: Callable[[Group], bool] = lambda group: False
        """Something of the group is being purged: nothing of it is taken for now."""

    # ---- what is told

    def group_found(self, report: GroupFound, now: float) -> None:
        group = self._ledger.groups.get(report.group)
        if group is None:
            group = self._ledger.add_group(
                GroupSpec(group=report.group, identity=report.identity, model_name=report.model_name)
            )
        group.wants_disk_folder = True
        self.take_held(now)

    def take_held(self, now: float) -> None:
        """A group has become known, or is no longer being purged."""
        held, self._held = self._held, []
        for report in held:
            self._take_rows(report, now)

    @property
    def is_busy(self) -> bool:
        """`step` has something to do."""
        return self._to_adopt is not None or (bool(self._waiting) and self._nvme.is_open)

    def step(self, now: float) -> None:
        """A slice of what nobody waits for."""
        left = ROWS_AT_A_TIME
        while self._waiting and self._nvme.is_open and left > 0:
            report = self._waiting.popleft()
            if isinstance(report, FileLost):
                self._file_lost(report, now)
                continue
            if len(report.rows) > left:
                self._waiting.appendleft(msgspec.structs.replace(report, rows=report.rows[left:]))
                report = msgspec.structs.replace(report, rows=report.rows[:left])
            left -= len(report.rows)
            self._take_rows(report, now)
        self.adopt()

    def rows(self, report: Rows, now: float) -> None:
        """Some of them are taken now, the rest by `step`."""
        self._waiting.append(report)
        self.step(now)

    def _take_rows(self, report: Rows, now: float) -> None:
        group = self._ledger.groups.get(report.group)
        if group is None or self.is_covered(group):
            self._held.append(report)
            return
        if group.spec.identity.weights != report.fingerprint or report.rank >= group.ranks:
            return
        for row in report.rows:
            self._take(group, report.rank, row, now)

    def file_lost(self, report: FileLost, now: float) -> None:
        """Another node removed it, or has put another one in its place: the copy is gone, nothing else."""
        if self._waiting:
            self._waiting.append(report)
        else:
            self._file_lost(report, now)

    def _file_lost(self, report: FileLost, now: float) -> None:
        self._demotions.name_is_free(report.key)
        if self._forget_other(report.key, report.rank):
            return
        extent = self._ledger.tree.heads.get(report.key)
        if extent is None or extent.group != report.group or extent.disk is not FileState.PRESENT:
            return
        self._lose_copy(extent, report.rank, Reason.NOT_FOUND, now)

    def set_aside(self, group: bytes, rank: int, key: bytes, now: float) -> None:
        """Verifying has found it damaged."""
        extent = self._ledger.tree.heads.get(key)
        if not self._forget_other(key, rank) and extent is not None and extent.group == group:
            self._losses.lose_disk_copy(extent, Reason.CHECKSUM, now)

    def _lose_copy(self, extent: Extent, rank: int, reason: Reason, now: float) -> None:
        row = row_of(extent, self._ledger.group_of(extent).block_bytes)
        self._losses.lose_disk_copy(extent, reason, now)
        for other in range(len(extent.slots)):
            if other != rank:
                self._keep_other(extent.group, other, row)

    # ---- files of ours that come and go

    def demoted(self, extent: Extent, ended: Ended) -> None:
        """Files of some ranks, or all, are there; what had these names before is not."""
        ranks = range(self._ledger.group_of(extent).ranks) if ended.reason is None else ended.by_rank
        for rank in list(ranks):
            self._forget_other(extent.key, rank)
        if ended.reason is not None and extent.in_tree:
            row = row_of(extent, self._ledger.group_of(extent).block_bytes)
            for rank, num_bytes in ended.by_rank.items():
                self._keep_other(extent.group, rank, _with(row, num_bytes, row.last_used))

    def removed(self, gone: Gone, now: float) -> None:
        """All operations on its files have ended. What another node uses is still there, and found again."""
        extent = gone.extent
        row = self._eviction.rows.pop(extent, None)
        if gone.is_kept and extent.in_tree:
            self._raise_last_used(extent, min(now, max(gone.kept.values())))
            return
        if gone.is_kept:
            size = self._files.forget(extent)
            self._files.books.post(extent, Account.DISK, Account.FOUND, size, Reason.EVICTED)
        group = self._ledger.groups.get(extent.group)
        if row is None or group is None:
            return
        for rank, last_used in gone.kept.items():
            self._take(group, rank, _with(row, gone.num_bytes // group.ranks, last_used), now)
        self.adopt()

    def _raise_last_used(self, extent: Extent, last_used: float) -> None:
        if last_used > extent.last_used:
            self._ledger.reuse.used_elsewhere(extent, last_used, self._ledger.group_of(extent).block_tokens)
        self._changes.note(extent)

    def purged(self, scope: PurgeScope) -> None:
        """Nothing of it is there any more."""
        heads = {head for named in scope.extents for head in split_keys(named.heads)}
        for key, others in list(self._others.items()):
            if key in heads or self._is_gone(scope, others.group):
                for rank in list(others.rows):
                    self._forget_other(key, rank)
        for report in (*self._held, *self._waiting):
            if isinstance(report, Rows):
                is_gone = self._is_gone(scope, report.group)
                report.rows[:] = [] if is_gone else [row for row in report.rows if row.key not in heads]

    def _is_gone(self, scope: PurgeScope, key: bytes) -> bool:
        group = self._ledger.groups.get(key)
        return group is not None and is_wholly_in(scope, group)

    def settle(self, now: float) -> None:
        """Extents have left the tree: files that were of no use beside them may be now."""
        left, self._ledger.left_tree = self._ledger.left_tree, []
        for key in left:
            others = self._others.get(key)
            group = self._ledger.groups.get(others.group) if others is not None else None
            if group is not None and self.is_covered(group):
                self._ledger.left_tree.append(key)  # it may be what is being purged
            elif others is not None:
                self._join(key, now)

    # ---- files, one by one

    def _take(self, group: Group, rank: int, row: ExtentRow, now: float) -> None:
        extent = self._ledger.tree.heads.get(row.key)
        is_ours = extent is not None and extent.group == group.spec.group and extent.disk is not FileState.ABSENT
        if is_ours or self._files.owns_key(row.key):
            return  # known, or about to be removed or written
        self._keep_other(group.spec.group, rank, row)
        if row.key == row.keys[:KEY_BYTES] and row.block_bytes == group.block_bytes:
            self._join(row.key, now)

    def _keep_other(self, group: bytes, rank: int, row: ExtentRow) -> None:
        self._forget_other(row.key, rank)
        self._others.setdefault(row.key, _Others(group)).rows[rank] = row
        self._files.strand(row.file_bytes)

    def _forget_other(self, key: bytes, rank: int) -> bool:
        others = self._others.get(key)
        row = others.rows.pop(rank, None) if others is not None else None
        if others is None or row is None:
            return False
        if not others.rows:
            del self._others[key]
        self._files.unstrand(row.file_bytes)
        return True

    def _join(self, key: bytes, now: float) -> None:
        """If the files of all ranks are there and of one extent, they are a copy of it."""
        others = self._others[key]
        rows = list(others.rows.values())
        group = self._ledger.groups.get(others.group)
        shortest = min(rows, key=lambda row: len(row.keys))
        if group is None or len(rows) < group.ranks or not all(_is_part_of(shortest, row) for row in rows):
            return
        extent = self._ledger.tree.heads.get(key)
        if extent is not None and not self._is_copy(shortest, extent):
            return
        size = sum(row.file_bytes for row in rows)
        last_used = max(row.last_used for row in rows)
        for rank in list(others.rows):
            self._forget_other(key, rank)
        if extent is None:
            row = msgspec.structs.replace(shortest, keys=self._own_keys(shortest.keys), last_used=last_used)
            extent = self._add(group, row, now)
        self._files.found(extent, size)
        self._files.books.post(extent, Account.FOUND, Account.DISK, size)
        self._changes.note(extent)

    def _own_keys(self, keys: bytes) -> bytes:
        """Up to a block that heads an extent already: that one hangs on what is before, and would be out of reach."""
        heads = self._ledger.tree.heads
        block_keys = split_keys(keys)
        end = next((at for at, key in enumerate(block_keys) if at and key in heads), len(block_keys))
        return keys[: end * KEY_BYTES]

    def _is_copy(self, row: ExtentRow, extent: Extent) -> bool:
        is_same = (extent.parent, extent.first_token) == (row.parent, row.first_token)
        return is_same and extent.sealed and extent.disk is FileState.ABSENT and row.keys.startswith(extent.keys)

    def _add(self, group: Group, row: ExtentRow, now: float) -> Extent:
        ledger = self._ledger
        extent = extent_of_row(group, row, now, ledger.reuse.tuning)
        ledger.reuse.found(extent, ledger.ghosts.claim(extent.group, split_keys(extent.keys)), group.block_tokens)
        ledger.add_extent(extent, None, -1)
        ledger.adopted(extent, extent.branch_points)
        self._has_strays = self._has_strays or extent.is_orphan
        return extent

    # ---- their parents

    def adopt(self) -> None:
        """Look for the parents of what was found, a slice: until then it is an orphan for those who evict."""
        if self._to_adopt is None and self._has_strays:
            self._has_strays = False
            self._to_adopt = iter(list(self._ledger.tree))
        if self._to_adopt is None:
            return
        for _ in range(SLICE):
            extent = next(self._to_adopt, None)
            if extent is None:
                self._to_adopt = None
                return
            if extent.in_tree:
                self._ledger.adopt(extent)

    # ---- for the audit

    def other_bytes(self) -> int:
        """Of files that take room and are of no use."""
        return sum(row.file_bytes for others in self._others.values() for row in others.rows.values())


def _with(row: ExtentRow, file_bytes: int, last_used: float) -> ExtentRow:
    return ExtentRow(
        row.key,
        row.parent,
        row.first_token,
        row.keys,
        row.block_bytes,
        file_bytes,
        row.created,
        last_used,
        row.hits,
    )


def _is_part_of(row: ExtentRow, other: ExtentRow) -> bool:
    return (row.parent, row.first_token) == (other.parent, other.first_token) and other.keys.startswith(row.keys)
