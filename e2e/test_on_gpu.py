"""A whole node with a pool on a real GPU: an engine stores there, another one loads from there, and the process that
has the pool is killed while engines copy.

`scripts/gpu-check` runs it; elsewhere it is skipped. TIERKV_TEST_GPU is the index of the GPU (0).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import EngineProcess, Node, StampedEngine, wait_until
from tierkv.device.cuda_driver import Driver
from tierkv.device.probe import find_gpu
from tierkv.errors import DeviceError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

GPU = os.environ.get("TIERKV_TEST_GPU", "0")
ENGINE_DEVICE = f"cuda:{GPU}"
BLOCKS = 16
START_SECONDS = 60.0
"""A process makes its first context in seconds."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        find_gpu(Driver(), int(GPU))
    except DeviceError as no_gpu:
        pytest.skip(f"{no_gpu.reason}: {no_gpu}")
    with Node(tmp_path, gpu_devices=GPU, gpu_bytes="256MiB") as node:
        node.start()
        node.wait_status(lambda status: status.devices[0].state == "ok", "the pool is there", START_SECONDS)
        yield node


def test_what_an_engine_stores_on_a_gpu_another_one_loads_from_there(node: Node) -> None:
    with (
        EngineProcess(node.endpoint, device=ENGINE_DEVICE) as one,
        EngineProcess(node.endpoint, device=ENGINE_DEVICE) as other,
    ):
        assert one.ask("store", prompt=1, blocks=BLOCKS, timeout_seconds=START_SECONDS)
        loaded = other.ask("load", prompt=1, blocks=BLOCKS, timeout_seconds=START_SECONDS)
        assert (loaded["right"], loaded["device_blocks"]) == (BLOCKS, BLOCKS)
        with StampedEngine(node.endpoint) as elsewhere:  # the worker has copied it to host memory
            assert elsewhere.load(1, BLOCKS).right == BLOCKS


def test_a_worker_that_is_killed_while_engines_copy_makes_no_wrong_block(node: Node) -> None:
    with EngineProcess(node.endpoint, device=ENGINE_DEVICE) as engine:
        engine.ask("store", prompt=1, blocks=BLOCKS, timeout_seconds=START_SECONDS)
        for _ in range(20):
            loaded = engine.ask("load", prompt=1, blocks=BLOCKS)
            assert loaded["right"] == loaded["valid"] == BLOCKS
        engine.send("load", prompt=1, blocks=BLOCKS)
        node.kill("gpu0")
        during = engine._answer(START_SECONDS)
        assert during["right"] == during["valid"]
        for _ in range(20):  # the pool is gone, host memory is there
            loaded = engine.ask("load", prompt=1, blocks=BLOCKS)
            assert loaded["right"] == loaded["valid"]
        node.wait_status(
            lambda s: s.devices[0].restarts >= 1 and s.devices[0].state == "ok",
            "the pool is there again",
            START_SECONDS,
        )

        def is_there() -> bool:
            loaded = engine.ask("load", prompt=1, blocks=BLOCKS)
            assert loaded["right"] == loaded["valid"] == BLOCKS
            return bool(loaded["device_blocks"] == BLOCKS)

        wait_until(is_there, "it is loaded from the new pool", START_SECONDS)
