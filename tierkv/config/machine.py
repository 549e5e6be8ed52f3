"""The machine, as far as defaults depend on it: memory, control group, file systems, environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tierkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Machine:
    """What the defaults are computed from. `file_system_bytes` gives the size of the file system that holds a path, or
    that will hold it once it is made."""

    memory_bytes: int
    cgroup_bytes: int | None
    file_system_bytes: Callable[[Path], int]
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Machine:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(memory_bytes, cgroup_limit(root), _file_system_bytes, environ)

    @property
    def limit_bytes(self) -> int:
        return min(self.memory_bytes, self.cgroup_bytes or self.memory_bytes)

    @property
    def limit_name(self) -> str:
        limited = self.cgroup_bytes is not None and self.cgroup_bytes < self.memory_bytes
        return "the memory limit of this control group" if limited else "the memory of this machine"


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """The smallest memory limit of the control groups this process is in, version 1 or 2; None without a limit."""
    limits = [limit for file in _limit_files(root) if (limit := _read_limit(file)) is not None]
    return min(limits, default=None)


def _limit_files(root: Path) -> list[Path]:
    """Limit files from the process's own group up to the root. Inside a container the path may be one of the
    host's, which isn't there: then its parents, up to the mount, are what counts."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no control groups on this machine
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        files += [mount / step / name for step in (group, *group.parents)]
    return files


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:  # the root group has no such file, and a foreign path isn't visible
        return None
    # Version 2 says "max" for no limit; version 1 says the largest number of pages that fits.
    return int(text) if text.isdecimal() and int(text) < 2**60 else None


def _file_system_bytes(path: Path) -> int:
    for candidate in (path, *path.parents):
        try:
            found = os.statvfs(candidate)
        except OSError:  # not there yet, or not ours to look at: the parent answers for it
            continue
        return found.f_blocks * found.f_frsize
    raise ConfigError("data_dir", f"{path} and no directory above it can be read; check its permissions")
