from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.client.prompt import KeyChain, pack_prompt
from tierkv.core.keys import chain_keys, pack_tokens

ROOT = b"r" * 32
token_ids = st.integers(0, 2**32 - 1)


@given(st.lists(token_ids, max_size=50))
def test_tokens_are_packed_alike_whatever_holds_them(tokens: list[int]) -> None:
    expected = pack_tokens(np.array(tokens, np.int64))
    assert pack_prompt(tokens) == expected
    assert pack_prompt(tuple(tokens)) == expected
    assert pack_prompt(np.array(tokens, np.uint32)) == expected
    assert pack_prompt(array("q", tokens)) == expected


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["one"], [None]])
def test_what_is_no_token_is_refused(tokens: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        pack_prompt(tokens)  # type: ignore[arg-type]


@given(st.lists(st.lists(token_ids, max_size=9), max_size=6))
def test_a_chain_that_grows_has_the_keys_of_the_whole_prompt(pieces: list[list[int]]) -> None:
    extras = {1: [b"image"], 3: [b"a", b"b"]}
    chain, whole = KeyChain(ROOT, 4), [token for piece in pieces for token in piece]
    for piece in pieces:
        chain.extend(piece, extras)
    assert chain.keys == chain_keys(ROOT, pack_tokens(whole), 4, extras=extras)
    assert chain.num_tokens == len(whole)
    assert chain.num_blocks == len(whole) // 4
