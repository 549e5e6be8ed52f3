"""Which blocks a client moves, to where, and that it touches nothing else: lengths, drafts, offsets, its own copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from tests.client.conftest import BLOCK_BYTES, BLOCK_TOKENS, TOKENS, make_identity, poisoned, stamped, store
from tests.client.fake_node import FakeNode
from tierkv.client import Client, Group, aio
from tierkv.client.blocking import Lease
from tierkv.client.grants import LeaseCore

GUARDS = 2


class Pages:
    """An engine's own pages; it takes the blocks from `first` on and places block i in page `GUARDS + i`."""

    def __init__(self, num_blocks: int, *, first: int = 0) -> None:
        self.first = first
        self.memory = poisoned(num_blocks + 2 * GUARDS)

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        for block, content in enumerate(blocks, first_block):
            if block >= self.first:
                self.memory[GUARDS + block] = content


@pytest.mark.scenario(
    "B254", then="for every length a copy writes the full blocks and not a byte before or behind them"
)
def test_a_copy_of_any_length_stays_between_its_guards(group: Group) -> None:
    for num_tokens in range(4 * BLOCK_TOKENS + 2):
        tokens = [1_000 + num_tokens, *range(num_tokens)][:num_tokens]
        full = num_tokens // BLOCK_TOKENS
        rows = store(group, tokens)
        for into_rows in (True, False):
            pages = Pages(full)
            with group.acquire(tokens) as lease:
                inside = pages.memory[GUARDS : GUARDS + full]
                assert lease.copy_into(inside if into_rows else pages) == full == lease.blocks
            assert (pages.memory[GUARDS : GUARDS + full] == rows).all()
            assert (pages.memory[:GUARDS] == 0xFF).all()
            assert (pages.memory[GUARDS + full :] == 0xFF).all()


@pytest.mark.scenario(
    "B060",
    then="there is one block size, the engine's; an engine that has the first ones takes the others and keeps "
    "its own pages as they are; buffers of another size are refused by name",
)
def test_an_engine_takes_the_blocks_that_it_does_not_have(group: Group) -> None:
    rows = store(group, TOKENS)
    pages = Pages(4, first=2)
    with group.acquire(TOKENS) as lease:
        assert lease.copy_into(pages) == 4
    assert (pages.memory[GUARDS + 2 : GUARDS + 4] == rows[2:]).all()
    assert (pages.memory[: GUARDS + 2] == 0xFF).all()
    with group.reserve(TOKENS, first_block=2) as ticket:
        assert ticket.granted == []


@pytest.mark.scenario(
    "B252",
    then="a block whose tokens are not all accepted is no block: nothing is stored for it, and a rejected continuation "
    "finds the accepted blocks only",
)
def test_drafts_are_stored_when_they_have_become_tokens(group: Group) -> None:
    accepted, drafts = [1, 2, 3, 4, 5], [6, 7, 8]
    store(group, accepted)
    assert group.match(accepted + drafts).blocks == 1
    final = [*accepted, 6, 70, 80]  # two of the drafts were rejected
    with group.reserve(final) as ticket:
        assert ticket.granted == [1]
        ticket.write(1, np.full(BLOCK_BYTES, 9, np.uint8))
        ticket.commit()
    assert group.match(final).blocks == 2
    assert group.match(accepted + drafts).blocks == 1


@pytest.mark.scenario(
    "B039",
    then="what a reader does to its copy reaches no one else, and a raw view can't be written; the next reader gets "
    "what was stored",
)
def test_a_reader_s_copy_is_its_own(group: Group) -> None:
    rows = store(group, TOKENS)
    mine = poisoned(4)
    with group.acquire(TOKENS) as lease:
        lease.copy_into(mine)
        mine[:] = 0
        for _, view in lease.raw_views():
            with pytest.raises(ValueError, match="read-only"):
                view[:] = 0
            del view
    theirs = poisoned(4)
    with group.acquire(TOKENS) as lease:
        assert lease.copy_into(theirs) == 4
    assert (theirs == rows).all()


@pytest.mark.scenario(
    "B040", then="six blocks from scattered slots arrive in order, and the pages between and around them are untouched"
)
def test_blocks_go_to_the_pages_they_are_meant_for_wherever_their_slots_are(group: Group) -> None:
    tokens = list(range(500, 500 + 6 * BLOCK_TOKENS))
    for blocks in (1, 2, 3, 4, 5, 6):  # each time another prompt takes the slot behind
        store(group, tokens[: blocks * BLOCK_TOKENS])
        store(group, [9_000 + blocks, 1, 2, 3])
    rows = store(group, tokens)
    pages = poisoned(13)
    odd = pages[1:12:2]

    class Odd:
        def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
            odd[first_block : first_block + len(blocks)] = blocks

    with group.acquire(tokens) as lease:
        assert lease.copy_into(Odd()) == 6
    assert (odd == stamped(group, 6)).all()
    assert len(rows) == 6
    assert (pages[::2] == 0xFF).all()


# ---- after a lease was revoked every way of reading says so


def by_rows(lease: Lease) -> int:
    return lease.copy_into(poisoned(4))


def by_writer(lease: Lease) -> int:
    return lease.copy_into(Pages(4))


def by_raw_views(lease: Lease) -> int:
    views = lease.raw_views()
    del views
    return lease.count_valid()


READERS: list[Callable[[Lease], int]] = [by_rows, by_writer, by_raw_views]


@pytest.mark.scenario(
    "B070",
    then="a lease that was revoked, and whose slots have other owners, is worth nothing to every way of reading it",
)
@pytest.mark.parametrize("read", READERS)
def test_no_way_of_reading_skips_the_check_of_a_revoked_lease(
    group: Group, node: FakeNode, read: Callable[[Lease], int]
) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS, revocable=True) as lease:
        revoke(node, lease)
        assert read(lease) == 0


@pytest.mark.scenario("B070", then="the asyncio client and a holder that was handed its part check the same way")
def test_neither_the_asyncio_client_nor_a_holder_skips_the_check(group: Group, node: FakeNode, client: Client) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS, revocable=True) as lease:
        token, part = client.session_token(), lease.parts[0]
        held = group.hold(lease.grant, token, part)
        revoke(node, lease)
        assert by_rows(held) == 0
        held.release()

    async def load() -> int:
        async with await aio.connect(node.directory) as other:
            theirs = await other.open(make_identity())
            async with theirs.acquire(TOKENS, revocable=True) as lease:
                revoke(node, lease)
                return await lease.copy_into(poisoned(4))

    store(group, TOKENS)
    assert asyncio.run(load()) == 0


def revoke(node: FakeNode, lease: LeaseCore) -> None:
    """The node gives the slots to others."""
    for offset in np.frombuffer(lease.parts[0].offsets, "<u8"):
        node.bump(int(offset))
