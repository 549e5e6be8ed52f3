"""Asking the node for codecs, and never in the scheduler's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tierkv.client import CodecAnswer
from tierkv.core.codec import FP8, KVShape
from tierkv.core.reasons import Reason
from tierkv.integrations.connector.fence import Fence
from tierkv.integrations.vllm.codecs import Codecs

SHAPE = KVShape.head_first(element="bfloat16", layers=1, heads=1, tokens=4, dim=8)
WEIGHTS = "ab" * 32


class SlowNode:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.answer = CodecAnswer(codec=FP8)
        self.asked = 0

    def ask_codec(self, weights: str, adapter: str = "") -> CodecAnswer:
        assert self.may_answer.wait(30)
        self.asked += 1
        return self.answer


@pytest.fixture
def node() -> Iterator[SlowNode]:
    made = SlowNode()
    yield made
    made.may_answer.set()


@pytest.fixture
def codecs(node: SlowNode) -> Iterator[Codecs]:
    made = Codecs(node, SHAPE, Fence(), ask_again_seconds=0.001)  # type: ignore[arg-type]
    yield made
    node.may_answer.set()
    made.close()


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_nobody_waits_for_the_answer_and_it_is_asked_for_once(node: SlowNode, codecs: Codecs) -> None:
    assert codecs.find(WEIGHTS, "") is None
    assert codecs.find(WEIGHTS, "") is None
    node.may_answer.set()
    until(lambda: codecs.find(WEIGHTS, "") is not None)
    choice = codecs.find(WEIGHTS, "")
    assert choice is not None
    assert choice.codec is not None
    assert node.asked == 1


def test_what_was_prepared_is_there_at_once(node: SlowNode, codecs: Codecs) -> None:
    node.may_answer.set()
    codecs.prepare(WEIGHTS)
    choice = codecs.find(WEIGHTS, "")
    assert choice is not None
    assert choice.codec is not None
    assert node.asked == 1


@pytest.mark.parametrize("reason", [Reason.NO_VERDICT, Reason.WIRE_ERROR])
def test_a_no_is_an_answer(node: SlowNode, codecs: Codecs, reason: Reason) -> None:
    node.answer = CodecAnswer(reason=reason)
    node.may_answer.set()
    codecs.prepare(WEIGHTS)
    choice = codecs.find(WEIGHTS, "")
    assert choice is not None
    assert (choice.codec, choice.reason) == (None, reason)


def test_a_node_that_is_away_is_asked_until_it_is_there(
    node: SlowNode, codecs: Codecs, caplog: pytest.LogCaptureFixture
) -> None:
    node.answer = CodecAnswer(reason=Reason.NODE_AWAY)
    node.may_answer.set()
    codecs.prepare(WEIGHTS)
    assert codecs.find(WEIGHTS, "") is None
    until(lambda: node.asked > 3)
    assert codecs.find(WEIGHTS, "") is None
    node.answer = CodecAnswer(codec=FP8)
    until(lambda: codecs.find(WEIGHTS, "") is not None)
    assert caplog.text == "", "it is no news that the node is away"


def test_a_fault_is_caught_and_it_is_asked_again(
    node: SlowNode, codecs: Codecs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(weights: str, adapter: str = "") -> CodecAnswer:
        raise RuntimeError("to order")

    with monkeypatch.context() as patch:
        patch.setattr(node, "ask_codec", fail)
        codecs.prepare(WEIGHTS)
        assert codecs.find(WEIGHTS, "") is None
    node.may_answer.set()
    until(lambda: codecs.find(WEIGHTS, "") is not None)
