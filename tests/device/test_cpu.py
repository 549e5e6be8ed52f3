"""The CPU device: the calls of every backend, in host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from tierkv.device.backends import OwnPool, cpu_backend
from tierkv.device.cpu import CpuBackend
from tierkv.device.layouts import PagedLayout
from tierkv.device.memory import HostMemory, MemfdPool
from tierkv.errors import DeviceError
from tierkv.wire.pools import PoolKind

BLOCK = 64
SLOT = 4096
SLOTS = 4


@pytest.fixture
def pool() -> Iterator[MemfdPool]:
    made = MemfdPool.make(SLOTS * SLOT)
    yield made
    assert made.close()


def host(fill: int = 0) -> HostMemory:
    return HostMemory(np.full(SLOTS * SLOT, fill, np.uint8))


def test_what_is_uploaded_is_downloaded(pool: MemfdPool) -> None:
    backend = cpu_backend()
    source, target = host(), host()
    source.bytes[SLOT : SLOT + BLOCK] = 1
    source.bytes[2 * SLOT : 2 * SLOT + BLOCK] = 2
    assert backend.upload(source, [SLOT, 2 * SLOT], pool, [3 * SLOT, 0], BLOCK).wait(0)
    assert backend.download(pool, [0, 3 * SLOT], target, [0, SLOT], BLOCK).wait(0)
    assert target.bytes[:BLOCK].tolist() == [2] * BLOCK
    assert target.bytes[SLOT : SLOT + BLOCK].tolist() == [1] * BLOCK
    assert not target.bytes[BLOCK:SLOT].any()


def test_pages_go_to_a_pool_and_to_host_memory_alike(pool: MemfdPool) -> None:
    backend = cpu_backend()
    pages = np.arange(6 * BLOCK, dtype=np.uint8).reshape(6, BLOCK)
    layout, arena = PagedLayout.of([pages]), host()
    for slots in (pool, arena):
        backend.gather(layout, [5, 1], slots, [SLOT, 0])
        assert (slots.bytes[SLOT : SLOT + BLOCK] == pages[5]).all()
        back = np.zeros_like(pages)
        backend.scatter(slots, [0, SLOT], PagedLayout.of([back]), [2, 3])
        assert (back[2] == pages[1]).all()
        assert (back[3] == pages[5]).all()


def test_zeros_are_where_they_are_asked_for(pool: MemfdPool) -> None:
    pool.bytes[:] = 7
    cpu_backend().zero(pool, [(0, SLOT), (2 * SLOT, 5)])
    assert not pool.bytes[:SLOT].any()
    assert (pool.bytes[SLOT : 2 * SLOT] == 7).all()
    assert pool.bytes[2 * SLOT : 2 * SLOT + 6].tolist() == [0] * 5 + [7]


def test_nothing_is_touched_outside_of_memory(pool: MemfdPool) -> None:
    backend = CpuBackend()
    layout = PagedLayout.of([np.zeros((2, BLOCK), np.uint8)])
    end = SLOTS * SLOT
    for refused in (
        lambda: backend.gather(layout, [2], pool, [0]),
        lambda: backend.gather(layout, [-1], pool, [0]),
        lambda: backend.gather(layout, [0, 1], pool, [0]),
        lambda: backend.scatter(pool, [end - BLOCK + 1], layout, [0]),
        lambda: backend.scatter(pool, [-1], layout, [0]),
        lambda: backend.upload(host(), [end], pool, [0], 1),
        lambda: backend.upload(host(), [0], pool, [0], -1),
        lambda: backend.download(pool, [0], host(), [0, SLOT], BLOCK),
        lambda: backend.zero(pool, [(0, end + 1)]),
    ):
        with pytest.raises(ValueError, match=r"pages|slots|blocks|bytes"):
            refused()


def test_another_process_maps_the_pool_by_its_descriptor(pool: MemfdPool) -> None:
    assert isinstance(pool, OwnPool)
    theirs = cpu_backend().open_pool(PoolKind.MEMFD, pool.num_bytes, fd=pool.fd)
    pool.bytes[5] = 9
    assert isinstance(theirs, MemfdPool)
    assert theirs.bytes[5] == 9
    assert theirs.close()


def test_a_pool_is_unmapped_once_nothing_looks_at_it() -> None:
    made = MemfdPool.make(SLOT)
    view = made.bytes
    assert not made.close()
    del view
    assert made.close()


def test_a_pool_that_is_smaller_than_promised_is_refused(pool: MemfdPool) -> None:
    with pytest.raises(DeviceError, match="was promised"):
        cpu_backend().open_pool(PoolKind.MEMFD, pool.num_bytes + 1, fd=pool.fd)
    with pytest.raises(DeviceError, match="kind vmm"):
        cpu_backend().open_pool(PoolKind.VMM, pool.num_bytes, fd=pool.fd)


def test_nobody_takes_pages_away_from_under_a_copy(pool: MemfdPool) -> None:
    for num_bytes in (0, 2 * pool.num_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, num_bytes)


def test_a_pool_larger_than_memory_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"of 64\.0 TiB in host memory is more than there is") as refused:
        cpu_backend().make_pool(2**46)
    assert refused.value.reason == "larger_than_memory"


def test_a_forked_child_does_not_have_a_pool_that_was_opened(pool: MemfdPool) -> None:
    theirs = cpu_backend().open_pool(PoolKind.MEMFD, pool.num_bytes, fd=pool.fd)
    address = theirs.address
    child = os.fork()
    if child == 0:
        with open("/proc/self/maps") as maps:
            there = any(int(line.split("-")[0], 16) == address and "pool" in line for line in maps)
        os._exit(1 if there else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert theirs.close()


@pytest.mark.parametrize("bad", [np.zeros((2, 2), np.uint8), np.zeros(4, np.uint16), np.zeros(8, np.uint8)[::2]])
def test_host_memory_is_plain_bytes(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="not plain bytes"):
        HostMemory(bad)
