"""Where the books have an extent's file in one tier: its state, its bytes, and the sums of groups and shares."""

from __future__ import annotations

import math
from typing import Protocol

from tierkv.core.extent import Extent
from tierkv.core.instructions import AnyInstruction, OnDisk
from tierkv.core.ledger import Effect, Group, Ledger, open_namespace
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.value.order import EvictionOrder

_CLOCKS_DIFFER_SECONDS = 1.0  # and times of files are rounded


class TierBooks(Protocol):
    tier: str
    why_full: Reason
    """Why something does not come in, when nothing may go for it."""
    why_degraded: Reason
    """Why nothing is written, where the worker gives no reason."""
    reads_early: bool
    """Its worker reads before recovery is over."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def order(self) -> EvictionOrder: ...

    def state(self, extent: Extent) -> FileState: ...

    def move(self, extent: Extent, event: FileEvent) -> None: ...

    def size(self, extent: Extent) -> int:
        """Of the files of all ranks, counted from WRITING until ABSENT."""

    def set_size(self, extent: Extent, num_bytes: int) -> None: ...

    def count_file(self, extent: Extent, num_bytes: int) -> None:
        """So many bytes more of its group are in files."""

    def count_share(self, extent: Extent, num_bytes: int) -> None:
        """So many bytes more are used by its share: by what is there to stay, or being written."""

    def note_why(self, extent: Extent, reason: Reason) -> None:
        """Why it is not there."""

    def unless_used_since(self, extent: Extent) -> float:
        """A file that was used later than this by somebody else is not removed to make room."""

    def declare(self, group: Group) -> None:
        """Have the worker write down the group's identity, before its first file."""

    def post(self, extent: Extent, source: str, target: str, num_bytes: int, reason: Reason | None = None) -> None:
        """Bytes move from one account to another, where the core keeps the journal's books of the tier."""

    def addressed(self, instruction: AnyInstruction) -> Effect:
        """To the worker that has the tier."""


class NvmeBooks:
    tier = "nvme"
    why_full = Reason.NVME_FULL
    why_degraded = Reason.NVME_DEGRADED
    reads_early = False

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def capacity_bytes(self) -> int:
        return self._ledger.limits.nvme_bytes

    @property
    def order(self) -> EvictionOrder:
        return self._ledger.nvme_order

    def state(self, extent: Extent) -> FileState:
        return extent.nvme

    def move(self, extent: Extent, event: FileEvent) -> None:
        extent.move(event)

    def size(self, extent: Extent) -> int:
        return extent.nvme_bytes

    def set_size(self, extent: Extent, num_bytes: int) -> None:
        extent.nvme_bytes = num_bytes

    def count_file(self, extent: Extent, num_bytes: int) -> None:
        self._ledger.group_of(extent).nvme_bytes += num_bytes

    def count_share(self, extent: Extent, num_bytes: int) -> None:
        self._ledger.group_of(extent).share.nvme_bytes += num_bytes

    def note_why(self, extent: Extent, reason: Reason) -> None:
        extent.why_not_there = reason

    def unless_used_since(self, extent: Extent) -> float:
        return math.inf

    def declare(self, group: Group) -> None:
        self._ledger.declare(group)

    def post(self, extent: Extent, source: str, target: str, num_bytes: int, reason: Reason | None = None) -> None:
        pass  # its worker does, who knows when a file is there

    def addressed(self, instruction: AnyInstruction) -> Effect:
        return instruction


class DiskBooks:
    """Of the disk tier. Other nodes may use the same files."""

    tier = "disk"
    why_full = Reason.DISK_FULL
    why_degraded = Reason.DISK_DEGRADED
    reads_early = True

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def capacity_bytes(self) -> int:
        return self._ledger.limits.disk_bytes

    @property
    def order(self) -> EvictionOrder:
        return self._ledger.disk_order

    def state(self, extent: Extent) -> FileState:
        return extent.disk

    def move(self, extent: Extent, event: FileEvent) -> None:
        extent.move_on_disk(event)

    def size(self, extent: Extent) -> int:
        return extent.disk_bytes

    def set_size(self, extent: Extent, num_bytes: int) -> None:
        extent.disk_bytes = num_bytes

    def count_file(self, extent: Extent, num_bytes: int) -> None:
        self._ledger.group_of(extent).disk_bytes += num_bytes

    def count_share(self, extent: Extent, num_bytes: int) -> None:
        self._ledger.group_of(extent).share.disk_bytes += num_bytes

    def note_why(self, extent: Extent, reason: Reason) -> None:
        pass  # what an extent keeps is why it is not on NVMe

    def unless_used_since(self, extent: Extent) -> float:
        return extent.last_used + _CLOCKS_DIFFER_SECONDS

    def declare(self, group: Group) -> None:
        if not group.wants_disk_folder:
            group.wants_disk_folder = True
            self._ledger.effects.append(OnDisk(open_namespace(group)))

    def post(self, extent: Extent, source: str, target: str, num_bytes: int, reason: Reason | None = None) -> None:
        self._ledger.postings[extent.group, source, target, reason or ""] += num_bytes

    def addressed(self, instruction: AnyInstruction) -> Effect:
        return OnDisk(instruction)
