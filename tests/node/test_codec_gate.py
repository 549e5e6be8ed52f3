"""AskCodec, and OpenGroup with a lossy codec, at a node's service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.test_codec_gate import ADAPTER, FP8, coded
from tests.node.kit import IDENTITY, Kit
from tierkv.core.codec_gate import NEVER_EVALUATED, CodecGate, JudgedModel
from tierkv.core.reasons import Reason
from tierkv.wire.messages import AskCodec, CodecReply, Error, ErrorCode, OpenGroupReply


@pytest.fixture
def kit() -> Iterator[Kit]:
    gate = CodecGate(FP8)
    gate.learn([JudgedModel(IDENTITY.weights, "", FP8)])
    kit = Kit(codec_gate=gate)
    yield kit
    kit.close()


def test_a_model_that_has_passed_gets_the_codec_and_may_open_its_group(kit: Kit) -> None:
    reply = kit.ask(AskCodec, weights=IDENTITY.weights)
    assert reply == CodecReply(id=reply.id, codec=FP8)
    assert isinstance(kit.open(coded()), OpenGroupReply)


def test_under_an_adapter_nobody_has_evaluated_it_gets_none_and_its_group_is_refused_by_name(kit: Kit) -> None:
    reply = kit.ask(AskCodec, weights=IDENTITY.weights, adapter=ADAPTER)
    assert (reply.codec, reply.reason, reply.problem) == ("", Reason.NO_VERDICT, NEVER_EVALUATED)
    refused = kit.open(coded(codec="fp4"))
    assert isinstance(refused, Error)
    assert (refused.code, refused.field) == (ErrorCode.NO_VERDICT, "identity.layout.codec")


def test_a_refused_group_is_not_known(kit: Kit) -> None:
    kit.open(coded(codec="fp4"))
    assert not kit.state.usage()


def test_a_group_of_raw_blocks_is_opened_as_ever(kit: Kit) -> None:
    assert isinstance(kit.open(), OpenGroupReply)


def test_a_node_without_a_gate_stores_raw_blocks() -> None:
    kit = Kit()
    reply = kit.ask(AskCodec, weights=IDENTITY.weights)
    assert reply == CodecReply(id=reply.id)
    assert kit.open(coded()).code == ErrorCode.NO_VERDICT
    kit.close()
