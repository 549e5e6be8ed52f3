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
from collections.abc import Iterator
from pathlib import Path

import psutil

from tierkv.errors import WeightsUnreadable

MARGIN_SECONDS = 2.0


def process_started_ns() -> int:
    """Wall clock time at which this process started."""
    return int(psutil.Process().create_time() * 1e9)


def find_change(root: Path, names: Iterator[str] | tuple[str, ...], *, before_ns: int) -> str | None:
    """The first thing at or below `root` (a folder, or one file) that changed after `before_ns` or so shortly before it
    that it can't be told; None when all of it is older. Raises WeightsUnreadable."""
    limit_ns = before_ns - int(MARGIN_SECONDS * 1e9)
    return next((told for told in _changes(root, tuple(names), limit_ns)), None)


def _changes(root: Path, names: tuple[str, ...], limit_ns: int) -> Iterator[str]:
    absolute = Path(os.path.abspath(root))
    for path in (absolute / name for name in names):
        yield from _judge_chain(path, limit_ns, strict_above=absolute)
    yield from _judge_chain(absolute, limit_ns, strict_above=absolute)


def _judge_chain(path: Path, limit_ns: int, *, strict_above: Path) -> Iterator[str]:
    """The path itself, what it is a link to, and all that lies on the way there."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        found = _lstat(here)
        strict = here == path or here.is_relative_to(strict_above)
        if _is_young(found, limit_ns, strict=strict):
            yield f"{here} changed at {_as_time(found.st_ctime_ns)}"
        if stat.S_ISLNK(found.st_mode):
            target = Path(os.path.normpath(here.parent / os.readlink(here)))
            yield from _judge_chain(target, limit_ns, strict_above=strict_above)
        if here.parent != here:
            waiting.append(here.parent)


def _is_young(found: os.stat_result, limit_ns: int, *, strict: bool) -> bool:
    youngest = max(found.st_ctime_ns, found.st_mtime_ns)
    if youngest < limit_ns:
        return False
    if strict or not stat.S_ISDIR(found.st_mode):
        return True
    return found.st_ctime_ns >= limit_ns and found.st_ctime_ns > found.st_mtime_ns


def _lstat(path: Path) -> os.stat_result:
    try:
        return os.lstat(path)
    except OSError as error:
        raise WeightsUnreadable(f"{path} can't be read: {error.strerror}") from error


def _as_time(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(nanoseconds / 1e9))
