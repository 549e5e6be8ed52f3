"""Where the books have an extent's file in one tier: its state, its bytes, and the sums of groups and shares."""

from __future__ import annotations

from typing import Protocol

from tierkv.core.extent import Extent
from tierkv.core.instructions import AnyInstruction
from tierkv.core.ledger import Effect, Ledger
from tierkv.core.reasons import Reason
from tierkv.core.residency import FileEvent, FileState
from tierkv.core.value.order import EvictionOrder


class TierBooks(Protocol):
    tier: str
    why_full: Reason
    """Why something does not come in, when nothing may go for it."""

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

    def addressed(self, instruction: AnyInstruction) -> Effect:
        """To the worker that has the tier."""


class NvmeBooks:
    tier = "nvme"
    why_full = Reason.NVME_FULL

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

    def addressed(self, instruction: AnyInstruction) -> Effect:
        return instruction
