"""A machine that is the same on every machine."""

from __future__ import annotations

from tierkv.config import GiB, Machine


def machine(
    *, memory_bytes: int = 32 * GiB, cgroup_bytes: int | None = None, disk_bytes: int = 1000 * GiB, environ=None
) -> Machine:
    return Machine(memory_bytes, cgroup_bytes, lambda path: disk_bytes, environ or {"XDG_RUNTIME_DIR": "/run/user/7"})
