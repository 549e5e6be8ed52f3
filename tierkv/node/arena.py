"""Memory that several processes map: the arena, and the generations of its slots.

    arena         memfd of its final size from the start, sealed against being resized, so that no peer can take pages
                  away from under a process that copies (that would be SIGBUS). Its pages are had stretch by stretch,
                  by `populate`, before anybody may touch them: no memory is an error at start, not a signal later
    generations   memfd of one u64 for each page of the arena and of the pools of devices behind it; the front writes,
                  everybody else reads. What no slot has used yet takes no memory

The pages are charged to the process that populates them, so to the node and its memory limit, not to an engine.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from tierkv.errors import ConfigError

PAGE_BYTES = 4096
GENERATION_BYTES = 8
STRETCH_BYTES = 16 * 2**20
"""What one thread populates in one go: some ten milliseconds."""

POPULATING_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1; the fcntl module does not name it
_HUGE_PAGES_OF_SHARED_MEMORY = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


class SharedMemory:
    """A memfd of fixed size. Owns its descriptor; mappings of it, here or elsewhere, outlive `close`."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError("host_bytes", f"{num_bytes} bytes can't be had: {error.strerror}") from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def make_arena(num_bytes: int) -> SharedMemory:
    """Reserves addresses only; see `populate`."""
    memory = SharedMemory("tierkv arena", num_bytes)
    fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    return memory


def make_generations(address_bytes: int) -> SharedMemory:
    """Of all addresses that slots can have, all zero. Not yet sealed against writers: the front does that once it has
    its own mapping."""
    return SharedMemory("tierkv generations", -(-address_bytes // PAGE_BYTES) * GENERATION_BYTES)


def seal_against_writers(fd: int) -> None:
    """From here on nobody can map it writable or write to it; mappings there are keep working. Older kernels can't:
    there the read-only descriptor that clients get has to do."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def open_read_only(fd: int) -> int:
    """A second open file of the same memory, that can't be mapped writable. The caller owns it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def populate(fd: int, first_byte: int, num_bytes: int, *, huge_pages: bool) -> None:
    """Have the pages of a stretch, zeroed, charged and in memory, or raise ConfigError("host_bytes").

    Never SIGBUS: the kernel is asked for pages by a call that can fail, before they are touched.
    """
    with mmap.mmap(fd, num_bytes, offset=first_byte) as mapping:
        anchor = ctypes.c_char.from_buffer(mapping)
        try:
            address = ctypes.addressof(anchor)
            if huge_pages:
                _libc.madvise(address, num_bytes, _MADV_HUGEPAGE)  # advice; where it isn't taken, pages are small
            if _libc.madvise(address, num_bytes, _MADV_POPULATE_WRITE) != 0:
                problem = ctypes.get_errno()
                if problem != errno.EINVAL:
                    raise ConfigError("host_bytes", f"no memory for the arena at {first_byte}: {os.strerror(problem)}")
                _populate_by_hand(fd, first_byte, num_bytes, mapping)
        finally:
            del anchor


def populate_stretches(fd: int, first_byte: int, limit: int, *, huge_pages: bool) -> int:
    """`populate` from `first_byte` on, one stretch for each thread, not beyond `limit`; both are whole pages. Returns
    where it stopped. Zeroing is bound by a core's speed, a gigabyte or two a second."""
    last = min(limit, first_byte + POPULATING_THREADS * STRETCH_BYTES)
    parts = [(start, min(STRETCH_BYTES, last - start)) for start in range(first_byte, last, STRETCH_BYTES)]
    if len(parts) == 1:
        populate(fd, *parts[0], huge_pages=huge_pages)
    elif parts:
        with ThreadPoolExecutor(len(parts), thread_name_prefix="populate") as pool:
            for done in [pool.submit(populate, fd, *part, huge_pages=huge_pages) for part in parts]:
                done.result()
    return last


def are_huge_pages_possible() -> bool:
    """Whether the kernel gives huge pages to shared memory that asks for them."""
    try:
        with open(_HUGE_PAGES_OF_SHARED_MEMORY) as file:
            setting = file.read()
    except OSError:
        return False
    return "[never]" not in setting and "[deny]" not in setting


def _populate_by_hand(fd: int, first_byte: int, num_bytes: int, mapping: mmap.mmap) -> None:
    try:
        os.posix_fallocate(fd, first_byte, num_bytes)
    except OSError as error:
        raise ConfigError("host_bytes", f"no memory for the arena at {first_byte}: {error.strerror}") from error
    for offset in range(0, num_bytes, PAGE_BYTES):
        mapping[offset] = 0
