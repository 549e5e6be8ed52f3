"""A node with codec = fp8: which models get it, which don't, and when it does not start at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.harness import Node, StampedEngine, data_of, wait_until
from tests.client.test_coded_groups import SHAPE, as_read, coded_identity, raw_rows
from tests.client.test_coded_on_device import Pages
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


def test_coded_blocks_are_in_the_pool_of_a_device_and_outlive_its_worker(tmp_path: Path) -> None:
    """Coded and decoded on the device: the pages of `Pages` refuse to be moved by way of host memory."""
    identity, tokens, rows = coded_identity(), list(range(16)), raw_rows(4)
    source, from_pool, from_host = Pages(), Pages(2), raw_rows(4, seed=2)
    source.fill(rows)
    with Node(tmp_path, codec="fp8", gpu_devices="cpu", gpu_bytes="4MiB") as node:
        write_passing(data_of(node), identity.weights)
        node.start()
        node.wait_status(lambda status: status.devices[0].state == "ok", "the pool is there")
        with connect(node.endpoint, timeout_seconds=20) as client:
            group, pool = client.open(identity, kv_shape=SHAPE), client.map_device("cpu")
            with group.reserve(tokens, device=pool) as ticket:
                assert ticket.device_blocks == 4
                ticket.copy_from(source.on(pool))
                assert ticket.commit().reason is None
            wait_until(lambda: group.match(tokens).blocks == 4, "what was stored is visible")
            with group.acquire(tokens, device=pool) as lease:
                assert (lease.device_blocks, lease.copy_into(from_pool.on(pool))) == (4, 4)
            assert from_pool.rows().tobytes() == as_read(rows).tobytes()
            node.kill("gpu0")
            with group.acquire(tokens) as lease:
                assert (lease.device_blocks, lease.copy_into(from_host)) == (0, 4)
            assert from_host.tobytes() == as_read(rows).tobytes()
