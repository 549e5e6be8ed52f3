"""Where pools of devices begin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.addresses import pool_bases

PAGE = 4096


def test_without_devices_the_arena_is_all_there_is() -> None:
    assert pool_bases(10 * PAGE, 4 * PAGE, []) == [10 * PAGE]


@given(host=st.integers(1, 50), slab=st.integers(1, 9), devices=st.lists(st.integers(1, 50), max_size=4))
def test_pools_begin_at_slabs_and_lie_in_nothing_else(host: int, slab: int, devices: list[int]) -> None:
    *bases, end = pool_bases(host * PAGE, slab * PAGE, [pages * PAGE for pages in devices])
    ends = [host * PAGE, *(base + pages * PAGE for base, pages in zip(bases, devices, strict=True))]
    assert all(base % (slab * PAGE) == 0 for base in bases)
    assert all(before <= base < before + slab * PAGE for before, base in zip(ends, bases, strict=False))
    assert end == ends[-1]
