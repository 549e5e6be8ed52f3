from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator

import pytest

from tierkv.errors import ConfigError
from tierkv.node import arena as arena_module
from tierkv.node.arena import (
    PAGE_BYTES,
    SharedMemory,
    are_huge_pages_possible,
    make_arena,
    make_generations,
    open_read_only,
    populate,
    populate_stretches,
    seal_against_writers,
)

MIB = 2**20


@pytest.fixture
def arena() -> Iterator[SharedMemory]:
    memory = make_arena(4 * MIB)
    yield memory
    memory.close()


@pytest.fixture
def generations() -> Iterator[SharedMemory]:
    memory = make_generations(4 * MIB)
    yield memory
    memory.close()


def allocated_bytes(memory: SharedMemory) -> int:
    return os.fstat(memory.fd).st_blocks * 512


@pytest.mark.parametrize("num_bytes", [0, MIB, 16 * MIB])
def test_nobody_can_resize_the_arena_under_a_process_that_copies(arena: SharedMemory, num_bytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, num_bytes)


def test_the_seals_of_the_arena_are_final(arena: SharedMemory) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_pages_are_had_only_where_they_are_populated(arena: SharedMemory) -> None:
    assert allocated_bytes(arena) == 0
    populate(arena.fd, MIB, MIB, huge_pages=False)
    assert allocated_bytes(arena) == MIB
    populate(arena.fd, 0, 4 * MIB, huge_pages=True)
    assert allocated_bytes(arena) == 4 * MIB


@pytest.mark.parametrize("threads", [1, 3])
def test_several_threads_populate_neighbouring_stretches(
    arena: SharedMemory, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(arena_module, "STRETCH_BYTES", MIB)
    monkeypatch.setattr(arena_module, "POPULATING_THREADS", threads)
    had = 0
    while had < 4 * MIB - 4096:
        before, had = had, populate_stretches(arena.fd, had, 4 * MIB - 4096, huge_pages=False)
        assert had == min(4 * MIB - 4096, before + threads * MIB)
        assert allocated_bytes(arena) == had
    assert populate_stretches(arena.fd, had, had, huge_pages=False) == had


def test_a_kernel_without_the_populate_call_gets_pages_the_older_way(
    arena: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    populate(arena.fd, 0, 2 * MIB, huge_pages=False)
    assert allocated_bytes(arena) == 2 * MIB


@pytest.mark.scenario("B142", then="pages that can not be had are an error, never a SIGBUS")
def test_no_memory_is_an_error_that_names_the_setting(arena: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMemory:
        def madvise(self, *_: object) -> int:
            ctypes.set_errno(errno.ENOMEM)
            return -1

    monkeypatch.setattr(arena_module, "_libc", NoMemory())
    with pytest.raises(ConfigError, match="host_bytes"):
        populate(arena.fd, 0, MIB, huge_pages=True)


def test_a_size_that_the_kernel_will_not_account_for_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match="host_bytes"):
        make_arena(MIB)


def test_one_generation_for_each_page_of_the_arena(generations: SharedMemory) -> None:
    assert generations.num_bytes == 4 * MIB // PAGE_BYTES * 8


def test_a_client_can_read_generations_and_never_write_them(generations: SharedMemory) -> None:
    with mmap.mmap(generations.fd, generations.num_bytes) as front:
        seal_against_writers(generations.fd)
        front[8:16] = struct.pack("<Q", 7)
        fd = open_read_only(generations.fd)
        try:
            with mmap.mmap(fd, generations.num_bytes, prot=mmap.PROT_READ) as client:
                assert struct.unpack_from("<Q", client, 8) == (7,)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, generations.num_bytes)
        finally:
            os.close(fd)
        with pytest.raises(PermissionError):  # not even by way of the writable descriptor
            mmap.mmap(generations.fd, generations.num_bytes)


def test_huge_pages_are_asked_for_only_where_the_kernel_allows_them(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting, expected in [
        ("always within_size advise [never] deny force", False),
        ("always within_size [advise] never deny force", True),
        ("always within_size advise never [deny] force", False),
    ]:
        path = f"{tmp_path}/shmem_enabled"
        with open(path, "w") as file:
            file.write(setting)
        monkeypatch.setattr(arena_module, "_HUGE_PAGES_OF_SHARED_MEMORY", path)
        assert are_huge_pages_possible() is expected
    monkeypatch.setattr(arena_module, "_HUGE_PAGES_OF_SHARED_MEMORY", f"{tmp_path}/absent")
    assert are_huge_pages_possible() is False
