"""The pools of GPUs, with whole nodes, on devices that lie in host memory: what one engine stores there another one
loads from there, whoever dies; and a device that is away, small or not to be had costs its pool alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import EngineProcess, Node, StampedEngine, wait_until
from e2e.test_cli import tierkv
from tierkv.torture.barriers import FOLDER, Barriers
from tierkv.torture.stamped import BLOCK_BYTES
from tierkv.wire.messages import DeviceStatus, StatusReply

pytestmark = pytest.mark.timeout(240)

BLOCKS = 4
COPIES = "device_copies=tierkv.torture.device:copies"
POOL = {"gpu_devices": "cpu", "gpu_bytes": "4MiB"}


def are_open(status: StatusReply) -> bool:
    return all(device.state == "ok" for device in status.devices)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path, **POOL) as node:
        node.start()
        node.wait_status(are_open, "the pool is there")
        yield node


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Node, Barriers]]:
    """A node whose device can be held before a copy and behind it, and makes them in any order."""
    barriers = Barriers(tmp_path / "barriers")
    monkeypatch.setenv(FOLDER, str(tmp_path / "barriers"))
    with Node(tmp_path, replaced=(COPIES,), **POOL) as node:
        node.start()
        node.wait_status(are_open, "the pool is there")
        yield node, barriers
        barriers.clear()


def device(node: Node, number: int = 0) -> DeviceStatus:
    status = wait_until(node.status, "the node tells its status")
    return status.devices[number]


def counter(node: Node, name: str) -> float:
    return wait_until(node.status, "the node tells its status").counters.get(name, 0.0)


def pools_open(pid: int) -> int:
    """Descriptors of pools that a process has."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found += "tierkv pool" in os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def until_back(node: Node, restarts: int = 1, number: int = 0) -> None:
    node.wait_status(
        lambda s: s.devices[number].restarts >= restarts and are_open(s), f"device {number} has a pool again"
    )


def load_on_device(engine: StampedEngine, prompt: int, blocks: int = BLOCKS) -> None:
    """Right, and from the pool, at last: what was found in host memory twice goes there."""

    def is_there() -> bool:
        loaded = engine.load(prompt, blocks)
        assert (loaded.valid, loaded.right) == (blocks, blocks), loaded
        return loaded.device_blocks == blocks

    wait_until(is_there, f"prompt {prompt} is loaded from the device")


# ---- what it is for


def test_what_one_engine_stores_on_the_device_another_one_loads_from_there(node: Node) -> None:
    with StampedEngine(node.endpoint, device="cpu") as one, EngineProcess(node.endpoint, device="cpu") as other:
        assert one.store(1, BLOCKS) == BLOCKS
        loaded = other.ask("load", prompt=1, blocks=BLOCKS)
        assert (loaded["right"], loaded["device_blocks"]) == (BLOCKS, BLOCKS)
        said = device(node)
        assert (said.mapped_sessions, said.used_bytes) == (2, BLOCKS * BLOCK_BYTES)
        assert counter(node, "hit_tokens.gpu") > 0
        with StampedEngine(node.endpoint) as elsewhere:  # without the device: from host memory
            loaded_there = elsewhere.load(1, BLOCKS)
            assert (loaded_there.right, loaded_there.device_blocks) == (BLOCKS, 0)
        assert one.seal(1, BLOCKS).flushed_blocks == BLOCKS  # and it went to NVMe as anything does


def test_the_pool_outlives_the_engine_that_filled_it(node: Node) -> None:
    with EngineProcess(node.endpoint, device="cpu") as engine:
        engine.ask("store", prompt=1, blocks=BLOCKS)
        engine.kill()
    with StampedEngine(node.endpoint, device="cpu") as next_one:
        loaded = next_one.load(1, BLOCKS)
        assert (loaded.right, loaded.device_blocks) == (BLOCKS, BLOCKS)


def test_a_pool_keeps_to_gpu_bytes_whatever_is_stored_there(tmp_path: Path) -> None:
    with Node(tmp_path, slab_bytes="256KiB", gpu_devices="cpu", gpu_bytes="512KiB") as node:
        node.start()
        node.wait_status(are_open, "the pool is there")
        with StampedEngine(node.endpoint, device="cpu") as engine:
            for prompt in range(1, 31):
                assert engine.store(prompt, BLOCKS) == BLOCKS
                loaded = engine.load(prompt, BLOCKS)
                assert loaded.right == loaded.valid == BLOCKS
                said = device(node)
                assert said.used_bytes + said.reserved_bytes <= said.capacity_bytes == 512 * 2**10


