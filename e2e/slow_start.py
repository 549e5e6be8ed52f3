"""A storage worker whose recovery takes as long as a directory of a million files: it says how far it is, without end.

For tierkv.torture.node_with (`worker=e2e.slow_start`).
"""

from __future__ import annotations

import sys
import time
from typing import Any

from tierkv.core.instructions import RecoveryProgress
from tierkv.storage import recovery
from tierkv.workers import storage

FILES = 1_000_000


def recover_without_end(*_arguments: Any, emit: recovery.Emit, **_options: Any) -> None:
    for done in range(1, FILES):
        emit(RecoveryProgress("reading headers", done, FILES))
        time.sleep(0.05)  # a disk that is slow, not a wait for anything


if __name__ == "__main__":
    storage.recover = recover_without_end  # type: ignore[assignment]
    sys.exit(storage.main(sys.argv[1:]))
