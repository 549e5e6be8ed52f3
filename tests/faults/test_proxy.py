"""The proxy itself: with no rule it is not there; each fault is what its name says, on both kinds of sockets."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.client.conftest import TOKENS, impatient, long_pauses, make_identity, poisoned, skip_time, stamped, store
from tests.client.fake_node import FakeNode
from tests.client.test_watch import has_detached, soon
from tests.faults.proxy import Fault, MessageCutter, Proxy, Way
from tierkv.client import Client, aio, connect
from tierkv.core.reasons import Reason
from tierkv.wire.messages import Match, Release

__all__ = ["long_pauses", "skip_time"]

SkipTime = Callable[[Client, float], None]


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[FakeNode]:
    path = Path(tempfile.mkdtemp(dir=runtime_dir))
    fake = FakeNode(path)
    yield fake
    fake.close()
    shutil.rmtree(path)


@pytest.fixture
def proxy(node: FakeNode, runtime_dir: Path) -> Iterator[Proxy]:
    path = Path(tempfile.mkdtemp(dir=runtime_dir))
    with Proxy(node.directory, path) as proxy:
        yield proxy
    shutil.rmtree(path)


@pytest.fixture
def client(proxy: Proxy) -> Iterator[Client]:
    with connect(proxy.directory, timeout_seconds=20) as client:
        yield client


def test_without_a_rule_everything_passes_and_is_seen(proxy: Proxy, client: Client, node: FakeNode) -> None:
    group = client.open(make_identity())
    rows = store(group, TOKENS)
    with group.acquire(TOKENS) as lease:
        destination = poisoned(4)
        assert lease.copy_into(destination) == 4
    assert (destination == rows).all()
    assert node.has_no_grants()
    for kind in ("Hello", "OpenGroup", "Reserve", "Commit", "Acquire"):
        assert len(proxy.saw(kind)) == len(proxy.saw(kind, Way.REPLY)) == 1, kind
    assert len(proxy.saw("SessionHello")) == len(proxy.saw("SessionGrant", Way.REPLY)) == 1


def test_the_session_socket_carries_descriptors_and_its_end(proxy: Proxy, client: Client, node: FakeNode) -> None:
    assert client.is_connected()
    client.close()
    assert soon(lambda: has_detached(node, [1]))


def test_what_is_dropped_never_arrives(proxy: Proxy, client: Client, node: FakeNode) -> None:
    group = client.open(make_identity())
    proxy.add("Match", Way.REQUEST, Fault.DROP)
    with impatient(client):
        assert group.match(TOKENS).reason is Reason.DEADLINE
    assert node.saw(Match) == []


def test_the_nth_of_a_kind_can_be_meant(proxy: Proxy, client: Client, node: FakeNode) -> None:
    group = client.open(make_identity())
    rule = proxy.add("Match", Way.REQUEST, Fault.TWICE, nth=2)
    for expected in (0, 1, 1):
        assert group.match(TOKENS).reason is None
        assert rule.met == expected
    assert len(node.saw(Match, at_least=4)) == 4


def test_what_is_held_arrives_when_it_is_released(proxy: Proxy, client: Client, node: FakeNode) -> None:
    group = client.open(make_identity())
    rule = proxy.add("Match", Way.REPLY, Fault.HOLD)
    reasons: list[object] = []
    thread = threading.Thread(target=lambda: reasons.append(group.match(TOKENS).reason))
    thread.start()
    rule.wait()
    assert reasons == []
    assert rule.release() == 1
    thread.join(20)
    assert reasons == [None]


def test_what_is_swapped_comes_behind_the_next(proxy: Proxy, client: Client, node: FakeNode) -> None:
    group = client.open(make_identity())
    store(group, TOKENS)
    lease = group.acquire(TOKENS)
    proxy.add("Release", Way.REQUEST, Fault.SWAP)
    lease.release()
    group.match(TOKENS)
    kinds = [type(asked) for asked in node.saw(object) if isinstance(asked, Match | Release)]
    node.wait_for(Release)
    assert kinds[0] is Match


def test_a_cut_ends_one_connection_and_the_client_makes_another(proxy: Proxy, client: Client) -> None:
    group = client.open(make_identity())
    assert proxy.cut() == 1
    assert group.match(TOKENS).reason is None
    assert client.counters.sessions_opened == 1


def test_a_node_that_is_away_is_away_through_the_proxy_too(proxy: Proxy, client: Client, node: FakeNode) -> None:
    group = client.open(make_identity())
    node.go()
    assert group.match(TOKENS).reason is Reason.NODE_AWAY


def test_unruliness_comes_from_its_seed(proxy: Proxy, client: Client) -> None:
    group = client.open(make_identity())

    def faults(seed: int) -> list[Fault]:
        with proxy._changed:
            before = len(proxy.seen)
        proxy.unruly(seed, {Fault.TWICE: 0.3, Fault.HOLD: 0.2}, most_seconds=0.001)
        for _ in range(20):
            assert group.match(TOKENS).reason is None
        proxy.unruly(0, {})
        return [seen.fault for seen in proxy.seen[before:] if seen.way is Way.REQUEST]

    first = faults(7)
    assert len(set(first)) == 3
    assert len(first) == 20


def test_messages_are_cut_wherever_the_bytes_are() -> None:
    greeting, command = b"\xff" + bytes(63), b"\x04\x05READY"
    short, long = b"\x00\x03abc", b"\x02" + (300).to_bytes(8, "big") + b"x" * 300
    parts = b"\x01\x01a\x00\x01b"
    whole = greeting + command + short + long + parts
    expected = [(command, None), (short, b"abc"), (long, b"x" * 300), (parts, b"b")]
    for step in (1, 7, 64, len(whole)):
        cutter = MessageCutter()
        pieces = [piece for at in range(0, len(whole), step) for piece in cutter.feed(whole[at : at + step])]
        assert b"".join(raw for raw, _ in pieces) == whole
        assert [piece for piece in pieces if piece[0] not in greeting][-4:] == expected


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
def test_a_request_whose_connection_is_cut_is_answered_over_the_next(
    proxy: Proxy, client: Client, node: FakeNode, skip_time: SkipTime, way: Way, fault: Fault
) -> None:
    group = client.open(make_identity())
    store(group, TOKENS)
    for _ in range(5):
        rule = proxy.add("Acquire", way, fault)
        with group.acquire(TOKENS, deadline_seconds=20) as lease:
            assert lease.blocks == 4
        assert rule.met == 1
    assert client.counters.sessions_opened == 1
    skip_time(client, 1.1)  # a release that went down with its connection is sent again by a later call
    assert group.match(TOKENS).blocks == 4
    assert node.has_no_grants()


def test_a_release_that_went_down_with_its_connection_goes_ahead_of_the_next_request(
    proxy: Proxy, client: Client, node: FakeNode
) -> None:
    group = client.open(make_identity())
    store(group, TOKENS)
    lease = group.acquire(TOKENS)
    cut = proxy.add("Release", Way.REQUEST, Fault.CUT_BEFORE)
    lease.release()
    cut.wait()
    assert node.open_grants == 1
    assert group.match(TOKENS).blocks == 4
    assert node.has_no_grants()
    seen = [type(message) for message in node.saw(object)]  # it may be sent once more while its answer is on the way
    assert Match in seen[seen.index(Release) :]


def test_an_event_loop_sends_such_a_release_again_though_nothing_is_asked(proxy: Proxy, node: FakeNode) -> None:
    async def engine() -> None:
        async with await aio.connect(proxy.directory, timeout_seconds=20) as client:
            group = await client.open(make_identity())
            async with group.reserve(TOKENS) as ticket:
                await ticket.copy_from(stamped(group, 4))
                await ticket.commit()
            async with group.acquire(TOKENS) as lease:
                assert lease.blocks == 4
                cut = proxy.add("Release", Way.REQUEST, Fault.CUT_BEFORE)
            await asyncio.to_thread(cut.wait)
            assert await asyncio.to_thread(node.has_no_grants)

    asyncio.run(engine())
