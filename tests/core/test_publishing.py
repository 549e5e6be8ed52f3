"""Runs of committed blocks against the obvious: one block at a time. Tickets of any shape, tiny extents."""

from __future__ import annotations

from array import array
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.grants import GRANTED, PENDING, PRESENT, Committed, GroupSpec, Reservation
from tierkv.core.identity import Identity, Layout, Parallel
from tierkv.core.keys import chain_keys, key_at, pack_tokens
from tierkv.core.state import CacheState, Limits

PAGE = 4096
SESSION = b"s" * 16
PROMPT_BLOCKS = 9


def make_state(*, extent_blocks: int, ranks: int) -> tuple[CacheState, bytes]:
    layout = Layout(dtype="u8", block_bytes=(PAGE,), axes="x", block_tokens=2, engine="fake")
    identity = Identity(weights="ab" * 32, config="", layout=layout, parallel=Parallel(tensor=ranks, shards=ranks))
    limits = Limits(
        host_bytes=64 * PAGE,
        slab_bytes=8 * PAGE,
        extent_bytes=extent_blocks * PAGE,
        nvme_bytes=0,
        seal_after_seconds=10.0,
        session_bytes=2**40,
        inflight_writes=1,
        inflight_reads=1,
    )
    state = CacheState(limits, array("Q", bytes(64 * 8)))
    group = identity.group_key()
    state.open_group(GroupSpec(group=group, identity=identity), 0.0)
    state.open_session(SESSION, 0.0)
    return state, group


ticket_shapes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, PROMPT_BLOCKS - 1), st.integers(1, PROMPT_BLOCKS), st.integers(0, 1)),
    max_size=12,
)
"""(prompt, first block, blocks, rank). Prompts 1 and 2 leave prompt 0 after 3 and 6 blocks."""


@given(ticket_shapes, st.integers(1, 4), st.integers(1, 2), st.randoms(use_true_random=False))
def test_what_is_visible_and_where_is_what_one_block_after_the_other_would_make(shapes, extent_blocks, ranks, order):
    """Reserve all tickets, commit them in some order: blocks are visible when all before them are complete, each
    once, with the tokens and extras they were stored with."""
    state, group = make_state(extent_blocks=extent_blocks, ranks=ranks)
    tokens = [list(range(2 * PROMPT_BLOCKS)) for _ in range(3)]
    tokens[1][6:] = [t + 100 for t in tokens[1][6:]]
    tokens[2][12:] = [t + 200 for t in tokens[2][12:]]
    packed = [pack_tokens(ids) for ids in tokens]
    extras = {4: [b"picture"]}
    keys = [chain_keys(group, p, 2, extras=extras) for p in packed]
    numbers = count(1)
    open_tickets: list[tuple[bytes, int, list[bytes]]] = []
    written: dict[tuple[bytes, int], bool] = {}  # (block key, rank) -> committed
    for prompt, first, blocks, rank in shapes:
        end = min(PROMPT_BLOCKS, first + blocks)
        if rank >= ranks:
            continue
        grant = next(numbers).to_bytes(16, "little")
        answer, _ = state.reserve(
            grant=grant,
            session=SESSION,
            holder=SESSION,
            group=group,
            rank=rank,
            keys=keys[prompt][: end * 32],
            first=first,
            tokens=packed[prompt][first * 8 : end * 8],
            extras={index: extra for index, extra in extras.items() if first <= index < end},
            now=1.0,
        )
        assert isinstance(answer, Reservation)
        asked = [key_at(keys[prompt], index) for index in range(first, end)]
        expected = [{None: GRANTED, False: PENDING, True: PRESENT}[written.get((key, rank))] for key in asked]
        assert list(answer.states) == expected
        granted = [key for key, code in zip(asked, expected, strict=True) if code == GRANTED]
        if granted:
            open_tickets.append((grant, rank, granted))
            written.update({(key, rank): False for key in granted})
        if order.random() < 0.5:
            commit_one(state, open_tickets, written, order)
        check(state, group, keys, packed, written, ranks)
    while open_tickets:
        commit_one(state, open_tickets, written, order)
        check(state, group, keys, packed, written, ranks)


def commit_one(state, open_tickets, written, order) -> None:
    if not open_tickets:
        return
    grant, rank, granted = open_tickets.pop(order.randrange(len(open_tickets)))
    answer, _ = state.commit(grant, 2.0)
    assert isinstance(answer, Committed)
    assert answer.visible + answer.staged == len(granted)
    written.update({(key, rank): True for key in granted})


def check(state, group, keys, packed, written, ranks) -> None:
    state.check()
    for prompt in range(3):
        complete = [
            all(written.get((key_at(keys[prompt], index), rank)) for rank in range(ranks))
            for index in range(PROMPT_BLOCKS)
        ]
        expected = [*complete, False].index(False)
        assert state.match(group, keys[prompt]).blocks == expected
        for segment in state._ledger.tree.walk(group, keys[prompt]):
            extent = segment.extent
            start = extent.first_token * 4
            assert extent.first_token == segment.start * 2
            assert extent.tokens[: segment.blocks * 8] == packed[prompt][start : start + segment.blocks * 8]
            inside = 4 - segment.start
            if 0 <= inside < segment.blocks:
                assert extent.extras == {inside: [b"picture"]}


def test_a_block_that_surfaced_behind_another_of_its_own_ticket_surfaces_once() -> None:
    """Rank 0 brings blocks 0 and 2 in one ticket, block 1 was complete before: all three appear, none twice."""
    state, group = make_state(extent_blocks=1, ranks=2)
    tokens = pack_tokens(range(6))
    keys = chain_keys(group, tokens, 2)

    def reserve(grant: bytes, rank: int, first: int, end: int) -> None:
        state.reserve(
            grant=grant,
            session=SESSION,
            holder=SESSION,
            group=group,
            rank=rank,
            keys=keys[: end * 32],
            first=first,
            tokens=tokens[first * 8 : end * 8],
            now=1.0,
        )

    reserve(b"rank 1, all     ", 1, 0, 3)
    reserve(b"rank 0, middle  ", 0, 1, 2)
    reserve(b"rank 0, the rest", 0, 0, 3)
    assert state.commit(b"rank 1, all     ", 2.0)[0] == Committed(0, 3)
    assert state.commit(b"rank 0, middle  ", 2.0)[0] == Committed(0, 1)
    assert state.commit(b"rank 0, the rest", 2.0)[0] == Committed(2, 0)
    assert state.match(group, keys).blocks == 3
    state.check()
