"""Places inside a node's processes where one of them can be held until it is killed, or let go.

A harness arms a stage; the first process that comes there takes the barrier and stays until it is released or dead.

    e2e.node_with  files=e2e.chaos_barriers:HeldFiles  worker=e2e.chaos_worker  front=e2e.chaos_front

What the processes and the harness share is a folder, which the environment names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e.chaos_bytes import GARBAGE
from tierkv.core.instructions import Read, Write
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome, Verified
from tierkv.storage.names import ExtentName, Parts
from tierkv.workers.files import Files

FOLDER = "CHAOS_BARRIERS"
POLL_SECONDS = 0.005


class Barriers:
    """The harness's side. One stage is armed at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def arm(self, stage: str) -> None:
        _armed(self._folder, stage).touch()

    def is_reached(self, stage: str) -> bool:
        return _reached(self._folder, stage).exists()

    def clear(self) -> None:
        """Nothing is armed, and nobody is held."""
        for path in self._folder.iterdir():
            path.unlink(missing_ok=True)


def reach(stage: str) -> None:
    """This thread is at `stage`: it stays if somebody waits for that."""
    if FOLDER not in os.environ:
        return
    folder = Path(os.environ[FOLDER])
    try:
        os.rename(_armed(folder, stage), _reached(folder, stage))
    except FileNotFoundError:
        return
    while _reached(folder, stage).exists():
        time.sleep(POLL_SECONDS)  # until the harness lets it go, or kills it


def is_armed(stage: str) -> bool:
    return FOLDER in os.environ and _armed(Path(os.environ[FOLDER]), stage).exists()


def _armed(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.armed"


def _reached(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.reached"


class HeldFiles(Files):
    """The real files, with a barrier before and after everything that a crash could tear apart."""

    def reached(self, stage: str, write: Write) -> None:
        reach(stage)

    def read(self, directory: DataDirectory, arena: memoryview, read: Read, identity: Any) -> ReadOutcome:
        if is_armed("read_half"):
            for slot in read.slots:  # as far as a read got that was cut short
                arena[slot : slot + len(GARBAGE)] = GARBAGE
            reach("read_half")
        outcome = super().read(directory, arena, read, identity)
        reach("read_done")
        return outcome

    def verify(self, directory: DataDirectory, name: ExtentName, pause: Callable[[int], None]) -> Verified:
        reach("scrubbing")
        return super().verify(directory, name, pause)

    def remove(self, directory: DataDirectory, name: ExtentName) -> bool:
        reach("before_remove")
        was_there = super().remove(directory, name)
        reach("removed")
        return was_there

    def flush(self, directory: DataDirectory, folder: Parts) -> None:
        reach("before_flush")
        super().flush(directory, folder)
        reach("flushed")
