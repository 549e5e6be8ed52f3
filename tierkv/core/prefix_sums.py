"""Numbers by place, and the sum behind a place: a Fenwick tree, in which both a change and a sum take log n steps.

Peter M. Fenwick, "A New Data Structure for Cumulative Frequency Tables", 1994.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixSums:
    """`size` places, numbered from 0; the first of them hold `values`, the others nothing."""

    def __init__(self, size: int, values: Sequence[int] = ()) -> None:
        self._tree = [0, *values] + [0] * (size - len(values))
        self.total = sum(values)
        for place in range(1, size + 1):  # what lies in front of a place is complete when it is reached
            above = place + (place & -place)
            if above <= size:
                self._tree[above] += self._tree[place]

    def add(self, place: int, change: int) -> None:
        self.total += change
        place += 1
        while place < len(self._tree):
            self._tree[place] += change
            place += place & -place

    def after(self, place: int) -> int:
        """The sum over all places behind this one."""
        up_to = 0
        place += 1
        while place:
            up_to += self._tree[place]
            place -= place & -place
        return self.total - up_to
