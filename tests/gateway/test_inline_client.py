"""The client over a gateway: the same verbs with the same answers, and never a view of the arena."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.client.conftest import TOKENS, make_identity, poisoned, stamped, store
from tests.client.fake_node import FakeNode, drop
from tests.client.test_coded_groups import SHAPE, as_read, coded_identity, raw_rows
from tests.gateway.gateway_thread import GatewayThread
from tierkv.client import Client, Group, connect, connect_operator
from tierkv.client import aio as tierkv_aio
from tierkv.core.reasons import Reason
from tierkv.core.tenancy import tenant_of_user
from tierkv.errors import ConfigError, ForkedClient, LayoutMismatch, WireError
from tierkv.wire.messages import MAX_PAYLOAD_BYTES, Acquire, BlockState, Commit, Holder, Reserve

LARGE = MAX_PAYLOAD_BYTES * 2 + 4096 + 7
"""Bytes of a block that travels in three parts and fills no page."""


def load(group: Group, tokens: list[int]) -> tuple[int, np.ndarray]:
    destination = poisoned(len(tokens) // group.block_tokens, group.block_bytes)
    with group.acquire(tokens) as lease:
        return lease.copy_into(destination), destination


def test_what_was_stored_is_loaded_and_nothing_is_held_afterwards(
    gateway: GatewayThread, node: FakeNode, group: Group
) -> None:
    rows = store(group, TOKENS)
    assert (group.match(TOKENS).blocks, group.match(TOKENS).tokens) == (4, 16)
    valid, loaded = load(group, TOKENS)
    assert valid == 4
    assert (loaded == rows).all()
    assert group.seal(TOKENS, wait="flushed").flushed_blocks == 4
    assert group.report_bad(group.keys(TOKENS), 1) is None
    assert group.match(TOKENS).blocks == 1
    assert node.has_no_grants()
    assert gateway.look(lambda: gateway.user.held_bytes) == 0


def test_the_group_is_the_tenants_own_whatever_it_says(client: Client, group: Group, node: FakeNode) -> None:
    identity = make_identity()
    assert group.key != identity.group_key()
    with connect(node.directory, timeout_seconds=20) as trusted:
        store(trusted.open(identity), TOKENS)
        assert group.match(TOKENS).blocks == 0
        assert trusted.open(identity).match(TOKENS).blocks == 4
    prefix = tenant_of_user(os.geteuid())
    assert client._state.session().tenant == prefix  # type: ignore[union-attr]


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, MAX_PAYLOAD_BYTES - 1, MAX_PAYLOAD_BYTES, LARGE])
def test_a_block_of_any_size_travels(inline_dir: Path, node_dir: Path, quick: None, block_bytes: int) -> None:
    node = FakeNode(node_dir, pages=4096)
    try:
        with GatewayThread(node_dir, inline_dir), connect(inline_dir, timeout_seconds=20) as client:
            group = client.open(make_identity(block_bytes=block_bytes))
            tokens = list(range(3 * 4))
            rows = store(group, tokens)
            valid, loaded = load(group, tokens)
            assert valid == 3
            assert (loaded == rows).all()
    finally:
        node.close()


def test_more_blocks_than_one_frame_holds_travel_to_destinations_that_put_them_anywhere(
    inline_dir: Path, node_dir: Path, quick: None
) -> None:
    class Scattered:
        def __init__(self, count: int) -> None:
            self.rows: dict[int, bytes] = {}
            self.count = count

        def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
            assert not blocks.flags.writeable
            self.rows |= {first_block + i: row.tobytes() for i, row in enumerate(blocks)}

        def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
            blocks[:] = all_rows[first_block : first_block + len(blocks)]

    count = MAX_PAYLOAD_BYTES // 4096 * 2 + 5
    node = FakeNode(node_dir, pages=count + 8)
    try:
        with GatewayThread(node_dir, inline_dir), connect(inline_dir, timeout_seconds=20) as client:
            group = client.open(make_identity())
            all_rows = stamped(group, count)
            engine = Scattered(count)
            tokens = list(range(count * 4))
            with group.reserve(tokens) as ticket:
                ticket.copy_from(engine)
                assert ticket.commit(wait="sent").staged == count
            assert group.match(tokens).blocks == count
            with group.acquire(tokens) as lease:
                assert lease.copy_into(engine) == count
            assert [engine.rows[i] for i in range(count)] == [row.tobytes() for row in all_rows]
    finally:
        node.close()


def test_blocks_may_be_written_one_by_one_or_through_views_of_memory_of_the_clients_own(group: Group) -> None:
    rows = stamped(group, 4)
    with group.reserve(TOKENS) as ticket:
        assert (ticket.granted, ticket.states) == ([0, 1, 2, 3], bytes([BlockState.GRANTED]) * 4)
        ticket.write(2, rows[2])
        with pytest.raises(ValueError, match="granted and not written"):
            ticket.commit()
        for block in (0, 1, 3):
            ticket.write(block, rows[block].tobytes())
        assert ticket.commit().visible == 4
    assert (load(group, TOKENS)[1] == rows).all()
    longer = [*TOKENS[:16], 1, 2, 3, 4]
    with group.reserve(longer) as ticket:
        assert ticket.granted == [4]
        for first, views in ticket.runs():
            views[:] = stamped(group, len(views), first=first)
        assert ticket.commit().visible == 1
    assert (load(group, longer)[1] == stamped(group, 5)).all()


def test_there_are_no_raw_views(group: Group) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS, revocable=True) as lease:
        for raw in (lease.raw_views, lease.count_valid):
            with pytest.raises(ValueError, match="use copy_into"):
                raw()
    with pytest.raises(ValueError, match="released"):
        lease.copy_into(poisoned(4))


def test_a_destination_that_does_not_fit_is_refused_before_anything_is_fetched(group: Group) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS) as lease:
        with pytest.raises(LayoutMismatch):
            lease.copy_into(np.empty((4, 4095), np.uint8))
        with pytest.raises(ValueError, match="4 are needed"):
            lease.copy_into(np.empty((3, 4096), np.uint8))


def test_only_what_is_proven_is_delivered(group: Group, node: FakeNode) -> None:
    rows = store(group, TOKENS)
    destination = poisoned(4)
    with group.acquire(TOKENS) as lease:
        offsets = next(iter(node.memory.leases.values()))  # type: ignore[union-attr]
        node.bump(offsets[2])
        assert lease.copy_into(destination) == 2
    assert (destination[:2] == rows[:2]).all()
    assert (destination[2:] == 0xFF).all()
    assert group._client.counters.by_reason[Reason.REVOKED] == 1


def test_a_lease_is_never_revocable_at_the_node(group: Group, node: FakeNode) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS, revocable=True):
        assert [request.revocable for request in node.saw(Acquire)] == [False]


def test_other_holders_are_refused(group: Group, client: Client) -> None:
    store(group, TOKENS)
    with group.acquire(TOKENS, holders=(Holder(0, bytes(16)),)) as lease:
        assert (lease.blocks, lease.reason) == (0, Reason.WIRE_ERROR)
    with group.acquire(TOKENS, holders=(Holder(0, client.session_token()),)) as lease:
        assert lease.blocks == 4


def test_each_rank_stores_and_loads_its_own(client: Client, node: FakeNode) -> None:
    group = client.open(make_identity(shards=2), rank=1)
    rows = store(group, TOKENS)
    valid, loaded = load(group, TOKENS)
    assert valid == 4
    assert (loaded == rows).all()
    assert {request.rank for request in node.saw(Reserve)} == {1}


def test_a_ticket_that_is_left_is_aborted_at_the_node(group: Group, node: FakeNode) -> None:
    with group.reserve(TOKENS) as ticket:
        ticket.write(0, stamped(group, 1)[0])
    assert node.has_no_grants()
    assert group.match(TOKENS).blocks == 0


def test_operators_are_refused_by_name(gateway: GatewayThread) -> None:
    with connect_operator(gateway.directory) as operator:
        for ask in (operator.status, operator.usage, lambda: next(operator.warmup()), lambda: next(operator.verify())):
            with pytest.raises(WireError, match="not_allowed"):
                ask()


def test_a_forked_child_is_refused(group: Group) -> None:
    store(group, TOKENS)
    lease = group.acquire(TOKENS)
    child = os.fork()
    if not child:
        try:
            lease.copy_into(poisoned(4))
        except ForkedClient:
            os._exit(17)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert lease.copy_into(poisoned(4)) == 4
    lease.release()


# ---- the node or the gateway goes away


def test_while_the_node_is_away_calls_are_misses_and_then_it_is_used_again(
    group: Group, node: FakeNode, skip_time: Callable[[Client, float], None], gateway: GatewayThread
) -> None:
    store(group, TOKENS)
    node.go()
    assert group.match(TOKENS).blocks == 0
    with group.acquire(TOKENS) as lease, group.reserve(TOKENS) as ticket:
        assert (lease.blocks, ticket.granted) == (0, [])
    node.come()
    wait_connected(group._client, skip_time)
    rows = store(group, TOKENS)
    assert (load(group, TOKENS)[1] == rows).all()


def wait_connected(client: Client, skip_time: Callable[[Client, float], None]) -> None:
    """The gateway's own breaker is open for a moment, too."""
    deadline = time.monotonic() + 20
    while not client.is_connected():
        assert time.monotonic() < deadline, client.problem
        skip_time(client, 3)
        time.sleep(0.02)  # between two looks at a condition that has a deadline


