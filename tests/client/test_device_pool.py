"""A pool is mapped, mapped anew under its next epoch, refused, and let go of; and none of it reaches the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.client.conftest import TOKENS, make_identity, poisoned, store
from tests.client.fake_device import DeviceNode
from tests.client.fake_node import PAGE, FakeNode
from tierkv.client import Client, DevicePool, Group, connect
from tierkv.core.reasons import Reason
from tierkv.device.cpu import CpuBackend
from tierkv.errors import DeviceError, ForkedClient
from tierkv.wire.messages import Acquire, Reserve
from tierkv.wire.session import DeviceRefused


@pytest.fixture
def node(node_dir: Path) -> Iterator[DeviceNode]:
    fake = DeviceNode(node_dir)
    yield fake
    fake.close()


def num_pools_mapped() -> int:
    return sum("memfd:pool" in line for line in Path("/proc/self/maps").read_text().splitlines())


def mapped_by_clients(node: DeviceNode) -> int:
    """The fake's own mappings aside."""
    return num_pools_mapped() - len(node.devices.pools)


def test_a_pool_is_mapped_once_for_all_who_ask(node: DeviceNode, client: Client) -> None:
    pool = client.map_device("cpu")
    assert (pool.is_mapped, pool.epoch, pool.problem) == (True, 1, "")
    assert client.map_device("cpu") is pool
    assert [wish.uuid for wish in node.asked_for] == ["cpu"]
    assert mapped_by_clients(node) == 1
    client.close()
    assert mapped_by_clients(node) == 0
    assert not client.map_device("cpu").is_mapped


def test_it_is_not_inherited_over_fork(node: DeviceNode, client: Client) -> None:
    client.map_device("cpu")
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    flags: list[list[str]] = []
    for line in lines:
        if "memfd:pool" in line:
            flags.append(next(other for other in lines if other.startswith("VmFlags:")).split())
    assert sum("dc" in found for found in flags) == 1


def test_a_forked_child_asks_for_nothing_and_closes_nothing(node: DeviceNode, client: Client, group: Group) -> None:
    pool = client.map_device("cpu")
    store(group, TOKENS)
    child = os.fork()
    if not child:
        try:
            client.map_device("cpu")
        except ForkedClient:
            client.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.is_mapped
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.copy_into(poisoned(4)) == 4


def test_a_pool_that_ended_is_unmapped_at_once_and_the_next_one_mapped_when_it_is_used(
    node: DeviceNode, client: Client, group: Group
) -> None:
    pool = client.map_device("cpu")
    watched = threading.Event()
    client._state.session().pools.when_ended(0, 1, lambda before=pool._current: (pool._end(before), watched.set()))  # type: ignore[union-attr, misc]
    node.end_pool()
    assert watched.wait(20), "nobody heard of the end"
    assert (pool.is_mapped, pool.epoch, pool.reason) == (False, None, "pool_ended")
    assert mapped_by_clients(node) == 0
    with group.reserve(TOKENS, device=pool) as ticket:
        assert ticket.granted == [0, 1, 2, 3]
    assert (pool.is_mapped, pool.epoch, pool.problem) == (True, 2, "")
    assert [asked.on_device for asked in node.saw(Reserve)] == [True]


def test_what_is_still_held_of_a_pool_that_ended_stays_mapped_until_it_is_released(
    node: DeviceNode, client: Client, group: Group
) -> None:
    pool = client.map_device("cpu")
    with group.reserve(TOKENS, device=pool):
        node.end_pool()
        pool.drop()
        assert mapped_by_clients(node) == 1
    assert mapped_by_clients(node) == 0


