"""Places inside a node's processes where one of them can be held until it is killed, or let go.

Whoever directs a torture arms a stage; the first process that comes there takes the barrier and stays until it is
released or dead. What the processes and the director share is a folder, which the environment names.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER = "TORTURE_FOLDER"
POLL_SECONDS = 0.005


class Barriers:
    """The director's side. One stage is armed at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def arm(self, stage: str) -> None:
        _armed(self._folder, stage).touch()

    def is_reached(self, stage: str) -> bool:
        return _reached(self._folder, stage).exists()

    def clear(self) -> None:
        """Nothing is armed, and nobody is held."""
        for pattern in ("*.armed", "*.reached"):
            for path in self._folder.glob(pattern):
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
        time.sleep(POLL_SECONDS)  # until the director lets it go, kills it, or is gone with its folder


def is_armed(stage: str) -> bool:
    return FOLDER in os.environ and _armed(Path(os.environ[FOLDER]), stage).exists()


def _armed(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.armed"


def _reached(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.reached"
