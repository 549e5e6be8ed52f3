from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from tierkv.client.arena import ArenaMap

PAGE = 4096


@pytest.fixture
def descriptors() -> Iterator[tuple[int, int]]:
    arena, generations = os.memfd_create("arena"), os.memfd_create("generations")
    os.ftruncate(arena, 4 * PAGE)
    os.ftruncate(generations, 4 * 8)
    yield arena, generations
    os.close(arena)
    os.close(generations)


def test_memory_is_shared_and_leases_see_it_read_only(descriptors: tuple[int, int]) -> None:
    with closing(ArenaMap(*descriptors, arena_bytes=4 * PAGE, page_bytes=PAGE)) as arena:
        arena.writable[5] = 7
        assert os.pread(descriptors[0], 6, 0)[5] == 7
        assert arena.readable[5] == 7
        assert len(arena.generations) == 4
        for read_only in (arena.readable, arena.generations):
            with pytest.raises(ValueError, match="read-only"):
                read_only[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                read_only.flags.writeable = True


def test_it_stays_mapped_while_a_view_is_in_use(descriptors: tuple[int, int]) -> None:
    arena = ArenaMap(*descriptors, arena_bytes=4 * PAGE, page_bytes=PAGE)
    view = arena.readable[PAGE:].reshape(3, PAGE)[:, :100]
    assert not arena.close()
    assert view[2, 99] == 0
    del view
    assert arena.close()
    assert arena.close()


def test_memory_that_is_smaller_than_promised_is_refused_before_it_is_touched(descriptors: tuple[int, int]) -> None:
    with pytest.raises(OSError, match="arena: the node promised"):
        ArenaMap(*descriptors, arena_bytes=5 * PAGE, page_bytes=PAGE)
    os.ftruncate(descriptors[1], 8)
    with pytest.raises(OSError, match="generations: the node promised"):
        ArenaMap(*descriptors, arena_bytes=4 * PAGE, page_bytes=PAGE)


def test_no_memory_at_all_is_refused(descriptors: tuple[int, int]) -> None:
    with pytest.raises(OSError, match="promised 0 bytes"):
        ArenaMap(*descriptors, arena_bytes=0, page_bytes=PAGE)


def test_a_mapping_is_not_inherited(descriptors: tuple[int, int]) -> None:
    with closing(ArenaMap(*descriptors, arena_bytes=4 * PAGE, page_bytes=PAGE)):
        flags = _flags_of_mapping("memfd:arena")
        assert "dc" in flags  # not copied on fork


def _flags_of_mapping(name: str) -> list[str]:
    found = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            found = name in line or found
            if found and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError(f"{name} is not mapped")
