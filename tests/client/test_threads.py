"""A client is shared by threads, and by no forked child."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.client.conftest import TOKENS, make_identity, poisoned, stamped, store
from tests.client.fake_node import FakeNode, hold
from tierkv.client import Client, Group, connect
from tierkv.core.reasons import Reason
from tierkv.errors import ForkedClient
from tierkv.wire.messages import Match

THREADS, CALLS = 8, 1_000


@pytest.mark.scenario("B164", then="eight threads share a client, and each gets its own replies")
def test_eight_threads_share_a_client_and_each_gets_its_own_answers(client: Client, group: Group) -> None:
    """Thread i asks for prompts of which i blocks are cached."""
    prompts = [[1_000 * i + token for token in range(40)] for i in range(THREADS)]
    for i, prompt in enumerate(prompts):
        store(group, prompt[: 4 * i])

    def ask(i: int) -> set[int]:
        return {group.match(prompts[i]).blocks for _ in range(CALLS)}

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(ask, range(THREADS))) == [{i} for i in range(THREADS)]
    assert client.counters.by_reason == {}
    assert client.counters.stale_replies == 0


def test_threads_load_at_the_same_time(group: Group) -> None:
    rows = store(group, TOKENS)

    def load(_: int) -> bool:
        destination = poisoned(4)
        with group.acquire(TOKENS) as lease:
            return lease.copy_into(destination) == 4 and bool((destination == rows).all())

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(load, range(100)))


def test_closing_does_not_wait_for_calls_under_way_and_leaves_nothing_open(node: FakeNode, group: Group) -> None:
    with connect(node.directory, timeout_seconds=30) as client:
        other = client.open(make_identity())
        node.script[Match].append(hold)
        reasons: list[Reason | None] = []
        thread = threading.Thread(target=lambda: reasons.append(other.match(TOKENS).reason))
        thread.start()
        node.wait_for(Match)
        client.close()
        thread.join(30)
    assert reasons == [Reason.NODE_AWAY]


@pytest.mark.scenario("B164", then="in a forked child every call raises ForkedClient, and the parent goes on")
def test_a_forked_child_is_refused_and_its_parent_goes_on(client: Client, group: Group) -> None:
    rows = store(group, TOKENS)
    with group.acquire(TOKENS) as lease, group.reserve([*TOKENS, 1, 2]) as ticket:
        calls = [
            lambda: group.match(TOKENS),
            lambda: group.acquire(TOKENS),
            lambda: group.reserve(TOKENS),
            client.status,
            lambda: lease.copy_into(poisoned(4)),
            lease.raw_views,
            lease.count_valid,
            lambda: list(ticket.runs()),
            lambda: ticket.copy_from(stamped(group, 5)),
        ]
        child = os.fork()
        if child == 0:
            os._exit(sum(_refused(call) for call in calls))
        _pid, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == len(calls)
        destination = poisoned(4)
        assert lease.copy_into(destination) == 4
    assert (destination == rows).all()


def test_closing_in_a_forked_child_is_not_felt_by_the_parent(client: Client, group: Group, node: FakeNode) -> None:
    child = os.fork()
    if child == 0:
        client.close()
        os._exit(0)
    os.waitpid(child, 0)
    node.settle()
    assert node.detached == []
    assert group.match(TOKENS).reason is None
    assert client.counters.sessions_opened == 1


def _refused(call: object) -> bool:
    try:
        call()  # type: ignore[operator]
    except ForkedClient:
        return True
    return False


def test_a_forked_child_makes_a_client_of_its_own(node: FakeNode, client: Client, group: Group) -> None:
    """And collects the parent's mapping, which isn't there, without harm to what lies at those addresses now."""
    store(group, TOKENS)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        del client, group
        found = _count_blocks(node)
        os.write(writing, bytes([found]))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == bytes([4])
    os.waitpid(child, 0)
    assert group.match(TOKENS).blocks == 4


def _count_blocks(node: FakeNode) -> int:
    import gc

    gc.collect()
    with connect(node.directory) as own, own.open(make_identity()).acquire(TOKENS) as lease:
        return lease.copy_into(poisoned(4))


@pytest.mark.parametrize("closes", [True, False])
def test_descriptors_do_not_grow_with_clients(node: FakeNode, closes: bool) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with connect(node.directory) as client:
            group = client.open(make_identity())
            group.match(TOKENS)
            if closes:
                client.close()
    node.settle()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
