"""Whatever happens to the node, a call is an answer: quick, smaller, and with a reason."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.conftest import TOKENS, impatient, make_identity, poisoned, stamped, store
from tests.client.fake_node import FakeNode, answer, drop, garbage, garbage_then_reply
from tests.client.test_watch import soon
from tierkv.client import Client, Group, connect, connect_operator
from tierkv.core.reasons import Reason
from tierkv.errors import IncompleteError, LayoutMismatch, NodeUnreachable, WireError
from tierkv.wire.messages import (
    Done,
    Error,
    ErrorCode,
    Hello,
    HelloReply,
    Match,
    NotReady,
    OpenGroup,
    OpenGroupReply,
    Request,
    Status,
    Usage,
    Verify,
    Warmup,
)
from tierkv.wire.session import SESSION_SOCKET_NAME, SessionRefused

QUICK_SECONDS = 0.02
SkipTime = Callable[[Client, float], None]


def seconds_of(call: Callable[[], object]) -> float:
    """The best of a few: other things run on this machine."""
    best = 10.0
    for _ in range(5):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.scenario("B259", then="an engine without a node misses quickly")
def test_without_a_node_every_call_is_a_quick_miss(node_dir: Path, long_pauses: None) -> None:
    with connect(node_dir) as client:
        assert not client.is_connected()
        assert "session.sock" in client.problem
        group = client.open(make_identity())
        assert group.persistent is None
        assert group.match(TOKENS).reason is Reason.NODE_AWAY
        with group.acquire(TOKENS, deadline_seconds=60) as lease:
            assert (lease.blocks, lease.reason, lease.copy_into(poisoned(0))) == (0, Reason.NODE_AWAY, 0)
        with group.reserve(TOKENS, deadline_seconds=60) as ticket:
            ticket.copy_from(stamped(group, 4)) if ticket.granted else None
            assert (ticket.granted, ticket.commit().reason) == ([], Reason.NODE_AWAY)
        assert group.seal(TOKENS, wait="flushed").reason is Reason.NODE_AWAY
        assert group.report_bad(group.keys(TOKENS), 0) is Reason.NODE_AWAY
        assert client.session_token() == b""
        assert seconds_of(lambda: group.match(TOKENS)) < QUICK_SECONDS
        assert client.counters.by_reason[Reason.NODE_AWAY] >= 6


def test_a_wrong_layout_is_refused_without_a_node_too(node_dir: Path) -> None:
    with connect(node_dir) as client, pytest.raises(LayoutMismatch):
        client.open(make_identity(), block_bytes=1)


@pytest.mark.scenario("B259", then="and finds the node by itself when it comes")
def test_a_node_that_comes_is_found(node_dir: Path, skip_time: SkipTime) -> None:
    with connect(node_dir) as client:
        group = client.open(make_identity())
        assert group.match(TOKENS).reason is Reason.NODE_AWAY
        node = FakeNode(node_dir)
        try:
            skip_time(client, 0.3)
            assert group.match(TOKENS).reason is None
            assert (client.problem, group.persistent) == ("", True)
        finally:
            node.close()


def test_a_node_that_went_away_is_back_as_soon_as_the_pause_is_over(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime, caplog: pytest.LogCaptureFixture
) -> None:
    store(group, TOKENS)
    node.go()
    with caplog.at_level(logging.INFO, "tierkv.client"):
        for _ in range(6):
            assert group.match(TOKENS).reason is Reason.NODE_AWAY
            skip_time(client, 2.0)  # probes, and fails, each time
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        node.come()
        assert group.match(TOKENS).blocks == 0
        store(group, TOKENS)
        assert group.match(TOKENS).blocks == 4
    assert [record.getMessage().rpartition(" is ")[2] for record in caplog.records][1:] == ["back"]
    assert client.counters.sessions_opened == 2


def test_a_node_that_does_not_answer_costs_one_deadline(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    node.script[Match].append(drop)
    with impatient(client):
        assert group.match(TOKENS).reason is Reason.DEADLINE
        assert "Match" in client.problem
    assert group.match(TOKENS).reason is Reason.NODE_AWAY
    assert len(node.saw(Match)) == 1
    skip_time(client, 0.3)
    assert group.match(TOKENS).reason is None
    assert len(node.saw(Hello)) == 2  # the probe


def test_a_probe_that_fails_keeps_the_others_out_for_longer(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime
) -> None:
    node.script[Match].append(drop)
    node.script[Hello].append(drop)
    with impatient(client):
        group.match(TOKENS)
        skip_time(client, 0.3)
        assert group.match(TOKENS).reason is Reason.DEADLINE  # the probe
        skip_time(client, 0.3)
        assert group.match(TOKENS).reason is Reason.NODE_AWAY
    skip_time(client, 0.3)
    assert group.match(TOKENS).reason is None


def test_a_supervisor_that_says_nothing_costs_one_deadline(node: FakeNode, quick: None, long_pauses: None) -> None:
    node.silent_sessions = True
    with connect(node.directory, timeout_seconds=0.05) as client:
        assert client.counters.by_reason == {Reason.DEADLINE: 1}
        assert client.problem.startswith("no answer")
        assert client.open(make_identity()).match(TOKENS).reason is Reason.NODE_AWAY


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ErrorCode.SHUTTING_DOWN, Reason.SHUTDOWN),
        (ErrorCode.PROTOCOL_VERSION, Reason.WIRE_ERROR),
        ("too_many_sessions", Reason.NODE_AWAY),
    ],
)
def test_a_session_that_is_refused_is_a_miss_that_says_why(node: FakeNode, code: str, reason: Reason) -> None:
    node.refuse_sessions = SessionRefused(code=code, problem="not today")
    with connect(node.directory) as client:
        assert client.counters.by_reason == {reason: 1}
        assert "not today" in client.problem


@pytest.mark.scenario("B171", then="the client names the version of either side")
def test_a_node_of_another_protocol_is_told_with_both_versions(node: FakeNode) -> None:
    theirs = SessionRefused(code=ErrorCode.PROTOCOL_VERSION, problem="this node speaks protocol 2")
    node.refuse_sessions = theirs
    with connect(node.directory) as client:
        assert "this node speaks protocol 2, and this client protocol 1;" in client.problem


@pytest.mark.parametrize("code", [ErrorCode.PROTOCOL_VERSION, "wrong_user"])
def test_what_stays_wrong_until_somebody_mends_it_is_told_once_even_if_the_node_was_away_before(
    node: FakeNode, client: Client, group: Group, skip_time: SkipTime, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """Or whoever starts the right node behind a wrong one would look for something that is away."""
    node.go()
    with caplog.at_level(logging.INFO, "tierkv.client"):
        assert group.match(TOKENS).reason is Reason.NODE_AWAY
        node.refuse_sessions = SessionRefused(code=code, problem="not this one")
        node.come()
        for _ in range(4):
            skip_time(client, 2.0)  # probes
            assert group.match(TOKENS).reason is not None
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
        assert "not this one" in caplog.records[1].getMessage()
        node.refuse_sessions = None
        skip_time(client, 2.0)
        assert group.match(TOKENS).reason is None
    assert [record.getMessage().rpartition(" is ")[2] for record in caplog.records][2:] == ["back"]


def test_memory_that_is_smaller_than_promised_is_not_mapped(node: FakeNode) -> None:
    node.truncate_arena = True
    with connect(node.directory) as client:
        assert not client.is_connected()
        assert "promised" in client.problem


def test_something_else_on_the_socket_is_a_miss(node_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(node_dir / SESSION_SOCKET_NAME))
        other.listen()
        with connect(node_dir) as client:
            assert client.counters.by_reason == {Reason.NODE_AWAY: 1}


@pytest.mark.scenario("B171", then="and the client misses, saying why")
def test_a_node_of_another_protocol_is_left_alone(node: FakeNode, client: Client, skip_time: SkipTime) -> None:
    def refuse(request: Request) -> Error:
        return Error(id=request.id, code=ErrorCode.PROTOCOL_VERSION, problem="speaks 2")

    node.restart_front(notice=True)
    assert soon(lambda: client._state.session() is None)  # or what it asks under the old session is refused
    node.script[Hello].append(answer(refuse))
    assert not client.is_connected()
    assert client.problem.startswith("protocol_version: speaks 2, and this client protocol 1;")
    skip_time(client, 0.3)
    assert client.is_connected()


def test_a_front_of_another_incarnation_than_the_memory_is_not_believed(node: FakeNode, quick: None) -> None:
    node.script[Hello].append(
        answer(
            lambda request: HelloReply(id=request.id, protocol=1, incarnation=99, version="", data_dir="", host_bytes=0)
        )
    )
    with connect(node.directory, timeout_seconds=20) as client:
        assert client.is_connected()
        assert client.counters.sessions_opened == 2


def test_garbage_is_dropped_and_counted(node: FakeNode, client: Client, group: Group, skip_time: SkipTime) -> None:
    node.script[Match].extend([garbage_then_reply, garbage])
    assert group.match(TOKENS).reason is None
    with impatient(client):
        assert group.match(TOKENS).reason is Reason.DEADLINE
    assert client.counters.unreadable_replies == 2


def test_the_reply_to_something_else_is_a_miss(node: FakeNode, client: Client, group: Group) -> None:
    node.script[Match].append(answer(lambda request: Done(id=request.id)))
    assert group.match(TOKENS).reason is Reason.WIRE_ERROR
    assert group.match(TOKENS).reason is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ErrorCode.INTERNAL, Reason.WIRE_ERROR),
        (ErrorCode.SHUTTING_DOWN, Reason.SHUTDOWN),
        (ErrorCode.TIMEOUT, Reason.DEADLINE),
        (ErrorCode.KEY_MISMATCH, Reason.KEY_MISMATCH),
    ],
)
def test_an_error_is_a_miss_with_a_reason(
    node: FakeNode, client: Client, group: Group, code: ErrorCode, reason: Reason
) -> None:
    node.script[Match].append(answer(lambda request: Error(id=request.id, code=code, problem="no")))
    assert group.match(TOKENS).reason is reason
    assert client.counters.by_reason == {reason: 1}
    assert group.match(TOKENS).reason is None


def test_a_layout_refused_later_is_a_miss(node: FakeNode, client: Client, group: Group) -> None:
    node.restart_front(notice=True)
    node.script[OpenGroup].append(
        answer(lambda request: Error(id=request.id, code=ErrorCode.LAYOUT_MISMATCH, problem="", field="dtype"))
    )
    assert group.match(TOKENS).reason is Reason.LAYOUT_MISMATCH


@pytest.mark.scenario(
    "B200", then="every call is a miss with the reason key_mismatch, and one warning has the group's key of both sides"
)
def test_a_node_that_makes_other_keys_is_named_and_not_gone_on_with_in_silence(
    node: FakeNode, client: Client, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tierkv.client")
    node.restart_front(notice=True)
    theirs = b"other key scheme".ljust(32)
    for _ in range(2):
        node.script[OpenGroup].append(
            answer(lambda request: OpenGroupReply(id=request.id, group=theirs, persistent=True))
        )
        assert group.match(TOKENS).reason is Reason.KEY_MISMATCH
    (warning,) = [record.getMessage() for record in caplog.records if "other keys" in record.getMessage()]
    assert theirs.hex() in warning
    assert group.key.hex() in warning
    assert client.counters.by_reason[Reason.KEY_MISMATCH] == 2


def test_a_model_that_the_node_refuses_is_told_once_in_the_node_s_words(
    node: FakeNode, client: Client, group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tierkv.client")
    node.restart_front(notice=True)
    for _ in range(2):
        node.script[OpenGroup].append(
            answer(lambda request: Error(id=request.id, code=ErrorCode.INVALID, problem="raise slab_bytes", field="x"))
        )
        assert group.match(TOKENS).blocks == 0
    (warning,) = [record.getMessage() for record in caplog.records if "nothing is cached" in record.getMessage()]
    assert "raise slab_bytes" in warning


def test_a_closed_client_misses(node: FakeNode) -> None:
    client = connect(node.directory)
    group = client.open(make_identity())
    client.close()
    client.close()
    assert group.match(TOKENS).reason is Reason.NODE_AWAY
    assert client.problem == "the client is closed"
    node.settle()
    assert node.detached == [1]


# ---- operators


def test_an_operator_asks_without_mapping_memory(node: FakeNode) -> None:
    with connect_operator(node.directory) as operator:
        assert operator.status().state == "ready"
        assert operator.usage().rows == ()
        assert operator._state.session().arena is None  # type: ignore[union-attr]


def test_an_operator_is_told_that_no_node_is_there(node_dir: Path) -> None:
    with connect_operator(node_dir) as operator:
        for verb in (operator.status, operator.usage, lambda: list(operator.warmup()), lambda: list(operator.verify())):
            with pytest.raises(NodeUnreachable, match=str(node_dir)):
                verb()
    with pytest.raises(NodeUnreachable, match="closed"):
        operator.status()


def test_an_operator_is_told_that_the_node_is_recovering(node: FakeNode) -> None:
    node.script[Usage].append(answer(lambda request: NotReady(id=request.id, stage="headers", done=1, total=2)))
    with connect_operator(node.directory) as operator:
        with pytest.raises(IncompleteError, match="recovering"):
            operator.usage()
        assert operator.usage().rows == ()


def test_an_operator_is_told_what_the_node_refuses(node: FakeNode) -> None:
    node.script[Status].append(answer(lambda request: Error(id=request.id, code=ErrorCode.INTERNAL, problem="a bug")))
    node.script[Status].append(answer(lambda request: Done(id=request.id)))
    with connect_operator(node.directory) as operator:
        for problem in ("internal: a bug", "wire_error"):
            with pytest.raises(WireError, match=problem):
                operator.status()


def test_jobs_yield_progress_until_they_are_finished(node: FakeNode) -> None:
    with connect_operator(node.directory) as operator:
        assert [progress.finished for progress in operator.warmup(budget_bytes=5, tenant="t")] == [False, True]
        node._memory.steps = iter(range(9))  # type: ignore[assignment]
        assert [progress.finished for progress in operator.verify(repair=True)] == [False, True]
    assert {(asked.budget_bytes, asked.tenant, asked.cancel) for asked in node.saw(Warmup)} == {(5, "t", False)}
    assert len({asked.job for asked in node.saw(Warmup)}) == 1
    assert {(asked.repair, asked.cancel) for asked in node.saw(Verify)} == {(True, False)}


def test_a_job_that_is_left_early_is_cancelled(node: FakeNode) -> None:
    with connect_operator(node.directory) as operator:
        progress = operator.verify()
        next(progress)
        progress.close()  # type: ignore[attr-defined]
    assert [asked.cancel for asked in node.saw(Verify)] == [False, True]
