"""One group's keys find nothing, and change nothing, in another group."""

from __future__ import annotations

import pytest

from tierkv.core.grants import Committed, GroupSpec, Lease, Reservation
from tierkv.core.identity import Identity, Layout
from tierkv.core.keys import KEY_BYTES, chain_keys, pack_tokens
from tierkv.core.state import CacheState, Limits

SESSION = b"s" * 16
LAYOUT = Layout("u8", (4096,), "any", 1, "test")


def make_state() -> CacheState:
    limits = Limits(
        host_bytes=64 * 4096,
        slab_bytes=64 * 4096,
        extent_bytes=4 * 4096,
        nvme_bytes=0,
        seal_after_seconds=10.0,
        session_bytes=64 * 4096,
        inflight_writes=2,
        inflight_reads=2,
    )
    state = CacheState(limits, [0] * 64)
    state.open_session(SESSION, 0.0)
    return state


def add_group(state: CacheState, salt: str) -> bytes:
    identity = Identity("ab" * 32, "c", LAYOUT, salt=salt)
    group = identity.group_key()
    state.open_group(GroupSpec(group=group, identity=identity), 0.0)
    return group


def store(state: CacheState, group: bytes, keys: bytes, first: int, tokens: bytes, grant: bytes) -> Committed:
    answer, _ = state.reserve(
        grant=grant,
        session=SESSION,
        holder=SESSION,
        group=group,
        rank=0,
        keys=keys,
        first=first,
        tokens=tokens,
        now=1.0,
    )
    assert isinstance(answer, Reservation)
    committed, _ = state.commit(grant, 1.0)
    assert isinstance(committed, Committed)
    state.check()
    return committed


def test_keys_of_another_group_match_nothing_and_lease_nothing() -> None:
    state = make_state()
    ours, theirs = add_group(state, ""), add_group(state, "other")
    tokens = pack_tokens([1, 2, 3])
    keys = chain_keys(theirs, tokens, 1)
    assert store(state, theirs, keys, 0, tokens, b"1" * 16).visible == 3
    assert state.match(theirs, keys).blocks == 3
    assert state.match(ours, keys).blocks == 0
    lease, _ = state.acquire(
        grant=b"2" * 16, session=SESSION, group=ours, keys=keys, max_blocks=9, deadline=2.0, now=1.0
    )
    assert isinstance(lease, Lease)
    assert lease.blocks == 0
    state.report_bad(ours, keys, 0, 1.0)
    assert state.match(theirs, keys).blocks == 3


def test_blocks_behind_another_groups_prefix_never_become_part_of_it() -> None:
    state = make_state()
    ours, theirs = add_group(state, ""), add_group(state, "other")
    tokens = pack_tokens([1, 2, 3])
    keys = chain_keys(theirs, tokens, 1)
    store(state, theirs, keys[: 2 * KEY_BYTES], 0, tokens[:8], b"1" * 16)
    # A mixed-up engine: the tail of their prompt, stored as ours. Its keys are those of its tokens behind that parent.
    assert store(state, ours, keys, 2, tokens[8:], b"2" * 16) == Committed(visible=0, staged=1)
    assert state.match(theirs, keys).blocks == 2
    assert state.match(ours, keys).blocks == 0


@pytest.mark.scenario(
    "B201",
    then="another first block is a miss, another third one a hit of two, a tail without its head a miss",
)
def test_a_block_matches_only_behind_the_text_it_was_stored_behind() -> None:
    state = make_state()
    group = add_group(state, "")

    def keys_of(*tokens: int) -> bytes:
        return chain_keys(group, pack_tokens(tokens), 1)

    store(state, group, keys_of(1, 2, 3), 0, pack_tokens([1, 2, 3]), b"1" * 16)
    assert state.match(group, keys_of(9, 2, 3)).blocks == 0
    assert state.match(group, keys_of(1, 2, 9)).blocks == 2
    assert state.match(group, keys_of(2, 3)).blocks == 0
    assert state.match(group, keys_of(1, 2, 3)).blocks == 3


@pytest.mark.scenario("B201", then="keys of a prompt's middle match nothing")
def test_keys_from_the_middle_of_a_prompt_match_nothing() -> None:
    state = make_state()
    group = add_group(state, "")
    tokens = pack_tokens([1, 2, 3, 4, 5, 6])
    keys = chain_keys(group, tokens, 1)
    store(state, group, keys[: 4 * KEY_BYTES], 0, tokens[:16], b"1" * 16)
    store(state, group, keys, 4, tokens[16:], b"2" * 16)
    assert state.match(group, keys).blocks == 6
    assert state.match(group, keys[4 * KEY_BYTES :]).blocks == 0
