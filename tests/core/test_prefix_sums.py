from __future__ import annotations

import random

import pytest

from tierkv.core.prefix_sums import PrefixSums


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 100])
def test_the_sum_behind_each_place_is_that_of_a_list(size: int) -> None:
    draw = random.Random(size)
    values = [draw.randrange(-5, 50) for _ in range(draw.randrange(size + 1))]
    sums, plain = PrefixSums(size, values), values + [0] * (size - len(values))
    for _ in range(50):
        assert [sums.after(place) for place in range(size)] == [sum(plain[place + 1 :]) for place in range(size)]
        assert sums.total == sum(plain)
        place, change = draw.randrange(size), draw.randrange(-9, 9)
        sums.add(place, change)
        plain[place] += change
