"""Blocks between an engine's pages and the pool of its device, by way of the worker's side."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.fake_device import DeviceNode
from tests.integrations.connector.kit import BLOCK_TOKENS, Engine
from tests.integrations.connector.living_node import wait_for
from tierkv.core.reasons import Reason
from tierkv.device.cpu import CpuBackend
from tierkv.device.late import LateCopies
from tierkv.integrations.connector.worker import WorkerCounts
from tierkv.wire.session import DeviceRefused

TOKENS = list(range(100, 118))
BLOCKS = len(TOKENS) // BLOCK_TOKENS


@pytest.fixture
def node(runtime_dir: Path) -> Iterator[DeviceNode]:
    directory = Path(tempfile.mkdtemp(dir=runtime_dir))
    fake = DeviceNode(directory, pages=256, pool_pages=64)
    yield fake
    fake.close()
    shutil.rmtree(directory)


@pytest.fixture(params=[1, 2], ids=["one page group", "two page groups"])
def engine(node: DeviceNode, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(node, page_groups=request.param, device="cpu")
    made.introduce()
    yield made
    made.close()


def take_counts(engine: Engine) -> WorkerCounts:
    return engine.workers[0].take_counts()


def load(engine: Engine, request: str) -> bool:
    """A request with the same tokens, into other pages. Whether all of it was loaded, and is right."""
    engine.poison()
    engine.add(request, TOKENS)
    matched = engine.wait_matched(request)
    engine.allot(request, matched, first_page=20)
    engine.until(lambda: request in engine.ended_loads, f"{request} is loaded")
    loaded = matched == BLOCKS * BLOCK_TOKENS and request not in engine.failed_loads
    return loaded and engine.is_right(request, 0, BLOCKS, first_page=20)


def through_host_only(engine: Engine) -> None:
    """From here on a page that is touched by way of host memory fails the test."""
    pages = engine.pages[0]

    def fail() -> None:
        raise AssertionError("a page went by way of host memory")

    pages.before_read = pages.before_write = fail


def test_what_is_stored_in_the_pool_is_loaded_from_there_and_touches_no_host_memory(
    node: DeviceNode, engine: Engine
) -> None:
    through_host_only(engine)
    engine.run("a", TOKENS)
    node.spoil_arena()
    assert load(engine, "b")
    assert not engine.worker_fence.faults
    counts = take_counts(engine)
    assert (counts.device_stored_blocks, counts.stored_blocks) == (BLOCKS, BLOCKS)
    assert (counts.device_loaded_blocks, counts.loaded_blocks) == (BLOCKS, BLOCKS)


def test_blocks_that_are_in_host_memory_alone_come_from_there(node: DeviceNode, engine: Engine) -> None:
    engine.run("a", TOKENS)
    take_counts(engine)
    node.only_in_host(engine.client.open(engine.spec.identity).keys(TOKENS), (1, 2))
    assert load(engine, "b")
    counts = take_counts(engine)
    assert (counts.device_loaded_blocks, counts.loaded_blocks) == (BLOCKS - 2, BLOCKS)


def test_a_pool_that_dies_costs_its_blocks_and_its_successor_is_used_again(node: DeviceNode, engine: Engine) -> None:
    engine.run("a", TOKENS)
    node.end_pool()
    assert load(engine, "b"), "what the node has in host memory is loaded from there"
    engine.until(lambda: engine.workers[0]._pool is not None and engine.workers[0]._pool.epoch == 2, "it is mapped")
    take_counts(engine)
    engine.run("c", [*TOKENS[:3], *range(200, 216)])
    assert take_counts(engine).device_stored_blocks == BLOCKS


def test_a_store_that_goes_down_with_the_pool_is_offered_again_and_not_told_as_stored(
    node: DeviceNode, engine: Engine
) -> None:
    late = LateCopies()
    pool = engine.workers[0]._client.map_device("cpu")
    pool._backend = CpuBackend(late)
    pool._current.backend = pool._backend  # type: ignore[union-attr]
    engine.add("a", TOKENS, loads=False)
    engine.allot("a", 0)
    engine.begin(engine.scheduled("a"))
    engine.compute("a", 0, BLOCKS)
    engine.end()
    assert late.wait_held(1, 60)
    node.end_pool()
    wait_for(lambda: not pool.is_mapped, "the end of the pool is known")
    pool._backend = CpuBackend()
    while engine.workers[0]._copies and not engine.workers[0]._copies[0].is_over:
        while late.held:
            late.complete(-1)
        engine.hear()
    wait_for(lambda: _hears_of_reason(engine), "the store is told as lost")
    assert engine.events == []
    assert node._memory.slots == {}


def _hears_of_reason(engine: Engine) -> bool:
    engine.hear()
    return engine.workers[0]._counts.reasons[Reason.DEVICE_DOWN] > 0


def test_a_node_without_a_pool_is_used_by_way_of_host_memory(node: DeviceNode) -> None:
    node.refuse_pool = DeviceRefused(code="no_pool", problem="there is none on cpu")
    engine = Engine(node, device="cpu")
    engine.introduce()
    engine.run("a", TOKENS)
    assert load(engine, "b")
    counts = take_counts(engine)
    assert (counts.device_loaded_blocks, counts.loaded_blocks, counts.device_stored_blocks) == (0, BLOCKS, 0)
    engine.close()
