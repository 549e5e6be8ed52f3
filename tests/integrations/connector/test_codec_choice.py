"""With which codec blocks are stored: the node is asked, and what it says is done where the engine can."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.stand_in import StandInClient
from tierkv.client import CodecAnswer
from tierkv.core.codec import FP8, KVShape
from tierkv.core.reasons import Reason
from tierkv.integrations.connector.codec_choice import choose_codec

SHAPE = KVShape.head_first(element="bfloat16", layers=1, heads=1, tokens=4, dim=8)
WEIGHTS, ADAPTER = "ab" * 32, "cd" * 32


def choose(answer: CodecAnswer, weights: str = WEIGHTS, kv_shape: KVShape | None = SHAPE) -> tuple[Any, StandInClient]:
    client = StandInClient(answer)
    return choose_codec(client, weights, ADAPTER, kv_shape), client  # type: ignore[arg-type]


def test_what_the_node_says_is_done() -> None:
    choice, client = choose(CodecAnswer(codec=FP8))
    assert choice.codec is not None
    assert (choice.codec.name, choice.codec.raw_bytes, choice.reason) == (FP8, SHAPE.raw_bytes, None)
    assert client.asked == [(WEIGHTS, ADAPTER)]


def test_a_node_without_a_codec_is_no_matter() -> None:
    assert choose(CodecAnswer())[0].reason is None
    assert choose(CodecAnswer())[0].codec is None


@pytest.mark.parametrize("reason", [Reason.NO_VERDICT, Reason.NODE_AWAY])
def test_without_the_node_s_word_blocks_are_stored_as_they_are_and_it_says_why(
    reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    choice, _ = choose(CodecAnswer(reason=reason, problem="because"))
    assert (choice.codec, choice.reason, choice.problem) == (None, reason, "because")
    assert "because" in caplog.text


@pytest.mark.parametrize(
    ("answer", "kv_shape", "reason"),
    [(FP8, None, Reason.NO_SHAPE), ("fp4_of_later", SHAPE, Reason.UNKNOWN_FORMAT)],
)
def test_what_can_not_be_done_here_is_not_done_and_named(
    answer: str, kv_shape: KVShape | None, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    choice, _ = choose(CodecAnswer(codec=answer), kv_shape=kv_shape)
    assert (choice.codec, choice.reason) == (None, reason)
    assert answer in caplog.text


def test_weights_without_a_fingerprint_have_no_verdict_to_ask_for() -> None:
    choice, client = choose(CodecAnswer(codec=FP8), weights="")
    assert choice.codec is None
    assert client.asked == []
