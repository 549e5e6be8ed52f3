"""Replies get lost, late, and doubled; grants don't leak, and nobody gets another's answer."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.client.conftest import TOKENS, impatient, stamped, store
from tests.client.fake_node import FakeNode, answer, drop, garbage, hold, twice
from tierkv.client import Client, Committed, Group
from tierkv.client import doubts as doubts_module
from tierkv.client.doubts import CAPACITY, Doubts
from tierkv.client.session import Session
from tierkv.client.steps import Ask
from tierkv.core.reasons import Reason
from tierkv.wire.messages import (
    Abort,
    Acquire,
    Commit,
    Done,
    Error,
    ErrorCode,
    Hello,
    Match,
    Release,
    Reserve,
)

SkipTime = Callable[[Client, float], None]


@pytest.mark.parametrize("lost", [drop, garbage])
def test_a_lease_whose_reply_was_lost_is_released_at_once(
    node: FakeNode, client: Client, group: Group, lost: object, skip_time: SkipTime
) -> None:
    store(group, TOKENS)
    node.script[Acquire].append(lost)  # type: ignore[arg-type]
    with group.acquire(TOKENS, deadline_seconds=0.05) as lease:
        assert (lease.blocks, lease.reason) == (0, Reason.DEADLINE)
    assert [release.grant for release in node.saw(Release, at_least=1)] == [node.saw(Acquire)[0].grant]
    assert node.has_no_grants()
    skip_time(client, 0.3)
    assert group.match(TOKENS).blocks == 4
    assert client.counters.in_doubt == 0


def test_a_ticket_whose_reply_was_lost_is_aborted_at_once(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    node.script[Reserve].append(drop)
    with group.reserve(TOKENS, deadline_seconds=0.05) as ticket:
        assert (ticket.granted, ticket.reason) == ([], Reason.DEADLINE)
    assert [abort.grant for abort in node.saw(Abort, at_least=1)] == [node.saw(Reserve)[0].grant]
    assert node.has_no_grants()
    skip_time(client, 0.3)
    store(group, TOKENS)
    assert client.counters.in_doubt == 0


def test_an_end_whose_reply_was_lost_is_sent_until_it_is_confirmed(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    store(group, TOKENS)
    node.script[Release].extend([drop, drop, drop])
    with impatient(client):
        group.acquire(TOKENS).release()
    assert client.counters.in_doubt == 1
    for _ in range(3):
        skip_time(client, 1.1)
        assert group.match(TOKENS).blocks == 4
    assert client.counters.in_doubt == 0
    releases = node.saw(Release, at_least=4)
    assert len({release.grant for release in releases}) == 1
    assert len({release.id for release in releases}) == len(releases) == 4


def test_a_release_waits_for_no_answer_and_is_not_repeated_once_that_has_come(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    store(group, TOKENS)
    node.script[Release].append(hold)
    group.acquire(TOKENS).release()
    assert client.counters.by_reason == {}
    assert client.counters.in_doubt == 1
    node.wait_for(Release)
    node.release_held()
    group.match(TOKENS)
    skip_time(client, 1.1)
    assert group.match(TOKENS).blocks == 4
    assert client.counters.in_doubt == 0
    assert client.counters.stale_replies == 0
    assert len(node.saw(Release, at_least=1)) == 1


def test_an_abort_waits_for_no_answer(node: FakeNode, client: Client, group: Group) -> None:
    node.script[Abort].append(drop)
    group.reserve(TOKENS).abort()
    assert client.counters.by_reason == {}
    assert node.has_no_grants()


def test_an_end_in_doubt_goes_ahead_of_the_next_request(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    store(group, TOKENS)
    lease = group.acquire(TOKENS)
    node.script[Match].append(drop)
    with impatient(client):
        group.match(TOKENS)
    lease.release()  # nobody is asked while the node doesn't answer
    assert node.saw(Release) == []
    assert client.counters.in_doubt == 1
    skip_time(client, 0.3)
    group.match(TOKENS)
    kinds = [type(asked) for asked in node.saw(object)]
    assert kinds.index(Release) < len(kinds) - 1 - kinds[::-1].index(Hello) < len(kinds) - 1
    assert node.has_no_grants()


def test_a_commit_whose_reply_was_lost_is_published_all_the_same(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    node.script[Commit].append(drop)
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
        with impatient(client):
            assert ticket.commit().reason is Reason.DEADLINE
    assert node.saw(Abort) == []
    skip_time(client, 1.1)
    assert group.match(TOKENS).blocks == 4
    assert client.counters.in_doubt == 0  # the second commit found no ticket, which settles it too


def test_a_commit_that_is_only_sent_waits_for_nobody_and_goes_ahead_of_what_is_asked_next(
    node: FakeNode, client: Client, group: Group
) -> None:
    node.script[Commit].append(hold)
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
        assert ticket.commit(wait="sent") == Committed(visible=0, staged=4)
    assert client.counters.in_doubt == 1
    assert group.match(TOKENS).blocks == 4
    node.release_held()
    until = time.monotonic() + 20.0
    while client.counters.in_doubt and time.monotonic() < until:
        group.match(TOKENS)  # some later call notes the answer; before it is due to be asked for again
    assert client.counters.in_doubt == 0
    assert len(node.saw(Commit)) == 1
    assert node.saw(Abort) == []


def test_a_commit_that_is_only_sent_is_sent_until_it_is_confirmed(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    node.script[Commit].extend([drop, drop])
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
        ticket.commit(wait="sent")
    for _ in range(2):
        skip_time(client, 1.1)
        assert group.match(TOKENS).blocks == 4
    assert client.counters.in_doubt == 0
    assert len(node.saw(Commit)) == 3


def test_a_commit_that_cannot_be_sent_says_so(node: FakeNode, client: Client, group: Group) -> None:
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
        node.script[Match].append(drop)
        with impatient(client):
            group.match(TOKENS)
        assert ticket.commit(wait="sent") == Committed(visible=0, staged=0, reason=Reason.NODE_AWAY)
    assert client.counters.in_doubt == 1
    assert node.saw(Commit) == []


def test_a_commit_waits_for_what_there_is_to_wait_for(group: Group) -> None:
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(stamped(group, 4))
        with pytest.raises(ValueError, match="soon"):
            ticket.commit(wait="soon")
        assert ticket.commit().visible == 4


def test_a_grant_that_was_refused_as_too_large_is_given_back(node: FakeNode, client: Client, group: Group) -> None:
    store(group, TOKENS)
    node.script[Acquire].append(answer(lambda asked: Error(id=asked.id, code=ErrorCode.TOO_LARGE, problem="")))
    assert group.acquire(TOKENS).reason is Reason.WIRE_ERROR
    assert node.has_no_grants()


def test_a_reply_that_came_twice_counts_once(node: FakeNode, client: Client, group: Group) -> None:
    node.script[Match].extend([twice, twice])
    store(group, TOKENS)
    assert group.match(TOKENS).blocks == 4
    assert group.match(TOKENS).blocks == 4
    assert group.match(TOKENS).blocks == 4
    assert client.counters.stale_replies == 2


def test_a_late_reply_is_nobody_elses(node: FakeNode, client: Client, group: Group, skip_time: SkipTime) -> None:
    store(group, TOKENS)
    node.script[Match].append(hold)
    with impatient(client):
        assert group.match([1, 2, 3, 4]).reason is Reason.DEADLINE  # its reply will say 0 blocks
    node.release_held()
    skip_time(client, 0.3)
    assert group.match(TOKENS).blocks == 4
    assert client.counters.stale_replies == 1


def test_a_late_lease_is_released(node: FakeNode, client: Client, group: Group, skip_time: SkipTime) -> None:
    store(group, TOKENS)
    node.script[Acquire].append(hold)
    assert group.acquire(TOKENS, deadline_seconds=0.05).blocks == 0
    node.release_held()
    skip_time(client, 1.1)
    group.match(TOKENS)
    assert node.has_no_grants()
    assert client.counters.in_doubt == 0


def test_a_call_that_is_interrupted_gives_back_what_it_may_have_got(
    node: FakeNode, client: Client, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the request and its reply."""
    store(group, TOKENS)
    from tierkv.client.links import Link

    receive = Link._receive

    def interrupted(link: Link) -> object:
        reply = receive(link)
        if type(reply).__name__ == "AcquireReply":
            raise KeyboardInterrupt
        return reply

    monkeypatch.setattr(Link, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.acquire(TOKENS)
    assert node.has_no_grants()
    assert len(node.saw(Release, at_least=1)) == 1


def test_a_verb_that_is_dropped_half_way_leaves_a_doubt(client: Client, group: Group) -> None:
    verb = client._verbs.acquire(
        group._record, group.keys(TOKENS), deadline_seconds=1.0, max_blocks=None, holders=(), revocable=False
    )
    assert isinstance(next(verb), Ask)
    verb.close()
    assert client.counters.in_doubt == 1


def test_doubts_are_bounded_and_the_oldest_given_up(client: Client) -> None:
    session = client._state.session()
    assert isinstance(session, Session)
    doubts = Doubts()
    for number in range(CAPACITY + 3):
        doubts.add(session, Release(id=0, grant=number.to_bytes(16, "little")))
    assert (len(doubts), doubts.dropped) == (CAPACITY, 3)
    oldest = next(doubts.due(session, 0.0))
    assert oldest.ending.grant == (3).to_bytes(16, "little")
    doubts.session_over(session)
    assert len(doubts) == 0


def test_a_doubt_has_one_answer_that_counts(client: Client) -> None:
    due = doubts_module.RESEND_SECONDS
    session = client._state.session()
    assert isinstance(session, Session)
    doubts = Doubts()
    doubts.add(session, Release(id=0, grant=b"g" * 16))
    [doubt] = doubts.due(session, 0.0)
    doubts.sent(doubt, doubt.renew(41), 0.0)
    assert list(doubts.due(session, 0.5 * due)) == []
    [doubt] = doubts.due(session, 1.5 * due)
    doubts.sent(doubt, doubt.renew(42), 1.5 * due)
    assert not doubts.answered(41)
    assert doubts.answered(42)
    assert not doubts.answered(42)
    assert Done(id=42).id == 42
