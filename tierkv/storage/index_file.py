"""The index's file, looked at before LMDB maps it: a page that is mapped but not in the file kills whoever touches it.

What LMDB 0.9 (data version 1) keeps in its first two pages, of which the one with the higher transaction id holds:

    0    u64 page number | u16 padding | u16 flags (0x08: a meta page) | u32 unused
    16   u32 magic | u32 version | u64 address | u64 map size
    40   two databases of 48 bytes, the first of which begins with u32: the page size
    136  u64 number of the last page in use | u64 transaction id

A page in use may lie beyond the end of an intact file: one that was taken and given back within one transaction is
never written. So the file is extended to its last page after each commit, and a shorter one is a truncated one.
"""

from __future__ import annotations

import os
import stat
import struct

ENVIRONMENT = "data.mdb"

_META = struct.Struct("<QHHI IIQQ I92x QQ")
_META_FLAG = 0x08
_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_PAGE_BYTES = tuple(2**power for power in range(9, 17))


def find_flaw(folder_fd: int) -> str:
    """Why LMDB must not open the file; empty if it may, and if there is none."""
    try:
        fd = os.open(ENVIRONMENT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        return ""
    except OSError as error:  # a symlink among others
        return f"{ENVIRONMENT}: {error.strerror}"
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return "it is not a regular file"
        if status.st_size == 0:
            return ""  # LMDB makes a new one of it
        return _find_flaw_in_metas(fd, status.st_size)
    finally:
        os.close(fd)


def extend_to(folder_fd: int, num_bytes: int) -> None:
    if os.stat(ENVIRONMENT, dir_fd=folder_fd, follow_symlinks=False).st_size < num_bytes:
        fd = os.open(ENVIRONMENT, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
        try:
            os.ftruncate(fd, num_bytes)
        finally:
            os.close(fd)


def exists(name: str, folder_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _find_flaw_in_metas(fd: int, file_bytes: int) -> str:
    first = os.pread(fd, _META.size, 0)
    if len(first) < _META.size:
        return f"it ends after {file_bytes} bytes, within its first page"
    _, _, _, _, magic, version, _, _, page_bytes, _, _ = _META.unpack(first)
    if (magic, version) != (_MAGIC, _DATA_VERSION):
        return "it is not an LMDB file of this version and machine"
    if page_bytes not in _PAGE_BYTES:
        return f"its pages are of {page_bytes} bytes"
    second = os.pread(fd, _META.size, page_bytes)
    if len(second) < _META.size:
        return f"it ends after {file_bytes} bytes, within its second page"
    newest, last_page = -1, 0
    for raw in (first, second):
        _, _, flags, _, magic, version, _, _, its_page_bytes, its_last_page, transaction = _META.unpack(raw)
        if not flags & _META_FLAG or (magic, version, its_page_bytes) != (_MAGIC, _DATA_VERSION, page_bytes):
            return "its first two pages are not what they should be"
        if transaction > newest:
            newest, last_page = transaction, its_last_page
    if file_bytes < (last_page + 1) * page_bytes:
        return f"it has {file_bytes} bytes of {(last_page + 1) * page_bytes}"
    return ""
