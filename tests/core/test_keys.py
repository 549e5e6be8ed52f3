"""Block keys: golden vectors, injectivity, and the arithmetic of whole blocks."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st

from tierkv.core.keys import KEY_BYTES, chain_keys, count_keys, key_at, pack_tokens

ROOT = bytes(range(32))

# (tokens, block_tokens, first_block, extras, packed keys). Changing one of these orphans every file ever written.
GOLDEN = [
    (
        [0, 1, 2, 3, 4],
        2,
        0,
        {},
        (
            "e77bc54517ad3f37c11fbf527f75f995f8bfb2fdb43d76d9e0b806ecd8936727"
            "585fc7b81790c3980d09e2d5d4b29af5d4939a33ac9d29a68cfd0c25503f6a6e"
        ),
    ),
    (
        [4294967295, 0, 49151, 7],
        1,
        0,
        {},
        (
            "75e985d87207c2e47bf4520772411f7ef8e52752b5461c68c32422a7b4aaf84e"
            "412801c99fe98d308aeab3f93009fe53f6d04503a120ca02854ce91314ace368"
            "b42bb980fc3fb512fd6048542e5e9912062ad686bb3e0d25558246daa3551fb3"
            "a3392c3bfc64fb41abf2f145e4d43a74baf0ec87a88dd354051a88ee8df25888"
        ),
    ),
    (
        list(range(16)),
        8,
        3,
        {4: [b"image", b""]},
        (
            "c640c8e0bc8c0a230b3d926f5bf77c5e96231a5e75c038c6e366bb2a3d7f8b0e"
            "c9d5a5d31b357a169d242b1e8642c3bcee8431a1aceeb74cc57b0c6dd249dfca"
        ),
    ),
]

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=12)


@pytest.mark.parametrize(("tokens", "block_tokens", "first_block", "extras", "expected"), GOLDEN)
def test_keys_are_what_they_were_in_every_release(
    tokens: list[int], block_tokens: int, first_block: int, extras: dict[int, list[bytes]], expected: str
) -> None:
    keys = chain_keys(ROOT, pack_tokens(tokens), block_tokens, first_block=first_block, extras=extras)
    assert keys.hex() == expected


@pytest.mark.scenario("B197", then="processes with other hash seeds make the golden keys, byte for byte")
def test_keys_are_the_same_in_every_process() -> None:
    tokens, block_tokens, first_block, extras, expected = GOLDEN[2]
    program = (
        "from tierkv.core.keys import *\n"
        f"print(chain_keys(bytes(range(32)), pack_tokens({tokens}), {block_tokens}, first_block={first_block}, "
        f"extras={extras}).hex())"
    )
    for seed in ("0", "1", "77"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


@pytest.mark.scenario("B206", then="the encoding of extra inputs is pinned: each framed with its length")
def test_a_key_is_the_digest_that_the_docstring_says() -> None:
    body = ROOT + struct.pack("<I", 2) + struct.pack("<II", 5, 6) + struct.pack("<I", 1) + struct.pack("<I", 3) + b"abc"
    assert chain_keys(ROOT, pack_tokens([5, 6]), 2, extras={0: [b"abc"]}) == blake3(body).digest()


@given(token_lists, st.integers(1, 5))
def test_only_full_blocks_have_a_key(tokens: list[int], block_tokens: int) -> None:
    keys = chain_keys(ROOT, pack_tokens(tokens), block_tokens)
    assert count_keys(keys) == len(tokens) // block_tokens
    full = len(tokens) // block_tokens * block_tokens
    assert keys == chain_keys(ROOT, pack_tokens(tokens[:full]), block_tokens)


@given(token_lists, st.integers(1, 3), st.integers(0, 12))
def test_a_chain_can_be_continued_from_any_of_its_keys(tokens: list[int], block_tokens: int, cut: int) -> None:
    whole = chain_keys(ROOT, pack_tokens(tokens), block_tokens)
    cut = min(cut, count_keys(whole))
    head = chain_keys(ROOT, pack_tokens(tokens[: cut * block_tokens]), block_tokens)
    parent = key_at(head, cut - 1) if cut else ROOT
    rest = chain_keys(parent, pack_tokens(tokens[cut * block_tokens :]), block_tokens, first_block=cut)
    assert head + rest == whole


@given(token_lists, token_lists, st.integers(1, 3))
def test_keys_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int], block_tokens: int) -> None:
    left_keys = chain_keys(ROOT, pack_tokens(left), block_tokens)
    right_keys = chain_keys(ROOT, pack_tokens(right), block_tokens)
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    for index in range(min(count_keys(left_keys), count_keys(right_keys))):
        same = key_at(left_keys, index) == key_at(right_keys, index)
        assert same == ((index + 1) * block_tokens <= common)


extras_lists = st.lists(st.binary(max_size=6), max_size=3)


@pytest.mark.scenario("B206", then='extras ["1", "23"] and ["12", "3"], and any two other lists, make other keys')
@given(extras_lists, extras_lists)
@example([b"1", b"23"], [b"12", b"3"])
def test_extras_are_framed_so_that_no_two_lists_run_together(left: list[bytes], right: list[bytes]) -> None:
    tokens = pack_tokens([1])
    same = chain_keys(ROOT, tokens, 1, extras={0: left}) == chain_keys(ROOT, tokens, 1, extras={0: right})
    assert same == (left == right)


def test_an_extra_cannot_be_mistaken_for_tokens() -> None:
    one_block = chain_keys(ROOT, pack_tokens([1]), 1, extras={0: [pack_tokens([2])]})
    two_tokens = chain_keys(ROOT, pack_tokens([1, 2]), 2)
    assert one_block != two_tokens


def test_extras_change_their_block_and_all_behind_it_only() -> None:
    tokens = pack_tokens([1, 2, 3])
    plain, marked = chain_keys(ROOT, tokens, 1), chain_keys(ROOT, tokens, 1, extras={1: [b"x"]})
    assert [key_at(plain, i) == key_at(marked, i) for i in range(3)] == [True, False, False]


def test_extras_are_found_by_the_block_s_place_in_the_prompt() -> None:
    whole = chain_keys(ROOT, pack_tokens([1, 2]), 1, extras={1: [b"x"]})
    tail = chain_keys(key_at(whole, 0), pack_tokens([2]), 1, first_block=1, extras={1: [b"x"]})
    assert tail == key_at(whole, 1)


def test_the_same_tokens_under_another_group_have_other_keys() -> None:
    tokens = pack_tokens(range(4))
    mine, yours = chain_keys(ROOT, tokens, 1), chain_keys(bytes(32), tokens, 1)
    assert not {key_at(mine, i) for i in range(4)} & {key_at(yours, i) for i in range(4)}


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8", ">i8", "<u8", "<i4"])
def test_tokens_pack_alike_whatever_the_integer_type(dtype: str) -> None:
    assert pack_tokens(np.array([1, 2, 49151], dtype=dtype)) == pack_tokens([1, 2, 49151])


def test_a_slice_with_a_stride_packs_its_own_tokens() -> None:
    assert pack_tokens(np.arange(10, dtype=np.uint32)[::3]) == pack_tokens([0, 3, 6, 9])


@pytest.mark.parametrize("tokens", [[-1], [2**32], [2**64], [1.5], [True], ["1"], np.array([2**63], dtype=np.uint64)])
def test_what_is_no_token_id_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        pack_tokens(tokens)


def test_no_tokens_give_no_keys() -> None:
    assert pack_tokens([]) == b""
    assert chain_keys(ROOT, b"", 4) == b""
    assert len(ROOT) == KEY_BYTES
