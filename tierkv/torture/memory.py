"""Does a process that lives long take more and more memory?"""

from __future__ import annotations

import time

from tierkv.torture.processes import memory_bytes

SETTLED_SECONDS = 10.0
"""After so long a process has what it works with."""

MOST_GROWTH_BYTES = 48 * 2**20
"""More than a busy process gains for good reasons at these sizes (more extents, fuller pools), and less than what
arenas or blocks that are never given back come to."""


class MemoryWatch:
    def __init__(self, most_growth_bytes: int = MOST_GROWTH_BYTES) -> None:
        self._most = most_growth_bytes
        self._seen: dict[int, float] = {}
        self._settled: dict[int, int] = {}

    def look(self, pids: dict[str, int]) -> list[str]:
        """Who has grown too much since it had settled, in words."""
        now = time.monotonic()
        problems = []
        for name, pid in pids.items():
            if now - self._seen.setdefault(pid, now) < SETTLED_SECONDS:
                continue
            found = memory_bytes(pid)
            if found is None:
                continue
            before = self._settled.setdefault(pid, found)
            if found - before > self._most:
                lived = now - self._seen[pid]
                problems.append(f"{name} has grown from {before:,} to {found:,} bytes within {lived:.0f} s")
        return problems
