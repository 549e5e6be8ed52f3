"""The prefix tree against a set of keys, and its cases one by one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.core.extent import Extent
from tierkv.core.keys import KEY_BYTES, chain_keys, key_at, pack_tokens
from tierkv.core.prefix_tree import PrefixTree

GROUP = b"g" * 32


def keys_of(*tokens: int) -> bytes:
    """A prompt of one-token blocks."""
    return chain_keys(GROUP, pack_tokens(tokens), 1)


def plant(tree: PrefixTree, keys: bytes, first: int, end: int, *, host: bool = False) -> Extent:
    """Blocks [first, end) of the prompt as one extent, the way a commit makes it: head first, then block by block."""
    parent = key_at(keys, first - 1) if first else GROUP
    extent = Extent(group=GROUP, key=key_at(keys, first), parent=parent, first_token=first, ranks=1, created=0.0)
    above = tree.places(GROUP, keys)[first - 1] if first else None
    if host:
        extent.append_slots(0, [0])
    extent.keys, extent.num_blocks = extent.key, 1
    tree.add(extent, *(above or (None, 0)))
    for index in range(first + 1, end):
        tree.grow(extent, key_at(keys, index))
    return extent


def shape(tree: PrefixTree, keys: bytes) -> list[tuple[int, int]]:
    return [(segment.start, segment.blocks) for segment in tree.walk(GROUP, keys)]


def test_an_empty_tree_and_an_empty_prompt_have_no_prefix() -> None:
    tree = PrefixTree()
    assert tree.walk(GROUP, keys_of(1, 2)) == []
    plant(tree, keys_of(1), 0, 1)
    assert tree.walk(GROUP, b"") == []
    assert tree.places(GROUP, b"") == []


def test_a_walk_takes_a_step_an_extent() -> None:
    tree, keys = PrefixTree(), keys_of(1, 2, 3, 4, 5)
    plant(tree, keys, 0, 2)
    plant(tree, keys, 2, 5)
    assert shape(tree, keys) == [(0, 2), (2, 3)]
    assert shape(tree, keys[: 4 * KEY_BYTES]) == [(0, 2), (2, 2)]
    assert shape(tree, keys + keys_of(9)) == [(0, 2), (2, 3)]


def test_divergence_in_the_middle_of_an_extent_needs_no_split() -> None:
    tree, stem, branch = PrefixTree(), keys_of(1, 2, 3, 4), keys_of(1, 2, 8, 9)
    whole = plant(tree, stem, 0, 4)
    child = plant(tree, branch, 2, 4)
    assert shape(tree, branch) == [(0, 2), (2, 2)]
    assert shape(tree, stem) == [(0, 4)]
    assert child.above is whole.branch_at(1)
    assert child.above is not None
    assert child.above.owner is whole
    assert not child.is_orphan


def test_divergence_at_every_depth_is_found_by_halving() -> None:
    tree, stem = PrefixTree(), keys_of(*range(33))
    plant(tree, stem, 0, 33)
    for depth in range(1, 33):
        other = stem[: depth * KEY_BYTES] + keys_of(*range(100, 140))
        assert shape(tree, other) == [(0, depth)]


def test_a_hole_ends_the_walk_but_not_the_search_behind_it() -> None:
    tree, keys = PrefixTree(), keys_of(1, 2, 3, 4, 5, 6)
    near, far = plant(tree, keys, 0, 2), plant(tree, keys, 3, 5)
    assert shape(tree, keys) == [(0, 2)]
    assert tree.places(GROUP, keys) == [(near, 0), (near, 1), None, (far, 0), (far, 1), None]


def test_an_orphan_is_adopted_by_a_parent_with_other_boundaries() -> None:
    tree, keys = PrefixTree(), keys_of(1, 2, 3, 4)
    orphan = plant(tree, keys, 2, 4)
    assert orphan.is_orphan
    assert shape(tree, keys) == []
    plant(tree, keys, 0, 1)
    assert orphan.is_orphan
    parent = plant(tree, keys, 1, 2)
    assert not orphan.is_orphan
    assert parent.branch_points[0].kids == (orphan,)
    assert shape(tree, keys) == [(0, 1), (1, 1), (2, 2)]


def test_an_orphan_is_adopted_when_its_parent_grows() -> None:
    tree, keys = PrefixTree(), keys_of(1, 2, 3)
    orphan = plant(tree, keys, 2, 3)
    grower = plant(tree, keys, 0, 1)
    assert orphan.is_orphan
    tree.grow(grower, key_at(keys, 1))
    assert not orphan.is_orphan
    assert shape(tree, keys) == [(0, 2), (2, 1)]


def test_a_cut_orphans_what_hangs_behind_it_and_a_return_adopts_it_again() -> None:
    tree, keys = PrefixTree(), keys_of(1, 2, 3, 4)
    stem = plant(tree, keys, 0, 3)
    child = plant(tree, keys, 3, 4)
    sibling = plant(tree, keys_of(1, 7), 1, 2)
    tree.cut(stem, 1)
    assert child.is_orphan
    assert not sibling.is_orphan
    assert shape(tree, keys) == [(0, 1)]
    plant(tree, keys, 1, 3)
    assert not child.is_orphan
    assert shape(tree, keys) == [(0, 1), (1, 2), (3, 1)]


def test_children_of_a_removed_extent_stay_as_orphans_and_are_forgotten_with_the_last() -> None:
    tree, keys = PrefixTree(), keys_of(1, 2)
    stem = plant(tree, keys, 0, 1)
    children = [plant(tree, keys_of(1, token), 1, 2) for token in (2, 3)]
    tree.remove(stem)
    assert not stem.in_tree
    assert [child.is_orphan for child in children] == [True, True]
    for child in children:
        tree.remove(child)
    assert len(tree) == 0
    assert tree._branches == {}


def test_a_first_block_is_never_an_orphan() -> None:
    tree = PrefixTree()
    assert not plant(tree, keys_of(1), 0, 1).is_orphan


def test_children_with_host_blocks_are_counted_at_their_branch() -> None:
    tree, keys = PrefixTree(), keys_of(1, 2)
    stem = plant(tree, keys, 0, 1)
    warm = plant(tree, keys, 1, 2, host=True)
    plant(tree, keys_of(1, 3), 1, 2)
    assert stem.branch_points[0].host_kids == 1
    tree.remove(warm)
    assert stem.branch_points[0].host_kids == 0


def test_in_bulk_children_may_come_before_their_parents() -> None:
    tree, keys = PrefixTree(), keys_of(1, 2, 3, 4)
    tree.begin_bulk()
    last = plant(tree, keys, 3, 4)
    middle = plant(tree, keys, 1, 3)
    plant(tree, keys, 0, 1)
    tree.end_bulk()
    assert [last.is_orphan, middle.is_orphan] == [False, False]
    assert shape(tree, keys) == [(0, 1), (1, 2), (3, 1)]


class TreeMachine(RuleBasedStateMachine):
    """A tree grown and cut at random, beside the set of keys that are in it.

    Each key is in one extent at most, as the core promises; then a prefix is usable exactly as far as its keys are in
    the set.
    """

    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.in_bulk = False

    @property
    def present(self) -> dict[bytes, tuple[Extent, int]]:
        return {e.block_key(i): (e, i) for e in self.tree for i in range(e.num_blocks)}

    @rule(tokens=prompts, first=st.integers(0, 5), length=st.integers(1, 4), host=st.booleans())
    def add(self, tokens: list[int], first: int, length: int, host: bool) -> None:
        keys, present = keys_of(*tokens), self.present
        end = first
        while end < min(first + length, len(tokens)) and key_at(keys, end) not in present:
            end += 1
        if end > first and not (self.in_bulk and end > first + 1):
            plant(self.tree, keys, first, end, host=host)

    @precondition(lambda self: self.present)
    @rule(draw=st.data(), token=st.integers(0, 1))
    def grow(self, draw: st.DataObject, token: int) -> None:
        extent = draw.draw(st.sampled_from(list(self.tree)))
        key = chain_keys(extent.block_key(extent.num_blocks - 1), pack_tokens([token]), 1)
        if key not in self.present and not self.in_bulk:
            self.tree.grow(extent, key)

    @precondition(lambda self: self.present)
    @rule(draw=st.data(), keep=st.integers(1, 4))
    def cut(self, draw: st.DataObject, keep: int) -> None:
        extent = draw.draw(st.sampled_from(list(self.tree)))
        if not self.in_bulk:
            self.tree.cut(extent, min(keep, extent.num_blocks))

    @precondition(lambda self: self.present)
    @rule(draw=st.data())
    def remove(self, draw: st.DataObject) -> None:
        if not self.in_bulk:
            self.tree.remove(draw.draw(st.sampled_from(list(self.tree))))

    @precondition(lambda self: not self.in_bulk)
    @rule()
    def begin_bulk(self) -> None:
        self.tree.begin_bulk()
        self.in_bulk = True

    @precondition(lambda self: self.in_bulk)
    @rule()
    def end_bulk(self) -> None:
        self.tree.end_bulk()
        self.in_bulk = False

    @rule(tokens=prompts)
    def look(self, tokens: list[int]) -> None:
        keys = keys_of(*tokens)
        known = [self.present.get(key_at(keys, index)) for index in range(len(tokens))]
        segments = self.tree.walk(GROUP, keys)
        reached = sum(segment.blocks for segment in segments)
        assert reached == (known.index(None) if None in known else len(known))
        assert [segment.start for segment in segments] == [
            sum(before.blocks for before in segments[:index]) for index in range(len(segments))
        ]
        assert self.tree.places(GROUP, keys) == known

    @invariant()
    def every_extent_hangs_where_its_parent_key_is(self) -> None:
        present = self.present
        assert sum(extent.num_blocks for extent in self.tree) == len(present)
        for extent in self.tree:
            assert self.tree.heads[extent.key] is extent
            assert extent.in_tree
            if extent.parent == GROUP:
                assert extent.above is None
                continue
            branch = self.tree._branches[extent.parent]
            assert extent.above is branch
            assert extent in branch.kids
            assert branch.host_kids == sum(kid.longest_host_blocks > 0 for kid in branch.kids)
            if self.in_bulk:
                continue
            owner, index = present.get(extent.parent, (None, -1))
            assert (branch.owner, branch.index) == (owner, index)
            assert extent.is_orphan == (owner is None)
        in_use = {extent.parent for extent in self.tree} - {GROUP}
        assert set(self.tree._branches) == in_use
        for extent in self.tree:
            assert len({branch.index for branch in extent.branch_points}) == len(extent.branch_points)
            for branch in extent.branch_points:
                assert branch.owner is extent
                assert self.tree._branches[extent.block_key(branch.index)] is branch


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
