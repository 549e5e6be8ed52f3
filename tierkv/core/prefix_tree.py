"""The prefix tree: extents by the key of their first block, with parents by block key.

A walk compares an extent's packed keys with the next run of the prompt in one comparison, then goes on at the next
key: a step an extent, not a step a block. Each step stays in the group and behind the block before it, so that keys of
another group, or from the middle of a prompt, find nothing. Divergence in the middle of an extent needs no split: the
new branch is an extent whose parent key is the block it follows. Keys are chains rooted in the group, so one
dictionary serves all.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.core.extent import Branch, Extent
from tierkv.core.grants import Segment
from tierkv.core.keys import KEY_BYTES, split_keys


class PrefixTree:
    def __init__(self) -> None:
        self.heads: dict[bytes, Extent] = {}
        self._branches: dict[bytes, Branch] = {}
        self._bulk = False

    def __len__(self) -> int:
        return len(self.heads)

    def __iter__(self) -> Iterator[Extent]:
        return iter(self.heads.values())

    def walk(self, group: bytes, keys: bytes) -> list[Segment]:
        """The longest visible prefix of a prompt, as the stretches it takes in extents."""
        return self._walk_from(group, keys, 0)

    def places(self, group: bytes, keys: bytes) -> list[tuple[Extent, int] | None]:
        """For each block, its extent and index there, even behind a hole; None for blocks not in the tree."""
        num_blocks = len(keys) // KEY_BYTES
        places: list[tuple[Extent, int] | None] = [None] * num_blocks
        index = 0
        while index < num_blocks:
            for segment in self._walk_from(group, keys, index):
                for offset in range(segment.blocks):
                    places[segment.start + offset] = (segment.extent, offset)
                index = segment.start + segment.blocks
            index += 1  # the block at which the walk stopped is a hole
        return places

    def place(self, group: bytes, keys: bytes, index: int) -> tuple[Extent, int] | None:
        """Like `places`, for one block."""
        up_to = keys[: (index + 1) * KEY_BYTES]
        path = self._walk_from(group, up_to, 0)
        hole = path[-1].start + path[-1].blocks if path else 0
        if hole > index:
            return path[-1].extent, index - path[-1].start
        return None if self.knows_none(split_keys(up_to, hole)) else self.places(group, up_to)[index]

    def knows_none(self, block_keys: list[bytes]) -> bool:
        """No extent begins with one of these. If they are a prompt's from its first hole on, the tree has none of
        them: an extent that holds a key holds those before it, back to the key that heads it."""
        return self.heads.keys().isdisjoint(block_keys)

    def _walk_from(self, group: bytes, keys: bytes, index: int) -> list[Segment]:
        segments: list[Segment] = []
        offset = index * KEY_BYTES
        end = len(keys)
        while offset < end:
            extent = self.heads.get(keys[offset : offset + KEY_BYTES])
            parent = keys[offset - KEY_BYTES : offset] if offset else group
            if extent is None or extent.group != group or extent.parent != parent:
                break
            run = keys[offset : offset + len(extent.keys)]
            blocks = extent.num_blocks if run == extent.keys else _common_blocks(run, extent.keys)
            segments.append(Segment(extent, offset // KEY_BYTES, blocks))
            offset += blocks * KEY_BYTES
        return segments

    def add(self, extent: Extent, above: Extent | None, index: int) -> None:
        """Put an extent in, behind block `index` of `above`, if its parent is known (None: root or orphan)."""
        self.heads[extent.key] = extent
        extent.in_tree = True
        if extent.parent != extent.group:
            branch = self._branches.get(extent.parent)
            if branch is None:
                branch = self._branches[extent.parent] = Branch()
            if above is not None and branch.owner is None:
                self._own(branch, above, index)
            branch.add(extent)
            branch.count(extent, +1)
            extent.above = branch
        if not self._bulk:
            self._adopt(extent, 0)

    def grow(self, extent: Extent, keys: bytes) -> None:
        """Append blocks; whoever waited for one of them as a parent finds it here."""
        first = extent.num_blocks
        extent.keys += keys
        extent.num_blocks += len(keys) // KEY_BYTES
        self._adopt(extent, first)

    def cut(self, extent: Extent, num_blocks: int) -> None:
        """Forget the blocks from `num_blocks` on; what hangs behind them becomes an orphan."""
        for branch in [branch for branch in extent.branch_points if branch.index >= num_blocks]:
            self._disown(branch)
        extent.keys = extent.keys[: num_blocks * KEY_BYTES]
        extent.num_blocks = num_blocks

    def remove(self, extent: Extent) -> None:
        self.cut(extent, 0)
        del self.heads[extent.key]
        extent.in_tree = False
        branch = extent.above
        if branch is not None:
            branch.remove(extent)
            branch.count(extent, -1)
            self._forget_if_empty(extent.parent, branch)
            extent.above = None

    def begin_bulk(self) -> None:
        """Recovery adds children before parents: parents are found once, at the end."""
        self._bulk = True

    def end_bulk(self) -> None:
        self._bulk = False
        for extent in self.heads.values():
            self._adopt(extent, 0)

    def adopt(self, extent: Extent) -> list[Branch]:
        """Those that wait for one of its blocks, of whose parent nobody knew: they are its own now."""
        block_keys = split_keys(extent.keys)
        if self._branches.keys().isdisjoint(block_keys):
            return []
        waiting = []
        for index, key in enumerate(block_keys):
            branch = self._branches.get(key)
            if branch is not None and branch.owner is None:
                self._own(branch, extent, index)
                waiting.append(branch)
        return waiting

    def _adopt(self, extent: Extent, first: int) -> None:
        branches = self._branches
        block_keys = split_keys(extent.keys, first)
        if branches.keys().isdisjoint(block_keys):  # nearly always, and one call tells
            return
        for index, key in enumerate(block_keys, first):
            branch = branches.get(key)
            if branch is not None:
                self._own(branch, extent, index)

    def _own(self, branch: Branch, extent: Extent, index: int) -> None:
        self._disown(branch)
        branch.owner, branch.index = extent, index
        extent.add_branch(branch)

    @staticmethod
    def _disown(branch: Branch) -> None:
        if branch.owner is not None:
            branch.owner.remove_branch(branch)
        branch.owner, branch.index = None, -1

    def _forget_if_empty(self, parent: bytes, branch: Branch) -> None:
        if branch.kids:
            return
        self._disown(branch)
        self._branches.pop(parent, None)


def _common_blocks(left: bytes, right: bytes) -> int:
    """How many leading keys agree, at least one. Chained keys that differ once differ for ever after, so halving finds
    the place; keys that are no chain (a broken client's) are compared one by one."""
    low, high = 1, min(len(left), len(right)) // KEY_BYTES + 1
    while high - low > 1:
        middle = (low + high) // 2
        at = (middle - 1) * KEY_BYTES
        if left[at : at + KEY_BYTES] == right[at : at + KEY_BYTES]:
            low = middle
        else:
            high = middle
    while left[: low * KEY_BYTES] != right[: low * KEY_BYTES]:
        low -= 1
    return low
