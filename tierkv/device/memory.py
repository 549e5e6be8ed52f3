"""Host memory as copies see it, and a pool that lies in a memfd: what stands for a GPU's where there is none.

A pool that another process made is mapped without being inherited over fork (MADV_DONTFORK), as the arena is.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Any

import numpy as np

from tierkv.errors import DeviceError
from tierkv.wire.pools import PoolKind

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class HostMemory:
    """Memory of this process, as bytes: the arena, or where an engine wants blocks. Keeps it alive."""

    def __init__(self, memory: np.ndarray) -> None:
        if memory.ndim != 1 or memory.dtype != np.uint8 or not memory.flags.c_contiguous:
            raise ValueError(f"not plain bytes: {memory.dtype}{memory.shape}")
        self.bytes = memory
        self.address = int(memory.ctypes.data)
        self.num_bytes = int(memory.nbytes)

    @classmethod
    def of(cls, buffer: Any) -> HostMemory:
        """Of a contiguous buffer, without a copy."""
        return cls(np.frombuffer(buffer, np.uint8))


class MemfdPool(HostMemory):
    """A pool in host memory. `fd` is open where this process has made it."""

    kind = PoolKind.MEMFD
    handle = b""
    problem = ""

    def __init__(self, mapped: mmap.mmap, fd: int = -1) -> None:
        super().__init__(np.frombuffer(mapped, np.uint8))
        self._memory = mapped
        self.fd = fd

    @classmethod
    def make(cls, num_bytes: int) -> MemfdPool:
        """Sealed against being resized, so that nobody can take pages away from under a copy. They come as they are
        touched. Raises DeviceError."""
        from tierkv.config.machine import Machine  # noqa: PLC0415 - an engine, which makes none, need not load it
        from tierkv.config.sizes import human_size  # noqa: PLC0415 - as above

        limit = Machine.here().limit_bytes
        if num_bytes > limit:
            wanted = f"a pool of {human_size(num_bytes)} in host memory"
            raise DeviceError("larger_than_memory", f"{wanted} is more than there is ({human_size(limit)})")
        fd = os.memfd_create("tierkv pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(mmap.mmap(fd, num_bytes), fd)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise DeviceError("out_of_memory", f"no pool of {human_size(num_bytes)} in host memory: {error}") from error

    @classmethod
    def open(cls, fd: int, num_bytes: int) -> MemfdPool:
        """Of another process; `fd` stays the caller's. Raises DeviceError."""
        try:
            found = os.fstat(fd).st_size
            if not 0 < num_bytes <= found:  # what lies behind the end would kill this process at the first touch
                raise DeviceError("failed", f"a pool of {num_bytes} bytes was promised, its memory has {found}")
            mapped = mmap.mmap(fd, num_bytes)
        except OSError as error:
            raise DeviceError("failed", f"the pool can't be mapped: {error}") from error
        mapped.madvise(mmap.MADV_DONTFORK)
        _mapped.add(mapped)
        return cls(mapped)

    def close(self) -> bool:
        self.bytes = np.empty(0, np.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        try:
            self._memory.close()
        except BufferError:  # how mmap says that a copy still has a view of it
            return False
        return True


def _keep_in_child() -> None:
    """In a forked child the range is the child's own by now: unmapping it there would take away something else."""
    for mapped in _mapped:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))


os.register_at_fork(after_in_child=_keep_in_child)