def test_two_devices_are_apart_and_each_engine_uses_its_own(tmp_path: Path) -> None:
    with Node(tmp_path, gpu_devices="cpu,cpu:1", gpu_bytes="4MiB") as node:
        node.start()
        node.wait_status(are_open, "both pools are there")
        with (
            StampedEngine(node.endpoint, device="cpu") as first,
            StampedEngine(node.endpoint, device="cpu:1") as second,
        ):
            assert first.store(1, BLOCKS) == second.store(2, BLOCKS) == BLOCKS
            assert first.load(1, BLOCKS).device_blocks == second.load(2, BLOCKS).device_blocks == BLOCKS
            crossed = second.load(1, BLOCKS)
            assert (crossed.right, crossed.device_blocks) == (BLOCKS, 0)
            node.kill("gpu1")
            assert first.load(1, BLOCKS).device_blocks == BLOCKS  # the other one's end is not its own
            until_back(node, number=1)
            assert second.load(2, BLOCKS).right == BLOCKS
            load_on_device(second, 2)


def test_after_a_restart_the_pool_is_empty_and_fills_with_what_is_used(node: Node) -> None:
    with StampedEngine(node.endpoint, device="cpu") as engine:
        engine.store_flushed(1, BLOCKS)
    assert node.stop().exit_code == 0
    node.start()
    node.wait_status(are_open, "the pool is there")
    assert device(node).used_bytes == 0
    with StampedEngine(node.endpoint, device="cpu") as engine:
        load_on_device(engine, 1)


def test_a_purge_leaves_no_byte_in_the_pool(node: Node) -> None:
    with StampedEngine(node.endpoint, salt="acme", device="cpu") as engine:
        engine.store_flushed(1, BLOCKS)
        purged = tierkv("purge", "--tenant", "acme", "--yes", "--endpoint", str(node.endpoint))
        assert purged.returncode == 0, purged.stderr
        assert "gpu " in purged.stdout
        assert engine.load(1, BLOCKS).blocks == 0
        mapped = engine.pool._current if engine.pool is not None else None
        assert mapped is not None
        assert not mapped.memory.bytes.any()  # type: ignore[attr-defined]


# ---- who dies


def test_a_killed_worker_takes_its_pool_along_and_nobody_notices_but_by_the_place(node: Node) -> None:
    supervisor = node.pid("supervisor")
    with EngineProcess(node.endpoint, device="cpu") as engine:
        engine.ask("store", prompt=1, blocks=BLOCKS)
        assert engine.ask("hold_lease", name="held", prompt=1, blocks=BLOCKS)["device_blocks"] == BLOCKS
        assert pools_open(supervisor) == 1
        node.kill("gpu0")
        until_back(node)
        wait_until(lambda: pools_open(supervisor) == 1, "the node holds the new pool, and no other")
        read = engine.ask("read_lease", name="held")
        assert read["valid"] == read["right"]  # what the dead pool holds is never passed off as proven
        engine.ask("release", name="held")
        loaded = engine.ask("load", prompt=1, blocks=BLOCKS)
        assert loaded["right"] == BLOCKS  # from host memory
        with StampedEngine(node.endpoint, device="cpu") as other:
            load_on_device(other, 1)
    assert counter(node, "device_worker_deaths") == 1


@pytest.mark.parametrize("stage", ["before_device_copy", "device_copy_made"])
@pytest.mark.parametrize("victim", ["gpu0", "front", "engine"])
def test_whoever_dies_while_blocks_come_from_a_device_nothing_is_wrong_and_nothing_stays_held(
    held: tuple[Node, Barriers], stage: str, victim: str
) -> None:
    node, barriers = held
    with EngineProcess(node.endpoint, device="cpu") as engine:
        barriers.arm(stage)
        engine.send("store", prompt=1, blocks=BLOCKS)
        wait_until(lambda: barriers.is_reached(stage), "a copy from the device is held")
        if victim == "engine":
            engine.kill()
        else:
            node.kill(victim)
        barriers.clear()
    node.wait_status(
        lambda s: are_open(s) and s.state == "ready" and not s.tickets and not s.leases, "the node is as before"
    )
    with StampedEngine(node.endpoint, device="cpu") as other:
        loaded = other.load(1, BLOCKS)
        assert loaded.right == loaded.valid
        assert other.store(1, BLOCKS) == BLOCKS
        load_on_device(other, 1)
    reserved = node.wait_status(
        lambda s: all(tier.reserved_bytes == 0 for tier in s.tiers), "nothing stays held for a copy"
    )
    assert reserved.tiers[0].tier == "gpu"


def test_an_engine_that_dies_with_a_ticket_on_the_device_holds_nothing_any_more(node: Node) -> None:
    with EngineProcess(node.endpoint, device="cpu") as engine:
        assert engine.ask("hold_ticket", name="held", prompt=1, blocks=BLOCKS)["granted"] == BLOCKS
        assert device(node).reserved_bytes == BLOCKS * BLOCK_BYTES
        engine.kill()
    node.wait_status(
        lambda s: not s.tickets and not any(one.reserved_bytes or one.mapped_sessions for one in s.devices),
        "its slots are free and its mapping is forgotten",
    )


