from __future__ import annotations

import pytest

from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.integrations.connector.prefix import MOST_TRIES, Prefix

ROOT = bytes(range(32))
BLOCK = 4
TOKENS = list(range(100, 140))


def prefix_of(tokens: list[int], extras: dict[int, list[bytes]] | None = None) -> Prefix:
    return Prefix(ROOT, BLOCK, lambda begin, end: tokens[begin:end], extras or {})


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_at_least_one_token_is_left_to_compute(tokens: int, blocks: int) -> None:
    assert prefix_of(TOKENS).loadable_blocks(tokens) == blocks


def test_keys_are_those_of_the_whole_prompt_in_whatever_pieces_they_are_asked_for() -> None:
    extras = {2: [b"an image"]}
    prefix = prefix_of(TOKENS, extras)
    whole = chain_keys(ROOT, pack_tokens(TOKENS), BLOCK, extras=extras)
    for blocks in (3, 1, 7, 10):
        assert prefix.keys(blocks) == whole[: blocks * KEY_BYTES]


def test_only_tokens_of_whole_blocks_are_asked_for() -> None:
    asked: list[tuple[int, int]] = []

    def tokens(begin: int, end: int) -> list[int]:
        asked.append((begin, end))
        return TOKENS[begin:end]

    prefix = Prefix(ROOT, BLOCK, tokens)
    prefix.keys(2)
    prefix.keys(1)
    prefix.keys(5)
    assert prefix.packed_tokens(3, 5) == pack_tokens(TOKENS[12:20])
    assert asked == [(0, 8), (8, 20), (12, 20)]


def test_what_the_node_has_is_not_offered() -> None:
    prefix = prefix_of(TOKENS)
    prefix.found(3)
    assert prefix.to_offer(23) == range(3, 5)
    prefix.found(2)
    assert prefix.to_offer(23) == range(3, 5), "an older answer takes nothing back"
    assert not prefix.to_offer(15)


def test_what_was_given_is_not_offered_again() -> None:
    prefix = prefix_of(TOKENS)
    prefix.give(3)
    assert not prefix.to_offer(15)
    assert prefix.to_offer(16) == range(3, 4)


def test_what_was_found_but_could_not_be_loaded_is_offered() -> None:
    prefix = prefix_of(TOKENS)
    prefix.found(5)
    prefix.lost(2)
    assert prefix.to_offer(24) == range(2, 6)


def test_what_came_too_late_is_offered_again_but_not_for_ever() -> None:
    prefix = prefix_of(TOKENS)
    for _ in range(MOST_TRIES - 1):
        prefix.give(5)
        prefix.came_late(2)
        assert prefix.to_offer(20) == range(2, 5)
    prefix.give(5)
    prefix.came_late(2)
    assert not prefix.to_offer(40)


def test_nothing_is_offered_behind_a_gap() -> None:
    prefix = prefix_of(TOKENS)
    prefix.give(2)
    prefix.end()
    assert not prefix.to_offer(40)
    assert prefix.offered == 2


def test_everything_is_offered_again_to_a_node_that_has_lost_it() -> None:
    prefix = prefix_of(TOKENS)
    prefix.give(5)
    prefix.end()
    prefix.begin_again()
    assert prefix.to_offer(40) == range(0, 10)


def test_what_came_too_late_counts_once_however_many_ranks_say_so() -> None:
    prefix = prefix_of(TOKENS)
    prefix.give(5)
    for _ in range(MOST_TRIES):
        prefix.came_late(2)
    assert prefix.to_offer(20) == range(2, 5)


def test_a_store_that_succeeds_gives_the_next_ones_all_their_tries() -> None:
    prefix = prefix_of(TOKENS)
    for _ in range(2 * MOST_TRIES):
        prefix.give(5)
        prefix.came_late(2)
        prefix.stored()
    assert prefix.to_offer(20) == range(2, 5)


def test_extras_are_those_of_the_blocks_that_are_asked_for() -> None:
    prefix = prefix_of(TOKENS, {1: [b"a"], 3: [b"b", b"c"], 4: [b"d"]})
    assert prefix.extras(2, 4) == {3: [b"b", b"c"]}
