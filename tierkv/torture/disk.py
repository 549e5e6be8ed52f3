"""The disk of a node under torture: how it is minded at the moment, and a quota at the border to the operating system.

The director writes the mood, a small JSON file, and the storage worker looks at it with each operation. Of the system
calls that take room the mood may refuse those that would exceed a quota, or all.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from tierkv.storage import system_calls
from tierkv.torture.barriers import FOLDER

P = ParamSpec("P")
T = TypeVar("T")

MOOD = "disk.json"
TAKES_ROOM = ("pwritev", "write", "fdatasync")


class Mood(msgspec.Struct, frozen=True, kw_only=True):
    """`error_part`: of the operations on extents so many fail, wherever they are, with EIO. `quota_bytes`: what the
    data directory may take before writing fails with `errno_name`; None: as much as there is."""

    error_part: float = 0.0
    quota_bytes: int | None = None
    errno_name: str = "EDQUOT"


def set_mood(folder: Path, mood: Mood) -> None:
    """For all workers that are told of `folder`, from their next operation on."""
    fresh = folder / f"{MOOD}.new"
    fresh.write_bytes(msgspec.json.encode(mood))
    fresh.replace(folder / MOOD)


class MoodReader:
    """A worker's side."""

    def __init__(self) -> None:
        self._path = Path(os.environ[FOLDER]) / MOOD if FOLDER in os.environ else None
        self._stamp = (0, 0)
        self._mood = Mood()

    def now(self) -> Mood:
        if self._path is None:
            return self._mood
        try:
            status = os.stat(self._path)
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp != self._stamp:
                self._mood = msgspec.json.decode(self._path.read_bytes(), type=Mood)
                self._stamp = stamp
        except FileNotFoundError:
            self._mood, self._stamp = Mood(), (0, 0)
        return self._mood


class Quota:
    """Stands where every call on a file passes (`storage.system_calls.call`)."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._moods = MoodReader()

    def call(self, operation: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        mood = self._moods.now()
        if mood.quota_bytes is not None and operation in TAKES_ROOM and used_bytes(self._data_dir) >= mood.quota_bytes:
            number = getattr(errno, mood.errno_name)
            raise system_calls.translate(operation, OSError(number, f"{os.strerror(number)} (torture)"))
        return _real_call(operation, function, *args, **kwargs)

    def install(self) -> None:
        """In every module of this process that has taken `call` by name."""
        for name, module in list(sys.modules.items()):
            if name.startswith("tierkv.") and getattr(module, "call", None) is _real_call:
                module.call = self.call  # type: ignore[attr-defined]


_real_call = system_calls.call


def used_bytes(folder: Path) -> int:
    """What all files below it take on disk."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(root, file)).st_blocks * 512
            except FileNotFoundError:
                continue  # removed between the listing and the look
    return total
