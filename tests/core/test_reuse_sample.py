"""The sample of blocks by itself: exact where it has them all, bounded where there are more, and nobody's keys are kept
that were to be forgotten."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import pytest

from tests.core.simulation import PAGE, make_group
from tierkv.core.ledger import Group, Ledger, Limits
from tierkv.core.reuse_sample import ReuseSample, Seen

LIMITS = Limits(
    host_bytes=PAGE,
    slab_bytes=PAGE,
    extent_bytes=PAGE,
    nvme_bytes=0,
    seal_after_seconds=1.0,
    session_bytes=PAGE,
    inflight_writes=1,
    inflight_reads=1,
    page_bytes=PAGE,
)


def group_of(*, salt: str = "", block_bytes: int = PAGE, ranks: int = 1) -> Group:
    return Ledger(LIMITS, [0]).add_group(make_group(salt=salt, block_bytes=block_bytes, ranks=ranks))


def key(block: object) -> bytes:
    return blake2b(repr(block).encode(), digest_size=32).digest()


def path(blocks: Sequence[object]) -> bytes:
    """Keys of a path: each block is what it is behind those before it."""
    return b"".join(key(tuple(blocks[: index + 1])) for index in range(len(blocks)))


GROUP = group_of()


def needs(sample: ReuseSample, blocks: str, now: float = 0.0) -> list[int | None]:
    """In blocks."""
    return [None if need is None else need // PAGE for _, need in sample.use(GROUP, path(blocks), now)]


def test_a_block_needs_itself_and_what_was_used_since() -> None:
    sample = ReuseSample()
    assert needs(sample, "ab") == [None, None]
    assert needs(sample, "xyz") == [None, None, None]
    assert needs(sample, "abc") == [4, 5, None]  # of a path the deepest is the oldest
    assert needs(sample, "ab") == [1, 2]


def test_what_was_generated_and_stored_is_there_when_it_is_asked_for() -> None:
    sample = ReuseSample()
    needs(sample, "ab")
    sample.store(GROUP, path("abc"), 0.0)
    assert needs(sample, "abc") == [2, 3, 1]


def test_blocks_of_several_sizes_and_ranks_count_as_they_are() -> None:
    large, sample = group_of(salt="large", block_bytes=10 * PAGE, ranks=2), ReuseSample()
    needs(sample, "a")
    sample.use(large, path("xy"), 0.0)
    assert needs(sample, "a") == [1 + 2 * 20]


def test_at_rate_one_it_is_what_a_stack_of_all_blocks_says() -> None:
    draw, sample, stack = random.Random(4), ReuseSample(most=500), []
    for _ in range(3_000):  # more steps than there are places for: they are numbered anew now and then
        blocks = "".join(draw.choices("abc", k=draw.randrange(1, 6)))
        used = [key(tuple(blocks[: index + 1])) for index in range(len(blocks))]
        expected = [stack.index(one) + 1 if one in stack else None for one in used]
        assert needs(sample, blocks) == expected
        stack = used + [one for one in stack if one not in used]


def test_it_holds_no_more_than_it_may_and_estimates_what_it_does_not_hold() -> None:
    sample = ReuseSample(most=200)
    for number in range(1_000):
        sample.use(GROUP, path([number, *"abcd"]), float(number))
    assert len(sample) <= 200
    assert 0.02 < sample.rate < 0.05
    assert sample.seen_bytes == pytest.approx(5_000 * PAGE, rel=0.3)


def test_a_rate_that_sinks_forgets_blocks_and_takes_their_bytes_along() -> None:
    """What the sums hold is what the blocks that are left take."""
    sample = ReuseSample(most=64)
    for number in range(400):
        sample.use(GROUP, path([number % 90, *"xyz"[: number % 4]]), float(number))
    assert sample.blocks_by_group() == {GROUP: len(sample)}
    assert sample.seen_bytes == int(len(sample) * PAGE / sample.rate)


def test_two_samples_of_one_rate_see_the_same_blocks() -> None:
    one, other = ReuseSample(rate=0.25), ReuseSample(rate=0.25)
    seen = one.use(GROUP, path("abcdefgh" * 10), 0.0)
    assert 0 < len(seen) < 80
    assert other.use(GROUP, path("abcdefgh" * 10), 0.0) == seen


@pytest.mark.parametrize("rate", [0.9, 0.3, 1 / 256, 1 / 300, 0.0001])
def test_a_rate_takes_such_a_part_of_all_keys(rate: float) -> None:
    draw = random.Random(1)
    keys = draw.randbytes(32 * 100_000)
    expected = sum(keys[at : at + 8] < int(rate * 2**64).to_bytes(8, "big") for at in range(0, len(keys), 32))
    assert len(ReuseSample(rate=rate).use(GROUP, keys, 0.0)) == expected
    assert expected == pytest.approx(rate * 100_000, abs=4 * (rate * 100_000) ** 0.5 + 1)


def test_what_nobody_has_used_for_long_is_new_again() -> None:
    sample = ReuseSample()
    needs(sample, "ab", now=1.0)
    needs(sample, "xy", now=5.0)
    sample.forget_unused(5.0)
    assert len(sample) == 2
    assert needs(sample, "xy", now=6.0) == [1, 2]
    assert needs(sample, "ab", now=6.0) == [None, None]


def test_groups_are_forgotten_with_all_of_their_keys() -> None:
    other, sample = group_of(salt="other"), ReuseSample()
    needs(sample, "ab")
    sample.use(other, path("xyz"), 0.0)
    sample.forget(frozenset({other.spec.group}))
    assert len(sample) == 2
    assert needs(sample, "ab") == [1, 2]
    assert sample.use(other, path("x"), 0.0) == [Seen(0, None)]


def test_a_client_that_names_a_block_twice_harms_nobody() -> None:
    sample, twice = ReuseSample(), key("a") + key("b") + key("a")
    for _ in range(3):
        sample.use(GROUP, twice, 0.0)
    assert sample.use(GROUP, twice, 0.0) == [Seen(0, PAGE), Seen(1, 2 * PAGE)]
    assert sample.seen_bytes == 2 * PAGE
