"""What a client is told of the codec for a model, and what it does when nobody tells it."""

from __future__ import annotations

import asyncio

import pytest

from tests.client.conftest import make_identity
from tests.client.fake_node import FakeNode, answer, drop
from tierkv.client import Client, CodecAnswer
from tierkv.client import aio as asynchronous
from tierkv.core.reasons import Reason
from tierkv.wire.messages import AskCodec, CodecReply, Error, ErrorCode, OpenGroup

WEIGHTS, ADAPTER = "ab" * 32, "cd" * 32


def test_the_nodes_word_is_passed_on(client: Client, node: FakeNode) -> None:
    def say(request: AskCodec) -> CodecReply:
        return CodecReply(id=request.id, codec="", reason="no_verdict", problem="run an eval")

    node.script[AskCodec].append(answer(say))
    assert client.ask_codec(WEIGHTS, ADAPTER) == CodecAnswer(reason=Reason.NO_VERDICT, problem="run an eval")
    (asked,) = node.saw(AskCodec)
    assert (asked.weights, asked.adapter) == (WEIGHTS, ADAPTER)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param(drop, Reason.DEADLINE, id="lost"),
        pytest.param(
            answer(lambda request: Error(id=request.id, code=ErrorCode.UNKNOWN_MESSAGE, problem="?")),
            Reason.WIRE_ERROR,
            id="older node",
        ),
    ],
)
def test_where_it_can_not_be_asked_blocks_stay_as_they_are(
    client: Client, node: FakeNode, how: object, reason: Reason
) -> None:
    client.is_connected()
    client._state.timeout_seconds = 0.05
    node.script[AskCodec].append(how)  # type: ignore[arg-type]
    assert client.ask_codec(WEIGHTS) == CodecAnswer(reason=reason)


def test_a_group_refused_for_want_of_a_verdict_is_not_asked_for_by_another_name(client: Client, node: FakeNode) -> None:
    refuse = answer(lambda request: Error(id=request.id, code=ErrorCode.NO_VERDICT, problem="no eval"))
    node.script[OpenGroup].extend([refuse, refuse])
    match = client.open(make_identity()).match([1, 2, 3, 4])
    assert match.reason is Reason.NO_VERDICT


def test_the_asyncio_client_asks_alike(node: FakeNode) -> None:
    async def ask() -> CodecAnswer:
        async with await asynchronous.connect(node.directory) as client:
            return await client.ask_codec(WEIGHTS)

    assert asyncio.run(ask()) == CodecAnswer()
