"""File operations of a storage worker that can be held at each stage of a purge, for tierkv.torture.node_with."""

from __future__ import annotations

from tierkv.torture.barriers import reach
from tierkv.workers.files import Files


class HeldPurges(Files):
    def purge_reached(self, stage: str, purge: bytes) -> None:
        reach(stage)
