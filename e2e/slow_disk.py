"""A disk that writes nothing until it is let go, and takes its time then: `files=e2e.slow_disk:SlowDisk`.

The environment names a file that lets it go (SLOW_DISK_GO), and the seconds of a write (SLOW_DISK_SECONDS).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tierkv.workers.files import Files

WAIT_SECONDS = 60.0
POLL_SECONDS = 0.01


class SlowDisk(Files):
    def write(self, *args: Any) -> Any:
        deadline = time.monotonic() + WAIT_SECONDS
        while not Path(os.environ["SLOW_DISK_GO"]).exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)  # until the test lets it go
        time.sleep(float(os.environ["SLOW_DISK_SECONDS"]))  # what makes it slow
        return super().write(*args)
