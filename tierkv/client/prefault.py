"""Fills this process's page tables for the arena ahead of the first copy, in a thread.

The node has put every page of the arena in memory, but a process that maps it still takes a fault at its first touch of
each page, and with pages of 4 KiB a copy made of faults runs at a tenth of the speed of a plain one. Stretches that the
node hasn't populated yet (holes of the memfd) are left alone: whoever touches a hole first makes its page, and is
charged for it.
"""

from __future__ import annotations

import ctypes
import os
import threading

STRETCH_BYTES = 8 * 2**20
"""Between two looks at whether to stop: about a millisecond."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 5.0

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name it

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class Prefault:
    """Works on [address, address + num_bytes), the mapping of `fd`, which stays mapped until `stop` has returned.

    Pages of shared memory are mapped writable by a read fault already, and a read fault maps its neighbours along.
    The thread is a daemon, so that a program that forgets its client still ends.
    """

    def __init__(self, fd: int, address: int, num_bytes: int) -> None:
        self._fd = os.dup(fd)
        self._address = address
        self._num_bytes = num_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierkv client prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns within about a millisecond. Twice is fine."""
        self._stop.set()
        self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _run(self) -> None:
        done, pause = 0, FIRST_PAUSE_SECONDS
        while done < self._num_bytes:
            filled = min(os.lseek(self._fd, done, os.SEEK_HOLE), self._num_bytes)
            if filled == done:
                if self._stop.wait(pause):
                    return
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            elif not self._map(done, filled):
                return
            else:
                done, pause = filled, FIRST_PAUSE_SECONDS

    def _map(self, first: int, end: int) -> bool:
        """False when it is to stop, or the kernel doesn't know how: then pages are mapped as they are touched."""
        for start in range(first, end, STRETCH_BYTES):
            num_bytes = min(STRETCH_BYTES, end - start)
            if self._stop.is_set() or _libc.madvise(self._address + start, num_bytes, _MADV_POPULATE_READ) != 0:
                return False
        return True