def test_a_killed_front_takes_all_pools_along_and_engines_map_the_next(node: Node) -> None:
    supervisor = node.pid("supervisor")
    with StampedEngine(node.endpoint, device="cpu") as engine:
        engine.store_flushed(1, BLOCKS)
        node.kill("front")
        node.wait_status(lambda s: s.state == "ready" and are_open(s), "a new front with a pool")
        assert pools_open(supervisor) == 1
        load_on_device(engine, 1)
        assert engine.store(2, BLOCKS) == BLOCKS


def test_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    with Node(tmp_path, hang_seconds="2", **POOL) as node:
        node.start()
        node.wait_status(are_open, "the pool is there")
        with node.paused("gpu0"):
            node.wait_status(lambda s: s.devices[0].restarts == 1, "it was ended")
        until_back(node)


def test_a_node_that_stops_leaves_no_process_and_no_pool(node: Node) -> None:
    with StampedEngine(node.endpoint, device="cpu") as engine:
        engine.store(1, BLOCKS)
    assert node.stop().exit_code == 0


# ---- what can not be had


def test_a_gpu_that_never_comes_is_named_and_the_node_serves_without(tmp_path: Path) -> None:
    with Node(tmp_path, gpu_devices="77", gpu_bytes="4MiB") as node:
        node.start()
        tries: set[int] = set()

        def was_tried_again(status: StatusReply) -> bool:
            tries.update(worker.pid for worker in status.workers if worker.name == "gpu0" and worker.pid)
            return len(tries) > 1 and status.devices[0].state == "away"

        status = node.wait_status(was_tried_again, "it was tried again")
        assert status.devices[0].restarts == 0  # it never had started
        (said,) = status.devices
        assert (said.state, said.capacity_bytes) == ("away", 0)
        assert said.problem
        assert status.state == "degraded"
        assert any("gpu0 (77) has no pool" in problem and said.problem in problem for problem in status.problems)
        assert next(tier for tier in status.tiers if tier.tier == "gpu").state == "away"
        with StampedEngine(node.endpoint, device="cpu") as engine:
            assert engine.pool is not None
            assert not engine.pool.is_mapped
            engine.store_flushed(1, BLOCKS)
            assert engine.load(1, BLOCKS).right == BLOCKS
        shown = tierkv("status", "--endpoint", str(node.endpoint))
        assert "away" in shown.stdout
        assert node.stop().exit_code == 0


def test_a_pool_larger_than_memory_is_named_and_the_node_serves_without(tmp_path: Path) -> None:
    with Node(tmp_path, gpu_devices="cpu", gpu_bytes="4TiB") as node:
        node.start()
        status = node.wait_status(lambda s: s.devices[0].state == "away", "it was tried")
        assert "more than there is" in status.devices[0].problem
        with StampedEngine(node.endpoint, device="cpu") as engine:
            assert engine.store(1, BLOCKS) == BLOCKS
            assert engine.load(1, BLOCKS).right == BLOCKS
            assert engine.pool is not None
            assert "more than there is" in engine.pool.problem


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_devices": "0,0", "gpu_bytes": "1GiB"}, "gpu_devices: 0 comes twice"),
        ({"gpu_devices": "0"}, "gpu_bytes: how much of each"),
        ({"gpu_bytes": "1GiB"}, "gpu_bytes: has no effect without gpu_devices"),
        ({"gpu_devices": "first", "gpu_bytes": "1GiB"}, "gpu_devices: 'first' is no device"),
    ],
)
def test_settings_of_gpus_that_can_not_be_meant_are_refused_at_the_start(
    tmp_path: Path, settings: dict[str, str], words: str
) -> None:
    with Node(tmp_path, **settings) as node:
        refused = node.spawn()
        refused.communicate(timeout=60)
        assert refused.returncode == 2
        assert words in node.log()


# ---- operators


def test_operators_see_it_and_evict_from_it(node: Node) -> None:
    with StampedEngine(node.endpoint, device="cpu") as engine:
        for prompt in range(1, 5):
            engine.store_flushed(prompt, BLOCKS)
        where = ("--endpoint", str(node.endpoint))
        for command in (("status",), ("du",), ("top", "--once")):
            shown = tierkv(*command, *where)
            assert (shown.returncode, "gpu" in shown.stdout) == (0, True), command
        evicted = tierkv("evict", "--tier", "gpu", "--to", "0", "--yes", *where)
        assert evicted.returncode == 0, evicted.stderr
        assert device(node).used_bytes == 0
        loaded = engine.load(1, BLOCKS)
        assert loaded.right == BLOCKS  # it is in host memory still
