"""What /proc says of a process: whether it is still the one that was started, what it holds, what it has mapped."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """`started` in clock ticks since boot: with the pid it names a process for good."""

    pid: int
    parent: int
    started: int
    cpu_seconds: float


def look(pid: int) -> ProcessStat | None:
    """None when it has ended, reaped or not."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = content.rpartition(")")[2].split()  # behind the name, which may hold anything
    if fields[0] in "ZX":
        return None
    return ProcessStat(pid, int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND)


def is_same(pid: int, started: int) -> bool:
    """Whether the process that was started then still runs."""
    stat = look(pid)
    return stat is not None and stat.started == started


def descendants(pid: int) -> list[ProcessStat]:
    """Its children, theirs, and so on."""
    everyone = [stat for name in os.listdir("/proc") if name.isdigit() and (stat := look(int(name))) is not None]
    found: list[ProcessStat] = []
    parents = {pid}
    while parents:
        children = [stat for stat in everyone if stat.parent in parents]
        found += children
        parents = {stat.pid for stat in children}
    return found


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_bytes(pid: int) -> int | None:
    """What it has touched, its own and shared memory, files aside; None when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem") if name in fields) or None


def arenas_of(pid: int | str) -> set[str]:
    """The inodes of arenas and generations that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has just ended, or is not ours
        return set()
    return {line.split()[4] for line in maps if "memfd:tierkv" in line}


def who_maps(arenas: set[str]) -> list[int]:
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and arenas_of(pid) & arenas]
