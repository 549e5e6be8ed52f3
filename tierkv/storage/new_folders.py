"""Folders of the mode asked for, whatever the umask: also those on the way, or whoever may write to one of them could
put another directory in place of ours."""

from __future__ import annotations

import os
from pathlib import Path


def make_folders(path: Path, *, mode: int = 0o700) -> None:
    """Make `path` and what is missing above it. What is there already stays as it is. Raises OSError."""
    missing = []
    for folder in (path, *path.parents):
        if os.path.lexists(folder):
            break
        missing.append(folder)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            continue  # another process of this user is making its own beside it
        os.chmod(folder, mode)
