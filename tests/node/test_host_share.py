from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.slabs import SlabPool
from tierkv.errors import ConfigError
from tierkv.node import host_share
from tierkv.node.arena import PAGE_BYTES, STRETCH_BYTES
from tierkv.node.host_share import RETRY_SECONDS, HostShare
from tierkv.node.memory_room import MemoryRoom


class Arena:
    """An incarnation as far as its memory goes."""

    def __init__(self) -> None:
        self.populated_bytes = 0
        self.told: list[tuple[int, str]] = []
        self.fails = False

    def populate(self, limit_bytes: int) -> None:
        if self.fails:
            raise ConfigError("host_bytes", "no memory")
        assert limit_bytes % PAGE_BYTES == 0
        self.populated_bytes = min(limit_bytes, self.populated_bytes + STRETCH_BYTES)

    def tell_limit(self, problem: str, earlier_bytes: int) -> None:
        self.told.append((self.populated_bytes, problem))
        self.earlier_bytes = earlier_bytes


def grow(share: HostShare, arena: Arena) -> list[float | None]:
    calls: list[float | None] = []
    while not calls or calls[-1] == 0.0:
        calls.append(share.grow(arena, 0.0))  # type: ignore[arg-type]
    return calls


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> list[MemoryRoom]:
    rooms = [MemoryRoom(2**40, "this machine")]
    monkeypatch.setattr(host_share, "memory_room", lambda: rooms[-1])
    return rooms


def test_an_arena_grows_stretch_by_stretch_to_all_it_may_have() -> None:
    arena = Arena()
    calls = grow(HostShare(3 * STRETCH_BYTES - 4095), arena)
    assert calls == [0.0, 0.0, 0.0, None]
    assert [told for told, _ in arena.told] == [STRETCH_BYTES, 2 * STRETCH_BYTES, *[3 * STRETCH_BYTES - 4096] * 2]


def test_what_engines_of_earlier_fronts_hold_is_left_to_them_until_they_end() -> None:
    share = HostShare(3 * STRETCH_BYTES)
    share.hold(1, STRETCH_BYTES)
    share.hold(2, STRETCH_BYTES)
    arena = Arena()
    grow(share, arena)
    assert arena.populated_bytes == STRETCH_BYTES
    assert "still mapped by engines of 2 earlier front(s)" in arena.told[-1][1]
    assert share.let_go(1)
    assert not share.let_go(1)
    grow(share, arena)
    assert arena.populated_bytes == 2 * STRETCH_BYTES
    share.let_go(2)
    grow(share, arena)
    assert arena.told[-1] == (3 * STRETCH_BYTES, "")


def test_more_held_than_there_is_leaves_nothing() -> None:
    share = HostShare(STRETCH_BYTES)
    share.hold(1, STRETCH_BYTES)
    share.hold(2, STRETCH_BYTES)
    arena = Arena()
    assert grow(share, arena) == [None]
    assert arena.populated_bytes == 0


def test_a_machine_without_memory_is_asked_again_and_the_want_is_said(room: list[MemoryRoom]) -> None:
    room.append(MemoryRoom(4096, "this control group"))
    share, arena = HostShare(STRETCH_BYTES), Arena()
    assert grow(share, arena) == [RETRY_SECONDS]
    assert "this control group has no more" in arena.told[-1][1]
    room.append(MemoryRoom(2**40, "this control group"))
    arena.fails = True
    assert grow(share, arena) == [RETRY_SECONDS]
    assert "no memory" in arena.told[-1][1]
    arena.fails = False
    assert grow(share, arena) == [0.0, None]
    assert arena.told[-1] == (STRETCH_BYTES, "")


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_limit_in_bytes_is_a_limit_in_place_for_the_core(data: st.DataObject) -> None:
    """Pages beyond the limit have not been had: touching one could be the end of an engine."""
    slabs, slab_bytes = 8, 4 * PAGE_BYTES
    pool = SlabPool(slabs * slab_bytes, slab_bytes, [0] * (slabs * 4))
    pool.limit_bytes = data.draw(st.integers(0, slabs)) * slab_bytes
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["take", "give", "grow"])):
            case "take":
                size = data.draw(st.sampled_from([PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES]))
                slots = pool.allocate(size, data.draw(st.integers(1, 9)))
                assert all(slot + size <= pool.limit_bytes for slot in slots)
                if slots:
                    held.append(slots)
            case "give" if held:
                pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            case "grow":
                pool.limit_bytes = data.draw(st.integers(pool.limit_bytes // slab_bytes, slabs)) * slab_bytes