def test_a_pool_that_can_not_be_unmapped_is_logged_and_no_exception(
    node: DeviceNode, client: Client, group: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = client.map_device("cpu")
    assert pool._current is not None

    def fail() -> bool:
        raise DeviceError("failed", "cuStreamSynchronize: an illegal address")

    unmap = pool._current.memory.close
    monkeypatch.setattr(pool._current.memory, "close", fail)
    ticket = group.reserve(TOKENS, device=pool)
    pool.drop()
    ticket.abort()
    assert "could not be unmapped: cuStreamSynchronize" in caplog.text
    assert client.map_device("cpu").is_mapped
    assert unmap()


def test_a_new_front_is_asked_for_its_pool(node: DeviceNode, client: Client, group: Group) -> None:
    pool = client.map_device("cpu")
    before = pool._current
    node.restart_front(notice=True)
    store(group, TOKENS)
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.blocks == 4
    assert pool.is_mapped
    assert pool._current is not before
    assert len(node.asked_for) == 2


@pytest.mark.parametrize("code", ["no_pool", "pool_down", "cuda_version"])
def test_a_refusal_is_told_once_and_costs_no_call_until_it_is_worth_another_try(
    node: DeviceNode, client: Client, group: Group, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    node.refuse_pool = DeviceRefused(code=code, problem="there is none: in words")
    pool = client.map_device("cpu")
    now = [0.0]
    pool._clock = lambda: now[0]
    pool._retry_at = 0.5
    assert (pool.is_mapped, pool.reason, pool.problem) == (False, code, "there is none: in words")
    for _ in range(3):
        with group.acquire(TOKENS, device=pool) as lease:
            assert lease.reason is None
    assert len(node.asked_for) == 1
    assert not any(asked.on_device for asked in node.saw(Acquire))
    now[0] = 1.0
    node.refuse_pool = None
    assert client.map_device("cpu").is_mapped
    assert caplog.text.count("there is none: in words") == 1


def test_a_node_of_before_pools_refuses_and_is_used_without(node_dir: Path) -> None:
    fake = FakeNode(node_dir)
    with connect(fake.directory, timeout_seconds=5) as client:
        pool = client.map_device("cpu")
        assert pool.reason == "no_pool"
        store(client.open(make_identity()), TOKENS)
    fake.close()


def test_a_node_that_is_away_is_no_reason_to_fail(node_dir: Path) -> None:
    with connect(node_dir / "nowhere", timeout_seconds=0.2) as client:
        pool = client.map_device("cpu")
        assert not pool.is_mapped
        with client.open(make_identity()).acquire(TOKENS, device=pool) as lease:
            assert (lease.blocks, lease.reason) == (0, Reason.NODE_AWAY)


def test_a_node_may_have_several_pools_in_host_memory(node: DeviceNode, client: Client) -> None:
    node.changed_grant = {"uuid": "cpu:1"}
    assert client.map_device("cpu:1").is_mapped
    assert not client.map_device("cpu").is_mapped
    assert [wish.uuid for wish in node.asked_for] == ["cpu:1", "cpu"]


@pytest.mark.parametrize("name", ["gpu0", "cuda:", "cuda:x", ""])
def test_a_name_that_means_no_device_is_a_problem_and_no_exception(client: Client, name: str) -> None:
    pool = client.map_device(name)
    assert (pool.is_mapped, pool.reason) == (False, "no_such_device")
    assert "names no device" in pool.problem


def test_a_gpu_is_found_by_its_uuid_among_those_of_this_process(
    node: DeviceNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def open_gpu(index: int) -> CpuBackend:
        opened.append(index)
        made = CpuBackend()
        made.uuid = "GPU-2"
        return made

    monkeypatch.setattr("tierkv.device.cuda_driver.Driver", lambda: None)
    gpus = [SimpleNamespace(uuid="GPU-1", index=0), SimpleNamespace(uuid="GPU-2", index=1)]
    monkeypatch.setattr("tierkv.device.probe.find_gpus", lambda driver: gpus)
    monkeypatch.setattr("tierkv.device.backends.cuda_backend", open_gpu)
    monkeypatch.setattr("tierkv.client.device.pool._gpus", {})
    node.changed_grant = {"uuid": "GPU-2"}
    assert client.map_device("GPU-2").is_mapped
    assert client.map_device("MIG-2").is_mapped  # as nvidia-smi calls a part of a GPU
    assert opened == [1], "a GPU is opened once"
    with connect(node.directory, timeout_seconds=5) as other:
        assert other.map_device("GPU-2").is_mapped
    assert opened == [1]
    assert client.map_device("GPU-3").problem == "GPU-3 is not here; there is GPU-1, GPU-2"


def test_a_device_that_can_not_be_opened_is_a_problem_and_no_exception(node: DeviceNode, client: Client) -> None:
    def broken(name: str) -> Any:
        raise DeviceError("no_driver", "libcuda is not there")

    pool = client._state.pool("cuda:0")
    pool._open_backend = broken
    assert client.map_device("cuda:0") is pool
    assert (pool.is_mapped, pool.reason, pool.problem) == (False, "no_driver", "libcuda is not there")
    assert node.asked_for == []


@pytest.mark.parametrize(
    "changed",
    [
        {"uuid": "GPU-1"},
        {"kind": "holographic"},
        {"kind": "vmm"},
        {"base": 0},
        {"base": 256 * PAGE + 1},
        {"num_bytes": 0},
        {"num_bytes": 65 * PAGE},
    ],
)
def test_a_pool_that_can_not_be_what_was_asked_for_is_not_mapped(
    node: DeviceNode, client: Client, changed: dict[str, Any]
) -> None:
    node.changed_grant = changed
    descriptors = len(os.listdir("/proc/self/fd"))
    pool = client.map_device("cpu")
    assert (pool.is_mapped, pool.reason) == (False, "failed")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mapped_by_clients(node) == 0


def test_an_answer_that_comes_too_late_is_nobody_elses(
    node: DeviceNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.client.verbs.MAP_SECONDS", 0.05)
    node.silent_pool = True
    pool = client.map_device("cpu")
    assert pool.reason == "no_answer"
    descriptors = len(os.listdir("/proc/self/fd"))
    node.answer_late()
    node.silent_pool = False
    pool._retry_at = 0.0
    node.end_pool()
    monkeypatch.setattr("tierkv.client.verbs.MAP_SECONDS", 20.0)
    assert client.map_device("cpu").epoch == 2
    assert mapped_by_clients(node) == 1
    client.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # the fake's next pool


def test_a_node_that_goes_away_while_it_is_asked_ends_the_question(node: DeviceNode, client: Client) -> None:
    node.silent_pool = True
    pools: list[DevicePool] = []
    thread = threading.Thread(target=lambda: pools.append(client.map_device("cpu")))
    thread.start()
    while not node.unanswered:
        node.settle()
    node.go()
    thread.join(20)
    assert [pool.reason for pool in pools] in (["session_over"], ["no_answer"])
