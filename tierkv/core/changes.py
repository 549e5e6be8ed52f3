"""What has changed about extents since somebody looked: leases, seals, purges and warm-ups may be due for it."""

from __future__ import annotations

from tierkv.core.extent import Extent
from tierkv.core.ledger import Ledger
from tierkv.core.reasons import Reason


class Changes:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.progressed: list[Extent] = []
        """Extents whose file or host copies changed."""
        self.read_problems: dict[Extent, Reason] = {}
        """Of those in `progressed`: why less is read than was wanted."""

    def note(self, extent: Extent) -> None:
        """Whether an extent has a file decides whether it may go, and whether its parent may."""
        ledger = self._ledger
        ledger.settle_pins(extent)
        ledger.reconsider(extent)
        if extent.above is not None and extent.above.owner is not None:
            ledger.reconsider(extent.above.owner)
        self.progressed.append(extent)
