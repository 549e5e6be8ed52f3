"""The pools of GPUs through the service: the test plays their workers, and the supervisor that says who has mapped."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from tests.node.kit import BLOCK_BYTES, ENGINE, GROUP, HOST_BYTES, SLAB_BYTES, Kit, prompt
from tests.node.test_reading_and_writing import L1, T1, numbers
from tierkv.core.instructions import CopyDone, DeviceHealth, Download, PoolReady, Stop, Stopped, Zero, Zeroed
from tierkv.core.journal import Account
from tierkv.metrics.health import answer
from tierkv.metrics.table import METRICS
from tierkv.node.draining import STOP_SECONDS, Draining
from tierkv.node.mover import SILENT_SECONDS
from tierkv.wire.messages import (
    Acquire,
    Commit,
    DeviceStatus,
    ErrorCode,
    Evict,
    EvictedTier,
    Match,
    Purge,
    Reserve,
    Status,
    Usage,
)

POOL_BYTES = 2 * SLAB_BYTES
READY = PoolReady(1, POOL_BYTES)
HEALTH = DeviceHealth(device_name="H", kind="vmm", is_pinned=True, device_numa=1, arena_numa=1)


@pytest.fixture
def kit() -> Iterator[Kit]:
    kit = Kit(nvme_bytes=2**20, device_bytes=(POOL_BYTES, POOL_BYTES))
    kit.start_worker()
    kit.open()
    kit.instructions()
    yield kit
    kit.close()


@pytest.fixture
def mapped(kit: Kit) -> Kit:
    """Device 0 has a pool, which the engine has mapped."""
    kit.start_device(0, READY, HEALTH)
    kit.devices.mapped(ENGINE, 0)
    return kit


def status(kit: Kit, device: int = 0) -> DeviceStatus:
    found: DeviceStatus = kit.ask(Status).devices[device]
    return found


def commit_on_device(kit: Kit, num_blocks: int = 2) -> tuple[bytes, list[int]]:
    """Keys, and where the engine has put the blocks."""
    keys, tokens = prompt(num_blocks)
    ticket = kit.ask(Reserve, grant=T1, group=GROUP, keys=keys, first=0, tokens=tokens, on_device=True)
    kit.ask(Commit, grant=T1)
    return keys, numbers(ticket.offsets)


def store_on_device(kit: Kit, num_blocks: int = 2) -> tuple[bytes, list[int]]:
    keys, offsets = commit_on_device(kit, num_blocks)
    (download,) = kit.device_instructions()
    assert isinstance(download, Download)
    kit.device_report(0, CopyDone(download.op, 0.001))
    return keys, offsets


# ---- the life of a pool


def test_a_pool_is_opened_by_the_core_and_then_the_supervisor_is_told(kit: Kit) -> None:
    kit.start_device(0)
    assert (kit.opened, kit.state.device_tiers()[0].capacity_bytes) == ([], 0)
    kit.device_report(0, READY)
    assert (kit.opened, kit.state.device_tiers()[0].capacity_bytes) == ([0], POOL_BYTES)


def test_blocks_that_an_engine_stores_on_its_device_are_found_there_and_were_copied_to_the_host(mapped: Kit) -> None:
    keys, offsets = commit_on_device(mapped)
    assert all(mapped.bases[0] <= offset < mapped.bases[0] + POOL_BYTES for offset in offsets)
    assert mapped.ask(Match, group=GROUP, keys=keys).blocks == 0  # the node has no bytes of it yet
    (download,) = mapped.device_instructions()
    assert isinstance(download, Download)
    assert download.slots == [offset - mapped.bases[0] for offset in offsets]
    assert all(offset < HOST_BYTES for offset in download.host)
    mapped.device_report(0, CopyDone(download.op, 0.001))
    lease = mapped.ask(Acquire, grant=L1, group=GROUP, keys=keys, on_device=True)
    assert (lease.blocks, lease.device_blocks, numbers(lease.parts[0].offsets)) == (2, 2, offsets)
    lease = mapped.ask(Acquire, grant=b"another lease 01", group=GROUP, keys=keys)
    assert (lease.blocks, lease.device_blocks, numbers(lease.parts[0].offsets)) == (2, 0, download.host)


def test_a_session_that_has_mapped_nothing_gets_host_memory(kit: Kit) -> None:
    kit.start_device(0, READY)
    keys, offsets = commit_on_device(kit)
    assert max(offsets) < HOST_BYTES
    assert kit.device_instructions() == []
    assert kit.ask(Acquire, grant=L1, group=GROUP, keys=keys, on_device=True).device_blocks == 0


def test_a_mapping_of_which_the_front_has_not_read_yet_counts(kit: Kit) -> None:
    kit.start_device(0, READY)
    kit.sessions.catch_up = lambda: kit.devices.mapped(ENGINE, 0)
    keys, offsets = store_on_device(kit)
    assert min(offsets) >= kit.bases[0]
    kit.start_device(1, READY)
    kit.sessions.catch_up = lambda: kit.devices.mapped(ENGINE, 1)
    assert kit.ask(Acquire, grant=L1, group=GROUP, keys=keys, on_device=True).device_blocks == 0


def test_instructions_go_to_the_device_that_they_are_for(kit: Kit) -> None:
    for device in (0, 1):
        kit.start_device(device, READY)
    kit.devices.mapped(ENGINE, 1)
    commit_on_device(kit)
    assert kit.device_instructions(0) == []
    assert [type(one) for one in kit.device_instructions(1)] == [Download]
    kit.kill_device(1)


def test_a_mapping_ends_with_its_session_and_a_session_that_has_ended_maps_nothing(mapped: Kit) -> None:
    mapped.service.end_session(ENGINE, mapped.now)
    mapped.devices.session_ended(ENGINE)
    mapped.devices.mapped(ENGINE, 0)
    mapped.join(b"tool-session-001")
    assert mapped.device_workers[0].mapped == set()


def test_a_mapping_ends_with_the_pool(mapped: Kit) -> None:
    keys, _ = store_on_device(mapped)
    mapped.kill_device()
    mapped.start_device(0, READY)
    assert mapped.ask(Acquire, grant=L1, group=GROUP, keys=keys, on_device=True).device_blocks == 0
    assert status(mapped).mapped_sessions == 0


def test_what_a_dead_worker_had_said_still_counts(mapped: Kit) -> None:
    keys, _ = commit_on_device(mapped)
    (download,) = mapped.device_instructions()
    assert isinstance(download, Download)
    mapped.device_ends[0].send([CopyDone(download.op, 0.001)], timeout_seconds=1.0)
    mapped.kill_device()
    assert mapped.ask(Match, group=GROUP, keys=keys).blocks == 2


def test_blocks_that_were_on_their_way_from_a_device_that_died_are_dropped_and_counted(mapped: Kit) -> None:
    keys, _ = commit_on_device(mapped)
    mapped.kill_device()
    assert mapped.ask(Match, group=GROUP, keys=keys).blocks == 0
    assert mapped.ask(Status).counters["device_worker_deaths"] == 1
    mapped.state.check()


def test_a_worker_that_dies_before_it_has_a_pool_is_no_death_of_one(kit: Kit) -> None:
    kit.start_device(0)
    kit.kill_device(problem="no such device")
    assert kit.ask(Status).counters["device_worker_deaths"] == 0


def test_a_worker_that_reads_nothing_is_replaced(mapped: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.workers.channel.MAX_BUFFERED_BYTES", 0)
    mapped.start_device(1, READY)
    mover = mapped.device_workers[1].mover
    monkeypatch.setattr(mover._channel, "_max_buffered_bytes", -1)
    monkeypatch.setattr(mover._channel, "flush", lambda: None)
    mapped.devices.mapped(ENGINE, 1)
    commit_on_device(mapped)
    assert len(mapped.replaced) == 1
    assert not mover.is_attached
    mapped.kill_device(1)


def test_a_purge_is_over_when_the_slots_there_are_overwritten(mapped: Kit) -> None:
    keys, offsets = store_on_device(mapped)
    asked = mapped.ask(Purge, job=b"j" * 16, model="ab" * 32)
    assert asked.gpu_bytes == 2 * BLOCK_BYTES
    zeros = [one for one in mapped.device_instructions() if isinstance(one, Zero)]
    ranges = [one for zero in zeros for one in zero.ranges]
    assert {start for start, _ in ranges} >= {offset - mapped.bases[0] for offset in offsets}
    before = mapped.ask(Purge, job=b"j" * 16).wiping_bytes
    mapped.device_report(0, *(Zeroed(zero.op) for zero in zeros))
    after = mapped.ask(Purge, job=b"j" * 16).wiping_bytes
    assert before - after == sum(num_bytes for _, num_bytes in ranges)
    assert mapped.ask(Match, group=GROUP, keys=keys).blocks == 0
    mapped.state.check()


# ---- the end


def test_a_stopping_node_waits_for_blocks_that_come_from_a_device_and_then_stops_its_worker(mapped: Kit) -> None:
    commit_on_device(mapped)
    (download,) = mapped.device_instructions()
    draining = Draining(mapped.core, mapped.service, 10.0, mapped.now)
    assert draining.step(mapped.now) is None
    assert mapped.device_instructions() == []
    assert isinstance(download, Download)
    mapped.device_report(0, CopyDone(download.op, 0.001))
    mapped.service.drop_dirty(mapped.now)
    draining.shorten(0.0, mapped.now)
    assert draining.step(mapped.now) is None
    assert [type(one) for one in mapped.device_instructions()] == [Stop]
    mapped.now += STOP_SECONDS
    assert draining.step(mapped.now) is not None


def test_a_device_that_has_stopped_is_not_waited_for() -> None:
    kit = Kit(device_bytes=(POOL_BYTES,))
    kit.start_device(0, READY)
    draining = Draining(kit.core, kit.service, 10.0, kit.now)
    assert draining.step(kit.now) is None
    kit.device_report(0, Stopped())
    assert draining.step(kit.now) is not None
    kit.close()


# ---- what is said of it


def test_a_device_is_starting_then_there_then_away_with_the_reason(kit: Kit) -> None:
    kit.start_device(0)
    kit.start_device(1, READY, HEALTH)
    assert (status(kit).state, status(kit).problem) == ("starting", "its worker is starting")
    kit.device_report(0, READY, HEALTH)
    kit.devices.mapped(ENGINE, 0)
    said = status(kit)
    assert (said.state, said.asked_bytes, said.capacity_bytes) == ("ok", POOL_BYTES, POOL_BYTES)
    assert (said.name, said.device_name, said.kind, said.mapped_sessions) == ("cpu", "H", "vmm", 1)
    assert kit.ask(Status).state == "ready"
    kit.kill_device(problem="out of memory on the GPU")
    whole = kit.ask(Status)
    assert (whole.devices[0].state, whole.devices[0].problem) == ("away", "out of memory on the GPU")
    assert whole.state == "degraded"
    assert whole.problems == ("gpu0 (cpu) has no pool, and is tried again: out of memory on the GPU",)
    kit.start_device(0)
    assert status(kit).state == "away"  # each try is a new process; so far none has a pool
    kit.device_report(0, READY)
    assert kit.ask(Status).state == "ready"


def test_a_device_that_is_left_alone_for_a_while_is_said_to_come_back_in_so_many_seconds(kit: Kit) -> None:
    kit.start_device(0)
    kit.kill_device(problem="out of memory", pause_seconds=30.0)
    kit.now += 18.0
    assert "gpu0 (cpu) has no pool, and is tried again in 12 s: out of memory" in kit.ask(Status).problems
    kit.start_device(0)
    assert "gpu0 (cpu) has no pool, and is tried again: out of memory" in kit.ask(Status).problems


def test_the_tier_is_away_only_when_no_device_has_a_pool(kit: Kit) -> None:
    for device in (0, 1):
        kit.start_device(device, READY)
    kit.kill_device(0)
    gpu = kit.ask(Status).tiers[0]
    assert (gpu.tier, gpu.state, gpu.capacity_bytes) == ("gpu", "ok", POOL_BYTES)
    kit.kill_device(1, problem="fell off the bus")
    gpu = kit.ask(Status).tiers[0]
    assert (gpu.state, gpu.capacity_bytes) == ("away", 0)
    assert gpu.problem == "gpu0 (cpu): killed by SIGKILL; gpu1 (cpu:1): fell off the bus"


def test_a_silent_worker_is_named_and_what_it_has_stays(mapped: Kit) -> None:
    mapped.now += SILENT_SECONDS + 1
    said = mapped.ask(Status)
    assert said.devices[0].state == "silent"
    assert "the worker of gpu0 (cpu) has said nothing for 6 s" in said.problems
    assert said.devices[0].capacity_bytes == POOL_BYTES


def test_a_pool_that_is_smaller_than_asked_for_is_noted_with_both_sizes(kit: Kit) -> None:
    kit.start_device(0, PoolReady(1, SLAB_BYTES, "the GPU has no more free"))
    said = kit.ask(Status)
    assert said.warnings == ("the pool of gpu0 (cpu) has 16.0 KiB of 32.0 KiB (gpu_bytes): the GPU has no more free",)
    assert said.devices[0].problem == "the GPU has no more free"


def test_memory_that_is_not_pinned_or_far_from_the_gpu_is_noted_with_what_to_do(kit: Kit) -> None:
    kit.start_device(0, READY, msgspec.structs.replace(HEALTH, is_pinned=False, why_not_pinned="raise ulimit -l"))
    assert kit.ask(Status).warnings == (
        "copies to and from gpu0 (cpu) are slow, memory is not pinned: raise ulimit -l",
    )
    kit.device_report(0, msgspec.structs.replace(HEALTH, device_numa=2))
    (warning,) = kit.ask(Status).warnings
    assert "numactl --membind=2" in warning
    kit.device_report(0, msgspec.structs.replace(HEALTH, kind="memfd", is_pinned=False, why_not_pinned="no GPU"))
    assert kit.ask(Status).warnings == ()


def test_what_is_ill_with_a_device_is_a_problem_of_the_node(mapped: Kit) -> None:
    mapped.device_report(0, msgspec.structs.replace(HEALTH, problem="a copy has been in flight for 21 s"))
    said = mapped.ask(Status)
    assert (said.state, said.problems) == ("degraded", ("gpu0 (cpu): a copy has been in flight for 21 s",))
    assert said.devices[0].problem == "a copy has been in flight for 21 s"


def test_its_workers_are_among_the_processes_with_their_restarts(mapped: Kit) -> None:
    said = {worker.name: worker.state for worker in mapped.ask(Status).workers}
    assert (said["gpu0"], said["gpu1"]) == ("running", "restarting")
    assert mapped.survey.snapshot(mapped.now).worker_restarts["gpu0"] == 0


def test_usage_and_metrics_have_the_tier(mapped: Kit) -> None:
    store_on_device(mapped)
    usage = mapped.ask(Usage)
    assert [tier.tier for tier in usage.tiers] == ["gpu", "host", "nvme"]
    assert (usage.tiers[0].used_bytes, usage.rows[0].gpu_bytes) == (2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    values = {one.name: dict(one.read(mapped.survey.snapshot(mapped.now))) for one in METRICS}
    assert values["gpu_pool_bytes"] == {("gpu0",): POOL_BYTES, ("gpu1",): 0}
    assert values["gpu_used_bytes"][("gpu0",)] == 2 * BLOCK_BYTES
    assert values["gpu_pinned"][("gpu0",)] == 1
    assert values["process_up"][("gpu0",)] == 1
    assert answer(mapped.survey.snapshot(mapped.now), 0.0).tiers["gpu"].state == "ok"


def test_the_journal_tells_what_is_on_devices_apart_from_host_memory(mapped: Kit) -> None:
    store_on_device(mapped)
    mapped.instructions()
    mapped.core.journal.flush(mapped.now)
    mapped.instructions()
    rows = [row for told in mapped.booked if hasattr(told, "rows") for row in told.rows]
    gpu = sum(row.num_bytes for row in rows if getattr(row, "target", "") == Account.GPU)
    host = sum(row.num_bytes for row in rows if getattr(row, "target", "") == Account.HOST)
    assert (gpu, host) == (2 * BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_a_node_without_devices_evicts_nothing_from_them() -> None:
    refused = Kit().ask(Evict, tier=EvictedTier.GPU, to_bytes=0)
    assert (refused.code, refused.field) == (ErrorCode.INVALID, "tier")
    assert "gpu_devices" in refused.problem


def test_a_node_without_devices_says_nothing_of_them() -> None:
    kit = Kit()
    said = kit.ask(Status)
    assert said.devices == ()
    assert "gpu" not in [tier.tier for tier in said.tiers]
    assert not any(worker.name.startswith("gpu") for worker in said.workers)
