"""A tier that steps down and comes back by itself, seen from outside: status, health pages, engines."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import Node, StampedEngine, free_port, wait_until
from e2e.sick_disk import VARIABLE, SickDisk
from e2e.test_health import ask, wait_health
from tierkv.core.reasons import Reason

pytestmark = pytest.mark.timeout(180)

SMALL = {"host_bytes": "2MiB", "slab_bytes": "512KiB", "extent_bytes": "64KiB"}
BLOCKS = 2


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SickDisk]:
    made = SickDisk(tmp_path / "sick")
    monkeypatch.setenv(VARIABLE, str(made.path))
    yield made
    made.close()


def sick_node(tmp_path: Path, **options: str | None) -> Node:
    return Node(tmp_path, replaced=("worker=e2e.sick_disk",), **{**SMALL, **options})


def fill(engine: StampedEngine, first: int, count: int) -> list[int]:
    """Prompts on disk; of so many, the first are not in memory any more."""
    prompts = list(range(first, first + count))
    for prompt in prompts:
        engine.store_flushed(prompt, BLOCKS)
    return prompts


@pytest.mark.scenario(
    "B154", then="alive and serving, the tier degraded with its errors and the last errno; well again after a success"
)
def test_health_while_every_write_fails(tmp_path: Path, disk: SickDisk) -> None:
    port = free_port()
    # By last use: what knows value would learn that nothing new is asked for again here, and take no more of it.
    with sick_node(tmp_path, metrics_port=str(port), eviction_policy="lru") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            prompts = fill(engine, 1, 80)
            disk.fail("pwritev", errno.EIO)
            disk_also = time.monotonic() + 3.0  # the length of the fault
            new = 1_000
            while time.monotonic() < disk_also:
                new += 1
                assert engine.store(new, BLOCKS) == BLOCKS
                engine.seal(new, BLOCKS)
                loaded = engine.load(prompts[new % len(prompts)], BLOCKS)
                assert (loaded.valid, loaded.right) == (BLOCKS, BLOCKS)
            body = wait_health(port, "/healthz", lambda status, _: status == 503, "health tells it")
            assert (ask(port, "/livez")[0], ask(port, "/readyz")[0]) == (200, 200)
            tier = body["tiers"]["nvme"]
            assert (tier["state"], tier["reason"]) == ("degraded", "io_error")
            assert tier["errors"] > 0
            assert "EIO" in tier["last_error"]
            assert body["tiers"]["host"]["state"] == "ok"
            assert body["processes"]["storage"] == "running"
            disk.heal()
            wait_health(port, "/healthz", lambda status, _: status == 200, "it is well again")
            wait_until(
                lambda: engine.seal(new, BLOCKS).flushed_blocks == BLOCKS, "what was stored meanwhile is flushed"
            )
        assert node.log().count("was not written") < 5, "one line for many failures"


@pytest.mark.parametrize(
    ("operation", "number", "reason"),
    [
        ("pwritev", errno.EROFS, "read_only"),
        ("pwritev", errno.EDQUOT, "disk_full"),
        ("open", errno.EMFILE, "too_many_files"),
        ("rename", errno.EACCES, "no_access"),
        ("fdatasync", errno.ETIMEDOUT, "io_error"),
    ],
)
@pytest.mark.scenario("B126", then="a tier that becomes read only says so after one failed write, and health with it")
def test_each_cause_has_its_name_and_memory_goes_on(
    tmp_path: Path, disk: SickDisk, operation: str, number: int, reason: str
) -> None:
    with sick_node(tmp_path) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
            disk.fail(operation, number)
            engine.store(2, BLOCKS)
            sealed = engine.seal(2, BLOCKS)
            assert sealed.flushed_blocks == 0
            status = node.wait_status(lambda status: status.state == "degraded", "it shows")
            nvme = status.tiers[1]
            assert (nvme.state, nvme.reason) == ("degraded", reason)
            assert errno.errorcode[number] in nvme.last_error
            assert any(reason in problem for problem in status.problems)
            assert sealed.reason == reason
            assert engine.store(3, BLOCKS) == BLOCKS
            assert engine.load(3, BLOCKS).right == BLOCKS
            disk.heal()
            node.wait_status(lambda status: status.state == "ready", "it is well again")
            wait_until(lambda: engine.seal(2, BLOCKS).flushed_blocks == BLOCKS, "what was stored meanwhile is flushed")


def test_a_disk_that_does_not_answer_a_write_degrades_the_tier_and_kills_nobody(tmp_path: Path, disk: SickDisk) -> None:
    with sick_node(tmp_path, stuck_seconds="1", hang_seconds="4") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            prompts = fill(engine, 1, 80)
            worker = node.pid("storage")
            disk.hang("fdatasync")
            engine.store(1_000, BLOCKS)
            engine.seal(1_000, BLOCKS, flushed=False)
            status = node.wait_status(lambda status: status.tiers[1].reason == "io_stuck", "it shows")
            assert any("has been running for" in problem for problem in status.problems)
            loaded = engine.load(prompts[0], BLOCKS)  # from disk: another file, and reads answer
            assert (loaded.right, loaded.nvme_blocks) == (BLOCKS, BLOCKS)
            time.sleep(8.0)  # twice the deadline for a hung process
            assert node.pid("storage") == worker
            disk.heal()
            node.wait_status(lambda status: status.state == "ready", "it is well again")
            assert node.pid("storage") == worker
            engine.store_flushed(1_001, BLOCKS)
            assert engine.seal(1_000, BLOCKS).flushed_blocks == BLOCKS


def test_a_disk_that_does_not_answer_a_read_costs_nobody_a_deadline(tmp_path: Path, disk: SickDisk) -> None:
    with sick_node(tmp_path, stuck_seconds="1") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            prompts = fill(engine, 1, 80)
            disk.hang("preadv")
            loaded = engine.load(prompts[0], BLOCKS, deadline_seconds=60.0)  # until it is known to be stuck
            assert (loaded.valid, loaded.reason) == (0, Reason.IO_STUCK)
            began = time.monotonic()
            for prompt in prompts[1:5]:
                loaded = engine.load(prompt, BLOCKS, deadline_seconds=60.0)
                assert (loaded.valid, loaded.reason) == (0, Reason.IO_STUCK)
            assert time.monotonic() - began < 60.0
            assert engine.store(2_000, BLOCKS) == BLOCKS
            assert engine.load(2_000, BLOCKS).right == BLOCKS
            disk.heal()
            node.wait_status(lambda status: status.state == "ready", "it is well again")
            assert engine.load(prompts[0], BLOCKS).right == BLOCKS


@pytest.mark.parametrize("operation", ["write", "open", "stat", "listdir", "fstatvfs", "rename", "pwritev"])
def test_whatever_call_hangs_it_is_said_and_over_when_it_comes_back(
    tmp_path: Path, disk: SickDisk, operation: str
) -> None:
    with sick_node(tmp_path, stuck_seconds="1", hang_seconds="4") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
            worker = node.pid("storage")
            disk.hang(operation)
            engine.store(2, BLOCKS)
            engine.seal(2, BLOCKS, flushed=False)
            status = node.wait_status(lambda status: status.tiers[1].reason == "io_stuck", f"{operation} shows")
            assert any("has been running for" in problem for problem in status.problems)
            assert status.workers[-1].state == "running"
            assert engine.load(1, BLOCKS).right == BLOCKS
            disk.heal()
            node.wait_status(lambda status: status.state == "ready", "it is well again")
            assert node.pid("storage") == worker
            engine.store_flushed(3, BLOCKS)
