"""An engine's paged memory as a destination and a source of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.client.buffers import BlockReader, BlockWriter

if TYPE_CHECKING:
    from tierkv.client.device.pool import DevicePool
    from tierkv.device.layouts import PagedLayout

NO_PAGE = -1
"""Where an engine keeps no page of a block (one outside of a sliding window)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePages:
    """Pages on the device of `pool`, for `lease.copy_into` and `ticket.copy_from`.

    `layouts` has one entry for each page group, whose parts of a block follow each other; `pages` the page of each
    block from `first_block` on in each group, or NO_PAGE. Blocks that are none of these are left out when they come
    out of a lease; a ticket's must all be there, with a page in each group.

    `host` moves blocks between the same pages and rows in host memory, and leaves out those of a lease for which there
    is no page. It is used where a slot is in the arena and that is not pinned, and for everything while the pool is not
    mapped. `after`: a torch event, or what the backend's `mark` returned; copies begin behind it. None: what the pages
    hold is there.
    """

    pool: DevicePool
    layouts: Sequence[PagedLayout]
    pages: Sequence[Sequence[int]]
    host: BlockWriter | BlockReader
    first_block: int = 0
    after: Any = field(default=None, compare=False)

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.pages[0])

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        if not isinstance(self.host, BlockWriter):
            raise ValueError("destination: these pages are a source alone")
        self.host.write_blocks(first_block, blocks)

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        if not isinstance(self.host, BlockReader):
            raise ValueError("source: these pages are a destination alone")
        self.host.read_blocks(first_block, blocks)

    def of_blocks(self, numbers: np.ndarray) -> list[tuple[PagedLayout, list[int]]]:
        """For each page group its layout, and the page of each of these blocks, or NO_PAGE."""
        inside = (numbers >= self.first_block) & (numbers < self.end_block)
        found = []
        for layout, pages in zip(self.layouts, self.pages, strict=True):
            chosen = np.full(len(numbers), NO_PAGE, np.int64)
            chosen[inside] = np.asarray(pages, np.int64)[numbers[inside] - self.first_block]
            found.append((layout, chosen.tolist()))
        return found

    def parts(self, numbers: np.ndarray, offsets: np.ndarray) -> list[tuple[PagedLayout, list[int], list[int]]]:
        """For each page group its layout, the pages of the blocks `numbers`, and where their parts begin, given where
        the blocks do. What has no page is left out."""
        inside = (numbers >= self.first_block) & (numbers < self.end_block)
        places, begins = numbers[inside] - self.first_block, offsets[inside]
        found, begin = [], 0
        for layout, pages in zip(self.layouts, self.pages, strict=True):
            chosen = np.asarray(pages, np.int64)[places]
            kept = chosen != NO_PAGE
            found.append((layout, chosen[kept].tolist(), (begins[kept] + begin).tolist()))
            begin += layout.block_bytes
        return found
