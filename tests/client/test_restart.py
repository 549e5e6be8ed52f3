"""The node restarts under a client: it registers again by itself, and what it holds of the old memory stays right."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.client.conftest import TOKENS, make_identity, poisoned, stamped, store
from tests.client.fake_node import FakeNode, hold
from tierkv.client import Client, Group
from tierkv.core.reasons import Reason
from tierkv.wire.messages import Abort, Acquire, Commit, Hello, OpenGroup, Release
from tierkv.wire.messages import Match as MatchRequest

SkipTime = Callable[[Client, float], None]


@pytest.mark.scenario("B130", then="the client registers again by itself, and no user sees an error")
@pytest.mark.parametrize("notice", [False, True], ids=["noticed by a reply", "told by the supervisor"])
def test_the_client_registers_again_and_opens_its_groups(
    node: FakeNode, client: Client, group: Group, notice: bool
) -> None:
    store(group, TOKENS)
    node.restart_front(notice=notice)
    match = group.match(TOKENS)
    assert (match.blocks, match.reason) == (0, None)
    store(group, TOKENS)
    assert group.match(TOKENS).blocks == 4
    assert client.counters.sessions_opened == 2
    assert len({asked.session for asked in node.saw(OpenGroup)}) == 2
    assert node.detached == [1]


def test_restarts_in_a_row_are_followed(node: FakeNode, client: Client, group: Group) -> None:
    for count in range(10):
        node.restart_front(notice=count % 2 == 0)
        assert group.match(TOKENS).reason is None
    assert client.counters.sessions_opened == 11
    node.settle()
    assert node.detached == list(range(1, 11))


def test_a_front_that_is_lost_without_a_word_costs_no_call(node: FakeNode, client: Client, group: Group) -> None:
    """What went down with its connection is sent again over the next, where the new front answers that it does not know
    the session."""
    for _ in range(5):
        node.lose_front()
        assert group.match(TOKENS).reason is None
    assert client.counters.sessions_opened == 6


@pytest.mark.scenario("B130", then="groups that the node does not know are opened again")
def test_a_group_that_the_node_forgot_is_opened_again(node: FakeNode, group: Group) -> None:
    node._memory.groups.clear()
    assert group.match(TOKENS).reason is None
    assert len(node.saw(OpenGroup)) == 2


def test_a_lease_of_before_stays_valid_and_its_memory_mapped(node: FakeNode, client: Client, group: Group) -> None:
    """A new front has a new arena; nobody writes to the old one, so what was granted there is what it was."""
    rows = store(group, TOKENS)
    with group.acquire(TOKENS) as lease:
        node.restart_front(notice=True)
        store(group, list(range(1_000, 1_000 + 4 * 64)))
        destination = poisoned(4)
        assert lease.copy_into(destination) == 4
        assert (destination == rows).all()
        node.settle()
        assert node.detached == []
    node.settle()
    assert node.detached == [1]
    assert node.saw(Release) == []  # it was the old front's to know


def test_a_view_keeps_the_memory_of_before_mapped(node: FakeNode, client: Client, group: Group) -> None:
    rows = store(group, TOKENS)
    with group.acquire(TOKENS) as lease:
        [(_first, view)] = lease.raw_views()
    node.restart_front(notice=False)
    group.match(TOKENS)
    node.settle()
    assert node.detached == []
    assert (view == rows).all()
    del view
    group.match(TOKENS)
    node.settle()
    assert node.detached == [1]


def test_a_ticket_of_before_publishes_nothing(node: FakeNode, client: Client, group: Group) -> None:
    with group.reserve(TOKENS) as early, group.reserve([*TOKENS[:4], 1, 2, 3, 4]) as late:
        early.copy_from(stamped(group, 4))
        node.restart_front(notice=True)
        group.match(TOKENS)
        late.copy_from(stamped(group, 2))  # into memory that is still mapped
        assert early.commit().reason is Reason.SESSION_GONE
        node.settle()
        assert node.detached == []
    node.settle()
    assert node.detached == [1]
    assert node.saw(Commit) == []
    assert node.saw(Abort) == []
    assert group.match(TOKENS).blocks == 0


def test_a_commit_that_meets_the_new_front_is_refused(node: FakeNode, client: Client, group: Group) -> None:
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
        node.restart_front(notice=False)
        assert ticket.commit().reason is Reason.SESSION_GONE
    assert len(node.saw(Commit)) == 1
    assert group.match(TOKENS).reason is None


def test_a_call_that_waits_when_the_node_restarts_is_asked_again_at_once(
    node: FakeNode, client: Client, group: Group
) -> None:
    """Long before its deadline."""
    node.script[Acquire].append(hold)
    leases: list[Reason | None] = []
    thread = threading.Thread(target=lambda: leases.append(group.acquire(TOKENS, deadline_seconds=30).reason))
    thread.start()
    node.wait_for(Acquire)
    node.restart_front(notice=True)
    thread.join(30)
    assert leases == [None]
    assert len(node.saw(Acquire)) == 2


def test_a_call_that_waits_when_the_node_dies_is_a_miss_at_once(node: FakeNode, client: Client, group: Group) -> None:
    node.script[Acquire].append(hold)
    reasons: list[Reason | None] = []
    thread = threading.Thread(target=lambda: reasons.append(group.acquire(TOKENS, deadline_seconds=30).reason))
    thread.start()
    node.wait_for(Acquire)
    node.go()
    thread.join(30)
    assert reasons == [Reason.NODE_AWAY]


def test_all_threads_come_back_over_one_new_session(node: FakeNode, client: Client, group: Group) -> None:
    node.restart_front(notice=True)
    reasons: list[Reason | None] = []
    threads = [threading.Thread(target=lambda: reasons.append(group.match(TOKENS).reason)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert reasons == [None] * 8
    assert client.counters.sessions_opened == 2


def test_closing_with_a_lease_open_ends_the_session_when_it_is_released(node: FakeNode, client: Client) -> None:
    group = client.open(make_identity())
    rows = store(group, TOKENS)
    with group.acquire(TOKENS) as lease:
        client.close()
        node.settle()
        assert node.detached == []
        destination = np.zeros_like(rows)
        assert lease.copy_into(destination) == 4
    assert (destination == rows).all()
    node.settle()
    assert node.detached == [1]


def test_no_reply_of_the_old_front_is_taken_for_the_new_ones(node: FakeNode, client: Client, group: Group) -> None:
    store(group, TOKENS)
    node.restart_front(notice=True)
    assert group.match(TOKENS).blocks == 0
    tokens = {asked.session for asked in node.saw(MatchRequest)}
    assert len(tokens) == 1
    assert [hello.session in tokens for hello in node.saw(Hello)] == [False, True]


@pytest.mark.scenario(
    "B135", then="a session that the node has dropped is replaced by the call that hears of it; no call fails"
)
def test_a_session_that_the_node_dropped_is_replaced_within_the_call(
    node: FakeNode, client: Client, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 4):
        node._memory.tokens.clear()
        store(group, TOKENS)
        assert group.match(TOKENS).blocks == 4
        assert client.counters.sessions_opened == number + 1
    assert client.counters.by_reason == {}
    assert caplog.records == []


@pytest.mark.scenario(
    "B131", then="the first call of a client whose session was ended is served under a new one, in its time"
)
def test_an_idle_client_whose_session_was_ended_is_served_at_once(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    store(group, TOKENS)
    skip_time(client, 86_400.0)
    assert group.match(TOKENS).blocks == 4
    assert client.counters.sessions_opened == 1
    node._memory.tokens.clear()
    skip_time(client, 86_400.0)
    with group.acquire(TOKENS, deadline_seconds=20) as lease:
        assert (lease.blocks, lease.reason) == (4, None)
    assert client.counters.sessions_opened == 2
