"""Whether files are still what a process loaded that didn't look at them first: told by their times.

Nobody can set the ctime of a file, a folder or a link. So what has not changed since before a process started is what
that process found, whenever it loaded it. Looked at are

    the files, what they are links to, and every link on the way       content or target changed
    the folder itself                                                  files were added, renamed or removed
    the folders above it                                               moved away, and others put in their place

A folder above counts as moved when its ctime is later than its mtime: entries that come and go there set both alike.
Clocks are those of the file system's machine and of this one; up to MARGIN_SECONDS between them are forgiven.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from tierkv.errors import WeightsUnreadable

MARGIN_SECONDS = 2.0


def process_started_ns() -> int:
    """Wall clock time at which this process started."""
    return int(psutil.Process().create_time() * 1e9)


def find_change(root: Path, names: Iterable[str], *, before_ns: int) -> str | None:
    """What changed of `root` (a folder, or one file) and of the files with these names in it, after `before_ns` or so
    shortly before it that it can't be told; None when all of it is older. Raises WeightsUnreadable."""
    limit_ns = before_ns - int(MARGIN_SECONDS * 1e9)
    absolute = Path(os.path.abspath(root))
    looked_at: set[Path] = set()
    for path in (absolute, *(absolute / name for name in names)):
        for changed in _changes(path, absolute, limit_ns, looked_at):
            return changed
    return None


def _changes(path: Path, root: Path, limit_ns: int, looked_at: set[Path]) -> Iterator[str]:
    """At this path, at what it is a link to, and on the way there."""
    for here in (path, *path.parents):
        if here in looked_at:
            continue
        looked_at.add(here)
        found = _lstat(here)
        is_above = here != path and not here.is_relative_to(root)
        if _is_young(found, limit_ns, is_above=is_above):
            yield f"{here} changed at {_as_time(found)}"
        if stat.S_ISLNK(found.st_mode):
            # Not normpath: ".." behind a link leads out of what it is a link to.
            target = Path(os.path.realpath(here.parent), os.readlink(here))
            yield from _changes(target, root, limit_ns, looked_at)


def _is_young(found: os.stat_result, limit_ns: int, *, is_above: bool) -> bool:
    if is_above and stat.S_ISDIR(found.st_mode):
        return found.st_ctime_ns >= limit_ns and found.st_ctime_ns > found.st_mtime_ns
    return max(found.st_ctime_ns, found.st_mtime_ns) >= limit_ns


def _lstat(path: Path) -> os.stat_result:
    try:
        return os.lstat(path)
    except OSError as error:
        raise WeightsUnreadable(f"{path} can't be read: {error.strerror}") from error


def _as_time(found: os.stat_result) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(found.st_ctime, found.st_mtime)))
