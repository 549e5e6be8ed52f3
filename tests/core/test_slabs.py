"""Slots and slabs: never two owners of a byte, never more than the limit, every giving-up visible to a late reader."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.core.slabs import PAGE_BYTES, SlabPool
from tierkv.errors import BrokenInvariant

PAGE = PAGE_BYTES


def pool_of(pages: int, slab_pages: int) -> SlabPool:
    return SlabPool(pages * PAGE, slab_pages * PAGE, [0] * pages)


@given(st.integers(1, 10 * PAGE))
def test_a_slot_is_its_block_rounded_up_to_pages(block_bytes: int) -> None:
    slot_bytes = pool_of(1, 1).slot_bytes(block_bytes)
    assert slot_bytes % PAGE == 0
    assert block_bytes <= slot_bytes < block_bytes + PAGE


def test_whether_slots_of_several_sizes_can_be_had_together_is_told_before_they_are() -> None:
    pool = pool_of(8, 4)
    pool.allocate(PAGE, 1)  # the other slab is nobody's yet
    assert pool.has_all({PAGE: 3, 2 * PAGE: 2})
    assert pool.has_all({PAGE: 7})
    assert not pool.has_all({PAGE: 4, 2 * PAGE: 1})
    assert not pool.has_all({PAGE: 8})
    assert not pool.has_all({8 * PAGE: 1})
    assert pool.has_all({8 * PAGE: 0})


def test_slots_come_in_ascending_order_and_lie_together() -> None:
    pool = pool_of(8, 4)
    assert pool.allocate(PAGE, 6) == [index * PAGE for index in range(6)]
    pool.release([3 * PAGE, 1 * PAGE])
    assert pool.allocate(PAGE, 3) == [1 * PAGE, 3 * PAGE, 6 * PAGE]


def test_what_does_not_fit_in_a_slab_gets_nothing() -> None:
    pool = pool_of(8, 2)
    assert not pool.fits(3 * PAGE)
    assert pool.available(3 * PAGE) == 0
    assert pool.allocate(3 * PAGE, 1) == []
    assert pool.used_bytes == 0


def test_an_arena_smaller_than_a_slab_is_one_slab() -> None:
    pool = pool_of(3, 100)
    assert pool.allocate(PAGE, 5) == [0, PAGE, 2 * PAGE]


def test_an_arena_smaller_than_a_page_has_no_slots() -> None:
    pool = SlabPool(100, PAGE, [])
    assert pool.available(PAGE) == 0
    assert pool.allocate(PAGE, 1) == []


def test_an_empty_slab_serves_another_size() -> None:
    pool = pool_of(4, 4)
    slots = pool.allocate(PAGE, 4)
    assert pool.available(2 * PAGE) == 0
    pool.release(slots[1:])
    assert pool.allocate(2 * PAGE, 1) == []
    pool.release(slots[:1])
    assert pool.allocate(2 * PAGE, 2) == [0, 2 * PAGE]


@pytest.mark.scenario("B041", then="freeing a slot twice is an error that names it and changes nothing")
def test_a_slot_freed_twice_is_a_bug_and_says_so() -> None:
    pool = pool_of(4, 2)
    slots = pool.allocate(PAGE, 2)
    pool.release([slots[0]])
    with pytest.raises(BrokenInvariant, match="freed twice"):
        pool.release([slots[0]])
    pool.release([slots[1]])
    with pytest.raises(BrokenInvariant, match="freed twice"):
        pool.release([slots[1]])


def test_a_generation_moves_when_memory_is_given_up_and_only_then() -> None:
    generations = [7, 7, 7, 7]
    pool = SlabPool(4 * PAGE, 2 * PAGE, generations)
    (slot,) = pool.allocate(PAGE, 1)
    assert pool.generation(slot) == 7
    pool.release([slot])
    assert generations == [8, 7, 7, 7]
    assert pool.allocate(PAGE, 1) == [slot]
    assert pool.generation(slot) == 8


def test_a_lower_limit_takes_nothing_away_but_gives_no_new_slab() -> None:
    pool = pool_of(4, 1)
    slots = pool.allocate(PAGE, 3)
    pool.limit_bytes = 2 * PAGE
    assert pool.available(PAGE) == 0
    assert pool.allocate(PAGE, 1) == []
    pool.release(slots[:1])
    assert pool.available(PAGE) == 0
    pool.release(slots[1:2])
    assert pool.available(PAGE) == 1
    pool.limit_bytes = 4 * PAGE
    assert pool.available(PAGE) == 3


def test_slabs_of_other_sizes_come_emptiest_first() -> None:
    pool = pool_of(8, 4)
    small = pool.allocate(PAGE, 5)
    pool.release(small[1:4])
    assert pool.slabs_of_other_sizes(2 * PAGE) == [(0, 1), (4 * PAGE, 1)]
    pool.release([small[0]])
    assert pool.slabs_of_other_sizes(2 * PAGE) == [(4 * PAGE, 1)]
    assert pool.slabs_of_other_sizes(PAGE) == []
    assert pool.used_slots() == {4 * PAGE}


def test_a_slab_that_is_filled_and_drained_again_and_again_leaves_nothing_behind() -> None:
    pool = pool_of(4, 2)
    pool.allocate(PAGE, 1)
    for _ in range(100):
        pool.release(pool.allocate(PAGE, 1))
    assert sum(len(bases) for bases in pool._open.values()) <= 2


def test_slots_of_a_slab_that_comes_late_are_in_order_too() -> None:
    pool = pool_of(6, 3)
    low = pool.allocate(PAGE, 4)[:3]
    pool.release(low)
    assert pool.allocate(PAGE, 3) == [0, 4 * PAGE, 5 * PAGE]


@dataclass(frozen=True)
class Held:
    slot: int
    slot_bytes: int
    generation: int


class SlabMachine(RuleBasedStateMachine):
    """Three slot sizes in an arena of twelve pages, beside a list of who has what."""

    sizes = st.sampled_from([PAGE, 2 * PAGE, 3 * PAGE])

    def __init__(self) -> None:
        super().__init__()
        self.generations = [0] * 14
        self.pool = SlabPool(14 * PAGE, 3 * PAGE, self.generations)  # two pages are left over
        self.held: list[Held] = []

    @rule(slot_bytes=sizes, count=st.integers(0, 5))
    def allocate(self, slot_bytes: int, count: int) -> None:
        available, before = self.pool.available(slot_bytes), list(self.generations)
        slots = self.pool.allocate(slot_bytes, count)
        assert len(slots) == min(count, available)
        assert slots == sorted(slots)
        assert self.generations == before
        self.held += [Held(slot, slot_bytes, self.pool.generation(slot)) for slot in slots]

    @precondition(lambda self: self.held)
    @rule(draw=st.data())
    def release(self, draw: st.DataObject) -> None:
        leaving = draw.draw(st.lists(st.sampled_from(self.held), unique=True, max_size=4))
        self.pool.release([held.slot for held in leaving])
        for held in leaving:
            self.held.remove(held)
            assert self.pool.generation(held.slot) == held.generation + 1

    @rule(pages=st.integers(0, 14))
    def limit(self, pages: int) -> None:
        self.pool.limit_bytes = pages * PAGE

    @invariant()
    def no_byte_has_two_owners(self) -> None:
        pages: set[int] = set()
        for held in self.held:
            assert held.slot % PAGE == 0
            mine = set(range(held.slot // PAGE, (held.slot + held.slot_bytes) // PAGE))
            assert mine <= set(range(14))
            assert not pages & mine
            pages |= mine

    @invariant()
    def nobody_s_generation_moves_while_it_holds(self) -> None:
        assert all(self.pool.generation(held.slot) == held.generation for held in self.held)

    @invariant()
    def the_sums_are_what_is_held(self) -> None:
        assert self.pool.used_bytes == sum(held.slot_bytes for held in self.held)
        assert self.pool.used_slots() == {held.slot for held in self.held}

    def teardown(self) -> None:
        self.pool.limit_bytes = 14 * PAGE
        self.pool.release([held.slot for held in self.held])
        assert self.pool.used_bytes == 0
        assert [self.pool.available(pages * PAGE) for pages in (1, 2, 3)] == [12, 4, 4]


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


@settings(derandomize=True)
@given(st.integers(0, 40), st.integers(1, 12), st.integers(0, 40))
def test_slabs_in_use_never_exceed_the_limit(pages: int, slab_pages: int, limit_pages: int) -> None:
    pool = pool_of(pages, slab_pages)
    pool.limit_bytes = min(pages, limit_pages) * PAGE
    assert len(pool.allocate(PAGE, 100)) * PAGE <= pool.limit_bytes


def test_all_free_memory_that_was_in_use_before_can_be_taken_and_given_back() -> None:
    generations = [0] * 16
    pool = SlabPool(16 * PAGE_BYTES, 4 * PAGE_BYTES, generations)
    first = pool.allocate(PAGE_BYTES, 5)
    pool.release(first[1:])  # the second slab is nobody's again, the third was never used
    taken = dict(pool.take_free())
    assert taken == {PAGE_BYTES: [PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES], 4 * PAGE_BYTES: [4 * PAGE_BYTES]}
    assert pool.available(PAGE_BYTES) == 8
    assert pool.take_free() == []
    before = pool.generation(PAGE_BYTES)
    pool.retire([PAGE_BYTES])
    assert pool.generation(PAGE_BYTES) == before + 1
    for slots in taken.values():
        pool.release(slots)
    assert (pool.available(PAGE_BYTES), pool.used_bytes) == (15, PAGE_BYTES)


def test_a_slab_keeps_its_size_while_the_rest_behind_its_last_slot_is_wiped() -> None:
    pool = SlabPool(8 * PAGE_BYTES, 4 * PAGE_BYTES, [0] * 8)
    slots = pool.allocate(3 * PAGE_BYTES, 1)
    tails = pool.pin_tails()
    assert tails == [(3 * PAGE_BYTES, PAGE_BYTES)]
    assert pool.pin_tails() == []
    pool.release(slots)
    assert pool.allocate(PAGE_BYTES, 8) == [4 * PAGE_BYTES + at * PAGE_BYTES for at in range(4)]
    pool.unpin_tails(tails)
    assert pool.allocate(PAGE_BYTES, 8) == [at * PAGE_BYTES for at in range(4)]
