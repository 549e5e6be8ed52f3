"""Removing a file of a directory that nodes share, unless it was used: by any of them.

When it was used last is the file's mtime, which whoever uses it sets once in a while. Another node may set it in the
moment between looking and removing, so the file loses its name first, is looked at once more, and has it back if it
was used. In between it is a miss for others. A process that is killed there leaves a temp file, which goes as all do.

    stat -> rename to tmp/ -> stat -> unlink          it was not used
                                   -> link, unlink    it was: back, unless another file has the name by now
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tierkv.errors import ForeignFile, StorageError, UnknownFormat
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import remove_if_empty, require_ours
from tierkv.storage.names import TEMP, ExtentName
from tierkv.storage.stamp import NO_LINKS
from tierkv.storage.system_calls import call

__all__ = ["remove_unused", "Used"]

CLOCK_SECONDS = 2.0
"""What clocks of nodes and file servers may differ by without its being noticed."""


@dataclass(frozen=True, slots=True)
class Used:
    """The file stays."""

    last_used: float


def remove_unused(directory: DataDirectory, name: ExtentName, since: float, now: float) -> bool | Used:
    """Unlink a file of ours that was not used later than `since`; whether there was one. `now` is in seconds since
    1970: a use in the future was set by a clock that is wrong, and is taken back to now. Raises StorageError.

    What else has its name (a file of a newer version, a link) is left, and counts as not there.
    """
    *above, shelf = name.folder
    try:
        with directory.folder(tuple(above)) as namespace_fd:
            with directory.folder(name.folder) as folder_fd, directory.folder((TEMP,)) as temp_fd:
                removed = _remove(directory, name, folder_fd, temp_fd, since, now)
            remove_if_empty(namespace_fd, shelf)
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return False
    return removed


def _remove(
    directory: DataDirectory, name: ExtentName, folder_fd: int, temp_fd: int, since: float, now: float
) -> bool | Used:
    used = _use(folder_fd, name.file, since, now)
    if used is not None:
        return used
    try:
        require_ours(folder_fd, name.file)
    except (UnknownFormat, ForeignFile):
        return False
    aside = directory.new_temp_name()
    call("rename", os.rename, name.file, aside, src_dir_fd=folder_fd, dst_dir_fd=temp_fd)
    used = _use(temp_fd, aside, since, now)
    if used is not None and _put_back(directory, name, temp_fd, aside):
        return used
    directory.remove_temp(aside)
    return True


def _use(folder_fd: int, file: str, since: float, now: float) -> Used | None:
    """None where it was not used since. Raises StorageError."""
    used = call("stat", os.stat, file, dir_fd=folder_fd, follow_symlinks=False).st_mtime
    if used <= since:
        return None
    if used > now + CLOCK_SECONDS:
        call("utime", os.utime, file, (now, now), dir_fd=folder_fd, follow_symlinks=False)
    return Used(min(used, now))


def _put_back(directory: DataDirectory, name: ExtentName, temp_fd: int, aside: str) -> bool:
    """Whether it has its name again, or another file has it. Raises StorageError."""
    with directory.folder(name.folder, create=True) as folder_fd:
        try:
            call("link", os.link, aside, name.file, src_dir_fd=temp_fd, dst_dir_fd=folder_fd, follow_symlinks=False)
        except StorageError as error:
            if error.errno_name == "EEXIST":
                pass
            elif error.errno_name in NO_LINKS:
                call("rename", os.rename, aside, name.file, src_dir_fd=temp_fd, dst_dir_fd=folder_fd)
                return True
            else:
                return False
    directory.remove_temp(aside)
    return True
