"""The memory of one incarnation, mapped into this process: the arena, and its generations read-only.

Neither mapping is inherited over fork (MADV_DONTFORK): a forked child must not be able to touch slots that its parent
holds grants for. Python's objects are inherited all the same, and one that is collected in the child would unmap an
address range that is the child's own by now. So the child keeps them for ever.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

from tierkv.client.prefault import Prefault

GENERATION_BYTES = 8

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class ArenaMap:
    """`readable` and `writable` are the arena as bytes, `generations` one u64 a page: the arena's, and behind them
    those of the pools of devices, where the node has any. Views of them keep the memory mapped. The descriptors may be
    closed once this is made. Raises OSError where the memory can't be mapped."""

    def __init__(self, arena_fd: int, generations_fd: int, *, arena_bytes: int, page_bytes: int) -> None:
        _require_size("arena", arena_fd, arena_bytes)
        _require_size("generations", generations_fd, arena_bytes // page_bytes * GENERATION_BYTES)
        generations_bytes = os.fstat(generations_fd).st_size // GENERATION_BYTES * GENERATION_BYTES
        self.arena_bytes = arena_bytes
        self.page_bytes = page_bytes
        self._arena = _map(arena_fd, arena_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            self._generations = _map(generations_fd, generations_bytes, mmap.PROT_READ)
        except OSError:
            self._arena.close()
            raise
        self.writable = np.frombuffer(self._arena, np.uint8)
        self.readable = np.frombuffer(memoryview(self._arena).toreadonly(), np.uint8)
        self.generations = np.frombuffer(self._generations, "<u8")
        self._prefault = Prefault(arena_fd, self.readable.ctypes.data, arena_bytes)

    def close(self) -> bool:
        """True once both are unmapped; False while a view of them is still in somebody's hands. Ask again later."""
        self._prefault.stop()
        nothing = np.empty(0, np.uint8)
        self.writable = self.readable = self.generations = nothing
        try:
            self._arena.close()
            self._generations.close()
        except BufferError:  # how mmap says that views are left
            return False
        return True


def _require_size(name: str, fd: int, expected: int) -> None:
    """Mapped memory behind the end of its file would kill this process at the first touch (SIGBUS)."""
    found = os.fstat(fd).st_size
    if not 0 < expected <= found:
        raise OSError(f"{name}: the node promised {expected} bytes and handed out {found}")


def _map(fd: int, num_bytes: int, protection: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=protection)
    mapped.madvise(mmap.MADV_DONTFORK)
    _mapped.add(mapped)
    return mapped


def _keep_in_child() -> None:
    for mapped in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))


os.register_at_fork(after_in_child=_keep_in_child)