def test_a_gateway_that_is_started_again_is_found_by_the_same_client(
    node: FakeNode, inline_dir: Path, quick: None, skip_time: Callable[[Client, float], None]
) -> None:
    with GatewayThread(node.directory, inline_dir) as first:
        client = connect(inline_dir, timeout_seconds=20)
        group = client.open(make_identity())
        rows = store(group, TOKENS)
        lease = group.acquire(TOKENS)
        ticket = group.reserve([*TOKENS[:16], 1, 2, 3, 4])
        first.close()
        assert node.has_no_grants()
        assert lease.copy_into(poisoned(4)) == 0
        ticket.copy_from(stamped(group, 5))
        assert ticket.commit().visible == 0
        lease.release()
        assert group.match(TOKENS).blocks == 0
        assert client.problem
    with GatewayThread(node.directory, inline_dir), client:
        wait_connected(client, skip_time)
        assert (load(group, TOKENS)[1] == rows).all()
        assert client.counters.open_grants == 0


def test_a_group_that_was_opened_while_nobody_was_there_is_found_by_the_call_after_the_first(
    node: FakeNode, inline_dir: Path, quick: None, skip_time: Callable[[Client, float], None]
) -> None:
    with connect(inline_dir, timeout_seconds=20) as client:
        group = client.open(make_identity())
        assert group.key == make_identity().group_key()
        with GatewayThread(node.directory, inline_dir):
            wait_connected(client, skip_time)
            assert group.match(TOKENS).reason is Reason.NOT_READY
            rows = store(group, TOKENS)
            assert (load(group, TOKENS)[1] == rows).all()


