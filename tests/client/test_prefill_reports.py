"""What engines tell of their prompts: it goes with other calls, and holds none of them up."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import TOKENS, make_identity
from tests.client.fake_node import FakeNode, answer, drop
from tests.client.test_fails_open import SkipTime
from tierkv.client import Client, Group, connect
from tierkv.client import aio as asynchronous
from tierkv.client.groups import GroupRecord, declare
from tierkv.client.prefill_reports import EVERY_SECONDS, MOST_WAITING, PrefillReports
from tierkv.core.prefill_rates import PrefillSample
from tierkv.wire.messages import MAX_PREFILL_SAMPLES, Error, ErrorCode, ReportPrefill


def tell(group: Group, seconds: float = 0.5, *, tokens: int = 2_048, first_token: int = 4_096) -> None:
    group.report_prefill(tokens=tokens, first_token=first_token, seconds=seconds)


def test_what_was_told_goes_with_the_next_call(group: Group, node: FakeNode) -> None:
    tell(group, 0.5)
    tell(group, 0.25)
    assert node.saw(ReportPrefill) == []
    group.match(TOKENS)
    (sent,) = node.saw(ReportPrefill, at_least=1)
    assert sent.group == group.key
    assert sent.samples == (PrefillSample(2_048, 4_096, 0.5), PrefillSample(2_048, 4_096, 0.25))


def test_there_is_one_message_a_second_at_most(group: Group, node: FakeNode, skip_time: SkipTime) -> None:
    client = group._client
    for _ in range(5):
        tell(group)
        group.match(TOKENS)
    assert len(node.saw(ReportPrefill, at_least=1)) == 1
    skip_time(client, EVERY_SECONDS)
    group.match(TOKENS)
    _, second = node.saw(ReportPrefill, at_least=2)
    assert len(second.samples) == 4
    group.match(TOKENS)
    assert len(node.saw(ReportPrefill)) == 2


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(drop, id="lost"),
        pytest.param(
            answer(lambda request: Error(id=request.id, code=ErrorCode.UNKNOWN_GROUP, problem="?")), id="refused"
        ),
        pytest.param(
            answer(lambda request: Error(id=request.id, code=ErrorCode.UNKNOWN_MESSAGE, problem="?")), id="older node"
        ),
    ],
)
def test_whatever_becomes_of_it_is_no_call_s_concern(group: Group, node: FakeNode, how: Any) -> None:
    node.script[ReportPrefill].append(how)
    tell(group)
    group.match(TOKENS)
    node.wait_for(ReportPrefill)
    assert group.match(TOKENS).reason is None
    counters = group._client.counters
    assert (counters.stale_replies, counters.unreadable_replies, dict(counters.by_reason)) == (0, 0, {})
    assert counters.sessions_opened == 1


def test_what_can_not_be_true_is_left_out(group: Group, node: FakeNode) -> None:
    for seconds in (float("nan"), float("inf"), -0.1, 0.0, 1e9):
        tell(group, seconds)
    tell(group, tokens=0)
    tell(group, tokens=2**40)
    tell(group, first_token=-1)
    group.match(TOKENS)
    tell(group, 0.125)
    group.match(TOKENS)
    (sent,) = node.saw(ReportPrefill, at_least=1)
    assert [sample.seconds for sample in sent.samples] == [0.125]


def test_without_a_node_it_waits_for_one_and_keeps_the_latest(node_dir: Path, skip_time: SkipTime) -> None:
    with connect(node_dir) as client:
        group = client.open(make_identity())
        for number in range(2 * MOST_WAITING):
            tell(group, 1.0 + number)
        group.match(TOKENS)
        node = FakeNode(node_dir)
        try:
            skip_time(client, 0.3)
            assert group.match(TOKENS).reason is None
            (sent,) = node.saw(ReportPrefill, at_least=1)
            assert len(sent.samples) == MAX_PREFILL_SAMPLES
            assert sent.samples[-1].seconds == 2 * MOST_WAITING
        finally:
            node.close()


def test_many_threads_tell_and_ask_at_once(client: Client, group: Group, node: FakeNode, skip_time: SkipTime) -> None:
    def work(number: int) -> None:
        tell(group, 1.0 + number)
        assert group.match(TOKENS).reason is None

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(MAX_PREFILL_SAMPLES)))
    skip_time(client, EVERY_SECONDS)
    group.match(TOKENS)
    seen = [sample.seconds for sent in node.saw(ReportPrefill, at_least=2) for sample in sent.samples]
    assert sorted(seen) == [1.0 + number for number in range(MAX_PREFILL_SAMPLES)]


def test_the_asyncio_client_tells_alike(node: FakeNode, quick: None) -> None:
    async def program() -> None:
        async with await asynchronous.connect(node.directory, timeout_seconds=20) as client:
            group = await client.open(make_identity())
            group.report_prefill(tokens=2_048, first_token=0, seconds=0.5)
            assert (await group.match(TOKENS)).reason is None
            await asyncio.to_thread(node.wait_for, ReportPrefill)
            assert (await group.match(TOKENS)).reason is None
            assert client.counters.stale_replies == 0

    asyncio.run(program())
    (sent,) = node.saw(ReportPrefill)
    assert sent.samples == (PrefillSample(2_048, 0, 0.5),)


# ---- the queue


class InUse:
    """What the queue asks of a session."""

    def __init__(self, *opened: GroupRecord, tenant: str = "") -> None:
        self.token = b"session-token-16"
        self.opened = {group.key for group in opened}
        self.tenant = tenant


def record(salt: str) -> GroupRecord:
    return declare(
        make_identity(weights=salt),
        rank=0,
        model_name="",
        adapter_name="",
        manifest=(),
        block_bytes=None,
        persistent=True,
    )


def test_groups_take_turns_and_one_that_is_not_open_waits() -> None:
    first, second, closed = record("a"), record("b"), record("c")
    waiting = PrefillReports()
    for group in (closed, first, second, first):
        waiting.add(group, PrefillSample(1, 0, 1.0))
    session: Any = InUse(first, second)
    reports = [waiting.take(session, 7 + number, number * EVERY_SECONDS) for number in range(3)]
    assert [(one.group, len(one.samples)) for one in reports if one is not None] == [(first.key, 2), (second.key, 1)]
    assert reports[2] is None
    opened: Any = InUse(closed)
    report = waiting.take(opened, 10, 10.0)
    assert report is not None
    assert report.group == closed.key
    assert not waiting.is_due(100.0)


def test_a_tenant_that_is_not_trusted_tells_nothing() -> None:
    group, waiting = record("a"), PrefillReports()
    waiting.add(group, PrefillSample(1, 0, 1.0))
    session: Any = InUse(group, tenant="inline:1001:")
    assert waiting.take(session, 1, 0.0) is None
    assert not waiting.is_due(0.0)


def test_only_answers_to_reports_are_its_own() -> None:
    group, waiting = record("a"), PrefillReports()
    waiting.add(group, PrefillSample(1, 0, 1.0))
    session: Any = InUse(group)
    assert waiting.take(session, 5, 0.0) is not None
    assert [waiting.answered(number) for number in (4, 5, 5)] == [False, True, False]
