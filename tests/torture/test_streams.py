"""Blocks whose bytes tell whose they are."""

from __future__ import annotations

import numpy as np

from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.torture.streams import STEP, mix, owner_of, rows_of, unmix

LAYERS = (4096, 24, 1001)
KEYS = chain_keys(b"g" * 32, pack_tokens(range(64)), 16)


def test_what_a_block_holds_follows_from_its_key_rank_and_layer_alone() -> None:
    rows = rows_of(KEYS, LAYERS)
    assert rows.shape == (4, sum(LAYERS))
    assert (rows == rows_of(KEYS, LAYERS)).all()
    assert (rows[2:] == rows_of(KEYS[64:], LAYERS)).all()


def test_no_two_blocks_ranks_or_layers_are_alike_anywhere() -> None:
    both = np.concatenate([rows_of(KEYS, (2048, 2048)), rows_of(KEYS, (2048, 2048), rank=1)])
    words = both.reshape(-1).view("<u8")
    assert len(np.unique(words)) == len(words)


def test_mixing_can_be_inverted() -> None:
    words = np.random.default_rng(1).integers(0, 2**64, 1_000, dtype=np.uint64)
    assert (unmix(mix(words)) == words).all()
    assert (mix(unmix(words)) == words).all()


def test_a_word_leads_back_to_its_owner() -> None:
    word = rows_of(KEYS, LAYERS, rank=3)[1, 4096 + 16 : 4096 + 24].copy().view("<u8")
    assert int(unmix(word)[0]) == (owner_of(KEYS[32:64], 3, 1) + 3 * int(STEP)) % 2**64
