"""What stays because it is pinned: which blocks are wanted, and what each extent keeps of them.

    wanted    block key -> how many pins want it, and how many of these in host memory
    stays     extent -> how far from its first block its host copies stay, and whether its file does

A pin is a prefix from token 0, and block keys are chains. So a block that is wanted has only wanted ones before it: an
extent is pinned exactly if its first block is, and up to the last of its leading wanted ones. Nothing has to be looked
for when an extent comes, grows or is found again at a start.

Pins hold at most a share of each tier, whatever becomes of the capacity: what is beyond it is `short`, an ordinary
extent that is looked at again when there is room. A file stays or goes whole, and counts whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.core.extent import Extent
from tierkv.core.keys import split_keys
from tierkv.core.residency import FileState


@dataclass(slots=True)
class Wanted:
    """How many pins want a block, on whichever tier, and how many of them in host memory."""

    pins: int = 0
    in_host: int = 0


@dataclass(slots=True)
class Stay:
    """What an extent keeps: its first `host_blocks` in host memory, of which `host_bytes` are there, and its file."""

    host_blocks: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0


class Pinned:
    """`host_cap` and `nvme_cap` are in bytes, and may change; `settle` all of it again when they sink."""

    def __init__(self, host_cap: int, nvme_cap: int) -> None:
        self.host_cap = host_cap
        self.nvme_cap = nvme_cap
        self.wanted: dict[bytes, Wanted] = {}
        self.stays: dict[Extent, Stay] = {}
        self.short: dict[Extent, None] = {}  # would keep more, were there room in the share
        self.to_promote: dict[Extent, None] = {}  # wanted in host memory, and in files alone
        self.to_write: dict[Extent, None] = {}  # whole in host memory, without a file on NVMe, where it may have one
        self.host_bytes = 0  # that stay, of all extents
        self.nvme_bytes = 0

    # ---- what is wanted

    def want(self, keys: bytes, *, in_host: bool) -> None:
        for key in split_keys(keys):
            wanted = self.wanted.setdefault(key, Wanted())
            wanted.pins += 1
            wanted.in_host += in_host

    def want_no_more(self, keys: bytes, *, in_host: bool) -> None:
        for key in split_keys(keys):
            wanted = self.wanted[key]
            wanted.pins -= 1
            wanted.in_host -= in_host
            if not wanted.pins:
                del self.wanted[key]

    def new_blocks(self, keys: bytes, *, in_host: bool) -> int:
        """How many of them no pin wants yet; with `in_host`: wants in host memory."""
        known = (self.wanted.get(key) for key in split_keys(keys))
        return sum(one is None or (in_host and not one.in_host) for one in known)

    # ---- what stays

    def host_blocks(self, extent: Extent) -> int:
        """The first so many stay in host memory."""
        stay = self.stays.get(extent)
        return 0 if stay is None else stay.host_blocks

    def keeps_file(self, extent: Extent) -> bool:
        stay = self.stays.get(extent)
        return stay is not None and stay.nvme_bytes > 0

    def keeps_disk_file(self, extent: Extent) -> bool:
        """Its file in the disk tier stays, whatever is in host memory, which a crash empties: it has none on NVMe that
        stays."""
        return self.concerns(extent) and not self.keeps_file(extent)

    def concerns(self, extent: Extent) -> bool:
        """Whether it is pinned, or was when it was settled last: there is something to settle."""
        return extent.key in self.wanted or extent in self.stays

    def settle(self, extent: Extent, slot_bytes: int, *, may_be_written: bool) -> None:
        """Something about the extent has changed, or about what is wanted of it. `may_be_written`: to NVMe."""
        self.leave(extent)
        if not extent.in_tree or extent.key not in self.wanted:
            return
        wanted, in_host = self._depths(extent)
        is_on_nvme = extent.nvme is FileState.PRESENT
        # What has no file yet, or no more, is nowhere else.
        depth = in_host if extent.has_file else wanted
        room = max(0, self.host_cap - self.host_bytes) // (slot_bytes * len(extent.slots))
        stay = Stay(host_blocks=min(depth, room))
        stay.host_bytes = sum(min(stay.host_blocks, len(slots)) for slots in extent.slots) * slot_bytes
        if is_on_nvme and self.nvme_bytes + extent.nvme_bytes <= self.nvme_cap:
            stay.nvme_bytes = extent.nvme_bytes
        self.stays[extent] = stay
        self.host_bytes += stay.host_bytes
        self.nvme_bytes += stay.nvme_bytes
        if stay.host_blocks < depth or (is_on_nvme and not stay.nvme_bytes):
            self.short[extent] = None
        if extent.has_file and extent.host_blocks < stay.host_blocks:
            self.to_promote[extent] = None
        is_whole = extent.sealed and extent.host_blocks == extent.num_blocks
        if may_be_written and is_whole and extent.nvme is FileState.ABSENT:
            self.to_write[extent] = None

    def leave(self, extent: Extent) -> None:
        """It keeps nothing."""
        stay = self.stays.pop(extent, None)
        if stay is not None:
            self.host_bytes -= stay.host_bytes
            self.nvme_bytes -= stay.nvme_bytes
        self.short.pop(extent, None)
        self.to_promote.pop(extent, None)
        self.to_write.pop(extent, None)

    def _depths(self, extent: Extent) -> tuple[int, int]:
        """Leading blocks that are wanted, and of these in host memory."""
        wanted = in_host = 0
        for key in split_keys(extent.keys):
            one = self.wanted.get(key)
            if one is None:
                break
            wanted += 1
            if one.in_host and in_host == wanted - 1:
                in_host = wanted
        return wanted, in_host
