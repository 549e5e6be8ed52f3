"""A wrong byte is traced to its owner."""

from __future__ import annotations

import numpy as np
import pytest

from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.torture.oracle import POISON, Oracle, Owner, first_wrong, unfinished
from tierkv.torture.streams import rows_of

LAYERS = (4096, 8192, 4095)
TOKENS = pack_tokens(range(64))
KEYS = {name: chain_keys(name.encode().ljust(32), TOKENS, 16) for name in ("one", "other", "stranger")}
ROWS = {name: rows_of(keys, LAYERS) for name, keys in KEYS.items()}


@pytest.fixture
def oracle() -> Oracle:
    oracle = Oracle()
    for name in ("one", "other"):
        oracle.know(name, 7, KEYS[name], LAYERS)
    oracle.know("one", 7, KEYS["one"], LAYERS, rank=1)
    return oracle


def changed(at: int, content: np.ndarray) -> np.ndarray:
    row = ROWS["one"][0].copy()
    row[at : at + len(content)] = content
    return row


def test_a_right_block_has_nothing_to_explain(oracle: Oracle) -> None:
    assert oracle.trace(ROWS["one"][0], ROWS["one"][0]) == []
    assert oracle.explain(ROWS["one"][0], ROWS["one"][0]) == ""


def test_another_identitys_block_is_named_layer_by_layer(oracle: Oracle) -> None:
    traced = oracle.trace(ROWS["other"][2], ROWS["one"][2])
    assert [foreign.owner for foreign in traced] == [Owner("other", 7, 2, layer) for layer in range(3)]
    assert [(foreign.first_byte, foreign.num_bytes) for foreign in traced] == [(0, 4096), (4096, 8192), (12288, 4095)]


def test_a_block_in_the_place_of_another_is_named() -> None:
    oracle = Oracle()
    oracle.know("one", 7, KEYS["one"], (1000,))
    found = rows_of(KEYS["one"], (1000,))
    (traced,) = oracle.trace(found[3], found[1])
    assert str(traced) == "bytes 0..999: one prompt 7 block 3 layer 0 from byte 0"


def test_bytes_of_another_rank_are_named(oracle: Oracle) -> None:
    found = rows_of(KEYS["one"], LAYERS, rank=1)[0]
    assert {foreign.owner for foreign in oracle.trace(found, ROWS["one"][0])} == {
        Owner("one", 7, 0, layer, rank=1) for layer in range(3)
    }


@pytest.mark.parametrize("at", [0, 4096, 5000, 8191])
@pytest.mark.parametrize("offset", [0, 3, 512, 777])
def test_a_piece_that_lies_in_another_place_is_named_with_the_place_it_comes_from(
    oracle: Oracle, at: int, offset: int
) -> None:
    piece = ROWS["other"][1][4096 + offset : 4096 + offset + 1500]
    traced = oracle.trace(changed(at, piece), ROWS["one"][0])
    assert {foreign.owner for foreign in traced} == {Owner("other", 7, 1, 1)}
    assert abs(traced[0].first_byte - at) <= 8
    assert sum(foreign.num_bytes for foreign in traced) == pytest.approx(1500, abs=16)
    said_offset = int(traced[0].whose.rsplit(" ", 1)[1])
    assert said_offset == pytest.approx(offset, abs=16)


def test_what_is_nobodys_is_said_in_words(oracle: Oracle) -> None:
    expected = ROWS["one"][0]

    def said(content: np.ndarray) -> str:
        return oracle.explain(changed(4096, content), expected)

    assert said(np.zeros(600, np.uint8)) == "bytes 4096..4695: zeros"
    assert said(np.full(600, POISON, np.uint8)) == "bytes 4096..4695: poison: never copied"
    assert said(unfinished(600, 4711)) == "bytes 4096..4695: unfinished: the copy of process 4711"
    assert said(ROWS["stranger"][0][:4096]) == "bytes 4096..8191: a stream of somebody unknown"
    assert "unknown: " in said(np.random.default_rng(5).integers(0, 256, 600, dtype=np.uint8))


def test_a_flipped_bit_is_found_where_it_is(oracle: Oracle) -> None:
    row = ROWS["one"][0].copy()
    row[12345] ^= 4
    assert oracle.explain(row, ROWS["one"][0]) == "bytes 12345..12345: 1 flipped bits"


def test_the_first_wrong_row_is_found() -> None:
    found = ROWS["one"].copy()
    assert first_wrong(found, ROWS["one"]) is None
    found[2, 5] ^= 1
    assert first_wrong(found, ROWS["one"]) == 2
    assert first_wrong(found[:0], ROWS["one"][:0]) is None
