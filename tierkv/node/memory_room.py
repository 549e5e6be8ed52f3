"""How much memory may be taken now: of the machine, and of each control group above this process.

Asked before any page of the arena is had, because a control group that runs out kills a process instead of refusing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tierkv.config.sizes import MiB
from tierkv.errors import ConfigError

RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """Bytes that can be had, and of whom: the scarcest of machine and control groups."""

    num_bytes: int
    name: str


def memory_room(root: Path = Path("/")) -> MemoryRoom:
    machine = MemoryRoom(_read_table(root / "proc/meminfo", ":")["MemAvailable"] * 1024, "this machine")
    return min([machine, *_group_rooms(root)], key=lambda room: room.num_bytes)


def require_memory(
    num_bytes: int,
    wait_seconds: float,
    *,
    room: Callable[[], MemoryRoom] = memory_room,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until `num_bytes` can be had: engines of a node that was just killed may still be letting go of its arena.
    Raises ConfigError("host_bytes") with what is needed and what there is, before anything was touched."""
    deadline = time.monotonic() + wait_seconds
    while (found := room()).num_bytes < num_bytes:
        if time.monotonic() >= deadline:
            raise ConfigError(
                "host_bytes",
                f"{num_bytes // MiB} MiB are needed and {found.num_bytes // MiB} MiB are available on {found.name}; "
                f"write less, or stop what else uses memory",
            )
        pause(RETRY_SECONDS)


def _group_rooms(root: Path) -> Iterator[MemoryRoom]:
    """Inside a container the path may be one of the host's, which isn't there: then its parents count."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no control groups on this machine
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = Path(path.lstrip("/"))
        for step in (group, *group.parents):
            if not controllers:
                folder, names = root / "sys/fs/cgroup" / step, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                folder = root / "sys/fs/cgroup/memory" / step
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            if (room := _group_room(folder, *names)) is not None:
                yield room


def _group_room(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> MemoryRoom | None:
    """Page cache that nobody used lately is given back by the kernel before it refuses, so it counts as room."""
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        reclaimable = _read_table(folder / "memory.stat", " ").get(reclaimable_name, 0)
    except OSError:  # the root group has no such files, and a foreign path isn't visible
        return None
    if not limit.isdecimal() or int(limit) >= 2**60:  # no limit: "max", or the largest number of pages that fits
        return None
    return MemoryRoom(max(0, int(limit) - max(0, usage - reclaimable)), "this control group")


def _read_table(file: Path, separator: str) -> dict[str, int]:
    rows = (line.split(separator, 1) for line in file.read_text().splitlines() if separator in line)
    return {name: int(rest.split()[0]) for name, rest in rows}
