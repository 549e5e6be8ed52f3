"""Clocks that tests set: the wall clock and the one that only goes forward, each by itself.

In one process:      clock = FakeClock(); clock.pass_(5); clock.step(-DAY); NodeClock(..., monotonic=clock.monotonic)
In other processes:  skew = Skew(folder); skew.environment(env) -> Python processes started with it read their clocks
                     through it; skew.step(DAY) steps `time.time` in all of them, skew.jump(60) moves `time.monotonic`
                     ahead, as it is after all of them were stopped for a minute.

The kernel's own waiting (poll, a lock with a timeout) goes by its clock, as when an administrator sets the time.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

DAY = 86_400.0

_FILE = "TESTS_CLOCK_SKEW"
_OFFSETS = struct.Struct("<dd")

_SITE = "from tests.faults.clock import install\n\ninstall()\n"


class FakeClock:
    """Stands still. `wall` may be stepped either way; `monotonic` only passes."""

    def __init__(self, wall: float = 1_700_000_000.0, monotonic: float = 1_000.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def wall(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def pass_(self, seconds: float) -> None:
        """Time goes by, on both."""
        self._wall += seconds
        self._monotonic += seconds

    def step(self, seconds: float) -> None:
        """Somebody sets the wall clock."""
        self._wall += seconds


class Skew:
    """Two offsets in a file that the processes under test have mapped. Owns the mapping until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(_SITE)
        self._path = folder / "offsets"
        self._path.write_bytes(_OFFSETS.pack(0.0, 0.0))
        with self._path.open("r+b") as file:
            self._offsets = mmap.mmap(file.fileno(), _OFFSETS.size)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([str(self._folder), environment.get("PYTHONPATH", "")])
        return {**environment, "PYTHONPATH": path, _FILE: str(self._path)}

    def step(self, seconds: float) -> None:
        wall, monotonic = _OFFSETS.unpack(self._offsets)
        _OFFSETS.pack_into(self._offsets, 0, wall + seconds, monotonic)

    def jump(self, seconds: float) -> None:
        assert seconds >= 0, "a monotonic clock goes forward"
        wall, monotonic = _OFFSETS.unpack(self._offsets)
        _OFFSETS.pack_into(self._offsets, 0, wall + seconds, monotonic + seconds)

    def close(self) -> None:
        self._offsets.close()


def install() -> None:
    """In a process under test, before anything has taken a clock by name."""
    with open(os.environ[_FILE], "rb") as file:
        offsets = mmap.mmap(file.fileno(), _OFFSETS.size, prot=mmap.PROT_READ)
    real_time, real_monotonic = time.time, time.monotonic

    def wall() -> float:
        return real_time() + float(_OFFSETS.unpack(offsets)[0])

    time.time = wall
    time.time_ns = lambda: int(wall() * 1e9)
    time.monotonic = lambda: real_monotonic() + float(_OFFSETS.unpack(offsets)[1])
