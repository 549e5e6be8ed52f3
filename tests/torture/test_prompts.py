"""Whoever loads a block knows what must be in it, and whose it is when it is not."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.torture import prompts
from tierkv.torture.prompts import (
    KINDS,
    MAX_BLOCKS,
    OWN_PROMPTS,
    blocks_of,
    find_wrong,
    keys_of,
    shared_blocks,
    tokens_of,
)


def test_prompts_of_a_family_begin_alike_and_part() -> None:
    one, other = keys_of("even", 8), keys_of("even", 9)
    shared = shared_blocks(8) * 32
    assert one[:shared] == other[:shared]
    assert one[shared : shared + 32] != other[shared : shared + 32]


def test_the_same_prompt_has_other_bytes_under_each_identity() -> None:
    assert len({keys_of(kind, 3)[:32] for kind in KINDS}) == len(KINDS)
    assert (tokens_of(3, 5) == tokens_of(3)[: 5 * 16]).all()


def test_every_identity_is_one_that_a_node_takes() -> None:
    assert [kind.identity.find_gap() for kind in KINDS.values()] == [None] * len(KINDS)
    assert {kind.name for kind in KINDS.values() if not kind.is_persistent} == {"fleeting"}


def test_right_blocks_are_right() -> None:
    for kind in KINDS.values():
        assert find_wrong(blocks_of(kind.name, 5, 0, 0, MAX_BLOCKS), kind.name, 5, 0, [1]) == ""
    assert find_wrong(np.empty((0, 16_384), np.uint8), "even", 5, 0, [1]) == ""


@pytest.mark.parametrize(("kind", "prompt"), [("salted", 5), ("even", 6), ("retrained", 17), ("even", OWN_PROMPTS + 3)])
def test_the_owner_of_foreign_bytes_is_named_among_all_that_was_stored(
    kind: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_MOST_OF_AN_ENGINE", 20)
    rows = blocks_of("even", 5, 0, 0, MAX_BLOCKS).copy()
    rows[20, 8_192:12_288] = blocks_of(kind, prompt, 0, 22, 1)[0, 8_192:12_288]
    told = find_wrong(rows, "even", 5, 0, [1])
    assert told == (
        f"even prompt 5 block 20 rank 0: bytes 8192..12287: {kind} prompt {prompt} block 22 layer 2 from byte 0"
    )
