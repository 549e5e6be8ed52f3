"""A worker, of NVMe or of the disk tier, whose system calls fail when a test says so, for tierkv.torture.node_with (as
`worker` or `disk_worker`); and the test's end of it.

    disk = SickDisk(tmp_path / "sick")                       # before the node starts; its path is in SICK_DISK
    disk.fail("pwritev", errno.EIO)                          # from now on, every call
    disk.fail("pwritev", errno.EIO, times=1)
    disk.hang("fdatasync")                                   # calls wait until `heal`
    disk.failed                                              # how many have failed since
    disk.heal()

Both ends map one page of a file, so that steering costs no system call that could itself be one that fails. Nothing but
the functions of `os` is replaced; the worker's health looks twenty times a second instead of once.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE_BYTES = 4096
VARIABLE = "SICK_DISK"
HANG = -1
HEALTH_SECONDS = 0.05

_ORDER = struct.Struct("<qqq16s")  # number of the order, errno (HANG), calls that are to fail, operation
_FAILED = struct.Struct("<q")
_FAILED_AT = 2048
ALWAYS = 2**62

OPERATIONS = (
    "open",
    "pwritev",
    "preadv",
    "pread",
    "fdatasync",
    "fsync",
    "rename",
    "unlink",
    "fstatvfs",
    "mkdir",
    "scandir",
    "listdir",
    "stat",
    "fstat",
    "write",
    "read",
    "ftruncate",
    "utime",
    "rmdir",
)


class SickDisk:
    """The test's end. Close it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(PAGE_BYTES))
        self.path = path
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        self._number = 0

    def fail(self, operation: str, number: int, *, times: int = ALWAYS) -> None:
        assert operation in OPERATIONS
        self._number += 1
        _FAILED.pack_into(self._page, _FAILED_AT, 0)
        _ORDER.pack_into(self._page, 0, self._number, number, times, operation.encode())

    def hang(self, operation: str) -> None:
        self.fail(operation, HANG)

    def heal(self) -> None:
        self._number += 1
        _ORDER.pack_into(self._page, 0, self._number, 0, 0, b"")

    @property
    def failed(self) -> int:
        return int(_FAILED.unpack_from(self._page, _FAILED_AT)[0])

    def close(self) -> None:
        self._page.close()


class _Faults:
    """The worker's end."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._number = 0
        self._left = 0

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        told_as = name.encode().ljust(16, b"\0")

        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._take(told_as)
            if number == HANG:
                while self._take(told_as, count=False) == HANG:
                    time.sleep(0.01)  # until the test heals the disk, or kills the process
            elif number:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return call

    def _take(self, told_as: bytes, *, count: bool = True) -> int:
        """The errno with which this call is to fail; 0: it is not."""
        order, number, times, operation = _ORDER.unpack_from(self._page, 0)
        if operation != told_as:
            return 0
        with self._lock:
            if order != self._number:
                self._number, self._left = order, times
            if self._left <= 0:
                return 0
            if count:
                self._left -= 1
                failed = _FAILED.unpack_from(self._page, _FAILED_AT)[0]
                _FAILED.pack_into(self._page, _FAILED_AT, failed + 1)
        return int(number)


def run_worker() -> int:
    from tierkv.workers import disk, storage

    with Path(os.environ[VARIABLE]).open("r+b") as file:
        faults = _Faults(mmap.mmap(file.fileno(), PAGE_BYTES))
    for name in OPERATIONS:
        setattr(os, name, faults.wrap(name, getattr(os, name)))
    if '"disk_dir"' in sys.argv[1]:
        disk.DiskWorker = functools.partial(disk.DiskWorker, health_seconds=HEALTH_SECONDS)  # type: ignore[assignment,misc]
        return disk.main(sys.argv[1:])
    quick = functools.partial(storage.StorageWorker, health_seconds=HEALTH_SECONDS)
    storage.StorageWorker = quick  # type: ignore[assignment,misc]
    return storage.main(sys.argv[1:])


if __name__ == "__main__":
    os._exit(run_worker())
