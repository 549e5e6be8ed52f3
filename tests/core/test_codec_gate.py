"""Which codec a model gets, and which groups are refused."""

from __future__ import annotations

import msgspec
import pytest

from tests.node.kit import IDENTITY
from tierkv.core.codec_gate import NEVER_EVALUATED, RAW, CodecChoice, CodecGate, JudgedModel
from tierkv.core.identity import Identity
from tierkv.core.reasons import Reason

FP8 = "fp8_e4m3"
ADAPTER = "cd" * 32


def coded(identity: Identity = IDENTITY, codec: str = FP8) -> Identity:
    return msgspec.structs.replace(identity, layout=msgspec.structs.replace(identity.layout, codec=codec))


@pytest.fixture
def gate() -> CodecGate:
    gate = CodecGate(FP8)
    gate.learn([JudgedModel(IDENTITY.weights, "", FP8), JudgedModel("ef" * 32, "", FP8, "agreement is too low")])
    return gate


def test_a_model_that_has_passed_gets_the_codec(gate: CodecGate) -> None:
    assert gate.choose(IDENTITY.weights, "") == CodecChoice(FP8)
    assert gate.why_refused(coded()) == ""


def test_one_that_failed_stays_raw_and_it_is_said_why(gate: CodecGate) -> None:
    assert gate.choose("ef" * 32, "") == CodecChoice(RAW, Reason.NO_VERDICT, "agreement is too low")


def test_new_weights_have_passed_nothing(gate: CodecGate) -> None:
    others = msgspec.structs.replace(coded(), weights="12" * 32)
    assert gate.choose(others.weights, "") == CodecChoice(RAW, Reason.NO_VERDICT, NEVER_EVALUATED)
    assert gate.why_refused(others) == NEVER_EVALUATED


def test_an_adapter_needs_an_eval_of_its_own(gate: CodecGate) -> None:
    adapted = msgspec.structs.replace(coded(), adapter=ADAPTER)
    assert gate.choose(IDENTITY.weights, ADAPTER).codec == RAW
    assert gate.why_refused(adapted) == NEVER_EVALUATED
    gate.learn([JudgedModel(IDENTITY.weights, ADAPTER, FP8)])
    assert gate.choose(IDENTITY.weights, ADAPTER).codec == FP8
    assert gate.why_refused(adapted) == ""


def test_weights_without_a_fingerprint_have_passed_nothing(gate: CodecGate) -> None:
    assert gate.choose("", "").reason is Reason.NO_VERDICT
    assert gate.why_refused(msgspec.structs.replace(coded(), weights="", epoch="e")) == NEVER_EVALUATED


def test_blocks_as_they_are_need_no_eval(gate: CodecGate) -> None:
    assert gate.why_refused(IDENTITY) == ""
    assert CodecGate().why_refused(IDENTITY) == ""


def test_another_codec_than_the_nodes_is_refused(gate: CodecGate) -> None:
    assert "'fp4'" in gate.why_refused(coded(codec="fp4"))
    assert "codec = raw" in CodecGate().why_refused(coded())


def test_a_node_of_raw_blocks_wants_nothing_else_and_gives_no_reason() -> None:
    gate = CodecGate()
    gate.learn([JudgedModel(IDENTITY.weights, "", FP8)])
    assert gate.choose(IDENTITY.weights, "") == CodecChoice()
