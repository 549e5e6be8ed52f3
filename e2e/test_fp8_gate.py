"""A node with codec = fp8: which models get it, which don't, and when it does not start at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.harness import Node, StampedEngine, data_of
from tests.client.test_coded_groups import SHAPE, coded_identity
from tests.verdicts import FP8, measured, verdict, write_passing
from tierkv.client import connect
from tierkv.core.reasons import Reason
from tierkv.node.control import MAX_JUDGED
from tierkv.storage.directory import DataDirectory
from tierkv.storage.verdicts import write_verdict

pytestmark = pytest.mark.timeout(120)

WEIGHTS, OTHERS, ADAPTER = "ab" * 32, "cd" * 32, "ef" * 32
BLOCKS = 4


def test_without_a_verdict_it_does_not_start_and_says_which_command_to_run(tmp_path: Path) -> None:
    with Node(tmp_path, codec="fp8") as node:
        ended = node.spawn(log=tmp_path / "start.log")
        assert ended.wait(30) == 2
        said = (tmp_path / "start.log").read_text()
        assert f"tierkv eval --model DIR --prompts FILE --data-dir {data_of(node)}" in said


def test_a_model_that_has_passed_gets_the_codec_and_others_stay_raw(tmp_path: Path) -> None:
    with Node(tmp_path, codec="fp8") as node:
        write_passing(data_of(node), WEIGHTS)
        with DataDirectory.open(data_of(node)) as directory:
            write_verdict(directory, verdict(OTHERS, result=measured(agreement=0.2)))
            for number in range(MAX_JUDGED + 5):
                write_verdict(directory, verdict(WEIGHTS, f"{number:02d}" * 32))
        node.start()
        with connect(node.endpoint) as client:
            assert client.ask_codec(WEIGHTS).codec == FP8
            assert client.ask_codec(WEIGHTS, f"{MAX_JUDGED + 4:02d}" * 32).codec == FP8, "more than a packet holds"
            failed, unknown = client.ask_codec(OTHERS), client.ask_codec(WEIGHTS, ADAPTER)
            assert (failed.codec, failed.reason) == (unknown.codec, unknown.reason) == ("", Reason.NO_VERDICT)
            assert "eval_min_agreement" in failed.problem
            assert "tierkv eval" in unknown.problem
        with StampedEngine(node.endpoint) as engine:
            assert engine.store(1, BLOCKS) == BLOCKS, "raw blocks are stored as ever"
            assert engine.load(1, BLOCKS).right == BLOCKS


def test_a_front_that_is_replaced_knows_the_verdicts(tmp_path: Path) -> None:
    with Node(tmp_path, codec="fp8") as node:
        write_passing(data_of(node), WEIGHTS)
        node.start()
        with connect(node.endpoint, timeout_seconds=20) as client:
            assert client.ask_codec(WEIGHTS).codec == FP8
        node.kill("front")
        node.wait_ready()
        with connect(node.endpoint, timeout_seconds=20) as client:
            assert client.ask_codec(WEIGHTS).codec == FP8


def test_a_group_with_a_lossy_codec_and_no_verdict_is_refused_by_name(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        node.start()
        coded = coded_identity()
        with connect(node.endpoint) as client:
            assert client.ask_codec(coded.weights).reason is None, "a node of raw blocks misses nothing"
            assert client.open(coded, kv_shape=SHAPE).match(list(range(64))).reason is Reason.NO_VERDICT