def test_a_front_that_is_replaced_takes_the_grants_along_and_the_old_memory_is_let_go(
    node: FakeNode, gateway: GatewayThread, group: Group, client: Client
) -> None:
    store(group, TOKENS)
    lease, ticket = group.acquire(TOKENS), group.reserve([*TOKENS[:16], 1, 2, 3, 4])
    before = node.incarnation
    node.restart_front(notice=True)
    wait_until(lambda: gateway.look(lambda: gateway.user.held_bytes) == 0)
    wait_until(lambda: before in node.detached)
    assert lease.copy_into(poisoned(4)) == 0
    ticket.copy_from(stamped(group, 5))
    assert ticket.commit().reason is Reason.GRANT_ENDED
    lease.release()
    rows = store(group, TOKENS)
    assert (load(group, TOKENS)[1] == rows).all()
    assert client.counters.sessions_opened == 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # between two looks at a condition that has a deadline


def test_a_commit_whose_reply_is_lost_is_done_all_the_same(
    node: FakeNode, inline_dir: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GatewayThread(node.directory, inline_dir) as gateway, connect(inline_dir, timeout_seconds=20) as client:
        group = client.open(make_identity())
        node.script[Commit].append(drop)
        with group.reserve(TOKENS) as ticket:
            ticket.copy_from(stamped(group, 4))
            with monkeypatch.context() as patch:
                patch.setattr(gateway.upstream, "timeout_seconds", 0.3)
                assert ticket.commit().reason is Reason.DEADLINE
        wait_until(lambda: group.match(TOKENS).blocks == 4)


# ---- who is believed


def test_a_gateway_of_another_user_is_not_believed_unless_named(
    gateway: GatewayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.client.session.TRUSTED_USERS", frozenset())
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with connect(gateway.directory) as client:
        assert "name it as node_user" in client.problem
    with connect(gateway.directory, node_user=os.getuid()) as client:
        assert client.problem == ""
    monkeypatch.setenv("TIERKV_NODE_USER", "root" if not os.getuid() else str(os.getuid()))
    with connect(gateway.directory) as client:
        assert client.problem == ""


def test_a_user_that_is_none_is_refused(inline_dir: Path) -> None:
    with pytest.raises(ConfigError, match="node_user"):
        connect(inline_dir, node_user="no such user")


# ---- asyncio


def test_the_asyncio_client_does_the_same(gateway: GatewayThread, node: FakeNode) -> None:
    async def program() -> None:
        async with await tierkv_aio.connect(gateway.directory, timeout_seconds=20) as client:
            group = await client.open(make_identity())
            rows = stamped(group, 4)  # type: ignore[arg-type]
            async with group.reserve(TOKENS) as ticket:
                await ticket.copy_from(rows)
                assert (await ticket.commit()).visible == 4

            async def load_once() -> None:
                destination = poisoned(4)
                async with group.acquire(TOKENS) as lease:
                    assert await lease.copy_into(destination) == 4
                assert (destination == rows).all()

            await asyncio.gather(*(load_once() for _ in range(30)))
            async with group.acquire(TOKENS) as lease:
                with pytest.raises(ValueError, match="use copy_into"):
                    lease.raw_views()
            assert client.counters.sessions_opened == 1

    asyncio.run(program())
    assert node.has_no_grants()


def test_an_asyncio_commit_that_is_cancelled_among_its_puts_leaves_nothing(
    gateway: GatewayThread, node: FakeNode
) -> None:
    async def program() -> None:
        async with await tierkv_aio.connect(gateway.directory, timeout_seconds=20) as client:
            group = await client.open(make_identity())
            ticket = await group.reserve(TOKENS)
            await ticket.copy_from(stamped(group, 4))  # type: ignore[arg-type]
            commit = asyncio.ensure_future(ticket.commit())
            await asyncio.sleep(0)
            commit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await commit
            assert (await group.match(TOKENS)).blocks in (0, 4)

    asyncio.run(program())
    assert node.has_no_grants()


def test_a_coded_group_is_coded_here_and_the_gateway_moves_what_lies_in_the_slots(
    client: Client, node: FakeNode
) -> None:
    group = client.open(coded_identity(), kv_shape=SHAPE)
    rows = raw_rows(4)
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(rows)
        assert ticket.commit().visible == 4
    back = np.zeros_like(rows)
    with group.acquire(TOKENS) as lease:
        assert lease.copy_into(back) == 4
    assert back.tobytes() == as_read(rows).tobytes()
