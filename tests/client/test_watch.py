"""A client that nobody calls hears that its node's front has died, and lets go of the memory that was that front's."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable

import pytest

from tests.client.conftest import TOKENS, make_identity, poisoned, store
from tests.client.fake_node import FakeNode
from tierkv.client import Client, Group, aio, connect, connect_operator
from tierkv.client.links import LinkPool
from tierkv.client.session import Session
from tierkv.client.steps import Connect
from tierkv.client.watch import SessionWatch
from tierkv.core.reasons import Reason
from tierkv.wire.session import SessionGrant


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)  # between two looks at a condition that has a deadline
    return condition()


def has_detached(node: FakeNode, incarnations: list[int]) -> bool:
    node.settle()
    return node.detached == incarnations


def watches() -> int:
    return sum(thread.name == "tierkv client watch" for thread in threading.enumerate())


def test_an_idle_client_gives_the_memory_of_a_dead_front_back(node: FakeNode, client: Client, group: Group) -> None:
    store(group, TOKENS)
    for count in (1, 2, 3):
        node.restart_front(notice=True)
        assert soon(lambda n=count: has_detached(node, list(range(1, n + 1))))  # type: ignore[misc]
        assert group.match(TOKENS).reason is None
    assert soon(lambda: watches() == 1)


def test_what_is_still_read_from_is_kept_until_it_is_released(node: FakeNode, client: Client, group: Group) -> None:
    rows = store(group, TOKENS)
    with group.acquire(TOKENS) as lease:
        node.restart_front(notice=True)
        assert soon(lambda: client._state.session() is None)
        assert not has_detached(node, [1])
        destination = poisoned(4)
        assert lease.copy_into(destination) == 4
        assert (destination == rows).all()
    assert soon(lambda: has_detached(node, [1]))


def test_a_view_that_is_dropped_without_a_call_gives_the_memory_back(
    node: FakeNode, client: Client, group: Group
) -> None:
    store(group, TOKENS)
    session = client._state.session()
    assert session is not None
    assert session.arena is not None
    view = session.arena.readable[:1]
    node.restart_front(notice=True)
    assert soon(lambda: client._state.session() is None)
    assert not has_detached(node, [1])
    cycle: list[object] = [view]
    cycle.append(cycle)  # as an exception that knows the frame it was raised in
    del view, cycle
    assert soon(lambda: has_detached(node, [1]))


def test_a_session_that_ends_before_anybody_watches_it_is_let_go_of(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as nobody_watches:
        nobody_watches.setattr(LinkPool, "watch", lambda self, session: None)
        client = connect(node.directory, timeout_seconds=20)
    with client:
        session = client._state.session()
        assert session is not None
        session.end()
        client._links.watch(session)
        assert soon(lambda: has_detached(node, [1]))


def test_a_session_of_an_asyncio_client_that_asks_nothing_under_it_is_watched(node: FakeNode) -> None:
    async def scene() -> None:
        async with await aio.connect(node.directory, timeout_seconds=20) as client:
            for ended in ([1], [1, 2]):
                session = await client._links._perform(Connect(client._state.clock() + 20.0))
                assert isinstance(session, Session)
                node.restart_front(notice=True)
                deadline = time.monotonic() + 20.0
                while not has_detached(node, ended) and time.monotonic() < deadline:
                    await asyncio.sleep(0.002)  # between two looks at a condition that has a deadline
                assert has_detached(node, ended)

    asyncio.run(scene())


def test_a_node_that_is_gone_altogether_is_noticed_too(node: FakeNode, client: Client, group: Group) -> None:
    node.go()
    assert soon(lambda: client._state.session() is None)
    assert group.match(TOKENS).reason is Reason.NODE_AWAY
    assert soon(lambda: watches() == 0)


def test_a_closed_client_leaves_no_thread(node: FakeNode) -> None:
    before = watches()
    with connect(node.directory, timeout_seconds=20) as client:
        client.open(make_identity())
        assert watches() == before + 1
    assert watches() == before


def test_a_session_that_nobody_knows_any_more_is_not_kept_by_its_watch(node: FakeNode, client: Client) -> None:
    before = watches()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    grant = SessionGrant(token=bytes(16), incarnation=1, endpoint="", arena_bytes=0, page_bytes=1, data_dir="")
    with theirs:
        session = Session(ours, grant, None)
        descriptor = session.duplicate()
        assert descriptor is not None
        watch = SessionWatch(session, descriptor, client._state)
        assert watches() == before + 1
        assert watch.is_of(session)
        ours.close()
        del session
        gc.collect()
        watch.join()
    assert watches() == before


def test_an_operator_has_no_memory_to_watch(node: FakeNode) -> None:
    with connect_operator(node.directory, timeout_seconds=20) as operator:
        assert operator.is_connected()
        assert watches() == 0


def test_an_idle_client_of_asyncio_does_the_same(node: FakeNode) -> None:
    async def idle() -> None:
        async with await aio.connect(node.directory, timeout_seconds=20) as client:
            await client.open(make_identity())
            node.restart_front(notice=True)
            deadline = time.monotonic() + 20.0
            while not has_detached(node, [1]):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.002)

    asyncio.run(idle())
