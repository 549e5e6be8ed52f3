"""Files whose writes a test can hold, and that are well otherwise: `files=e2e.held_files:HeldFiles`."""

from __future__ import annotations

from tierkv.core.instructions import Write
from tierkv.torture.barriers import reach
from tierkv.workers.files import Files


class HeldFiles(Files):
    def reached(self, stage: str, write: Write) -> None:
        reach(stage)
