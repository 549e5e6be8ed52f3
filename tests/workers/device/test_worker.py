"""The worker of a device on a thread: what it answers, and when, whatever order its copies complete in."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.workers.desk import SECONDS, FrontSide
from tierkv.core.instructions import (
    AnyReport,
    CopyDone,
    DeviceHealth,
    Download,
    OpFailed,
    PoolReady,
    Stop,
    Stopped,
    Upload,
    Zero,
    Zeroed,
)
from tierkv.device.backends import Pinning
from tierkv.device.cpu import CpuBackend
from tierkv.device.late import LateCopies
from tierkv.device.memory import HostMemory, MemfdPool
from tierkv.errors import DeviceError, DeviceLost
from tierkv.workers.channel import front_end, worker_end
from tierkv.workers.device import in_flight, vital_signs, worker
from tierkv.workers.device.in_flight import InFlight
from tierkv.workers.device.vital_signs import LARGE_BYTES, DeviceFacts, VitalSigns
from tierkv.workers.device.worker import DeviceWorker
from tierkv.workers.roll import Roll

SLOT = 4096
BLOCK = 100


class Desk(FrontSide):
    def __init__(self, backend: CpuBackend, *, pool_bytes: int = 8 * SLOT) -> None:
        front, back = socket.socketpair()
        super().__init__(front_end(front))
        self.arena = np.zeros(8 * SLOT, np.uint8)
        self.pool = MemfdPool.make(pool_bytes)
        self.deaths: list[str] = []
        self._their_end = worker_end(back)
        self.worker = DeviceWorker(
            self._their_end,
            HostMemory(self.arena),
            backend,
            self.pool,
            epoch=7,
            health_seconds=0.05,
            on_death=self.deaths.append,
        )
        self._thread = threading.Thread(target=self.worker.run)
        self._thread.start()

    def close(self) -> None:
        self.channel.close()
        self.wait_ended()
        self.worker.close()
        self._their_end.close()
        gc.collect()  # an exception of a worker's thread may hold views of it in a cycle
        assert self.pool.close()

    def wait_ended(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def fill(self, offset: int, value: int) -> None:
        self.arena[offset : offset + BLOCK] = value

    def wait_copy(self, op: int) -> CopyDone:
        found = self.answer(op)
        assert isinstance(found, CopyDone)
        return found

    def wait_health(self, queued: int) -> DeviceHealth:
        def is_it(report: AnyReport) -> bool:
            return isinstance(report, DeviceHealth) and report.queued_copies == queued

        found = self.wait(is_it, seen=len(self.reports))
        assert isinstance(found, DeviceHealth)
        return found


@pytest.fixture
def late() -> LateCopies:
    return LateCopies()


@pytest.fixture
def desk(late: LateCopies) -> Iterator[Desk]:
    made = Desk(CpuBackend(late))
    yield made
    late.complete_all()
    made.close()


def test_the_pool_is_told_first() -> None:
    desk = Desk(CpuBackend())
    desk.wait_type(DeviceHealth)
    assert desk.reports[0] == PoolReady(7, 8 * SLOT)
    desk.close()


def test_copies_made_at_once_are_answered() -> None:
    desk = Desk(CpuBackend())
    desk.fill(SLOT, 5)
    desk.send(Upload(1, BLOCK, [SLOT], [3 * SLOT]), Download(2, BLOCK, [3 * SLOT], [2 * SLOT]))
    desk.wait_copy(2)
    assert (desk.arena[2 * SLOT : 2 * SLOT + BLOCK] == 5).all()
    assert not desk.arena[2 * SLOT + BLOCK : 3 * SLOT].any()
    desk.send(Zero(3, [(3 * SLOT, SLOT)]))
    assert isinstance(desk.answer(3), Zeroed)
    assert not desk.pool.bytes.any()
    desk.close()


def test_a_copy_is_answered_when_it_has_completed_and_not_before(desk: Desk, late: LateCopies) -> None:
    desk.fill(0, 1)
    desk.fill(SLOT, 2)
    desk.send(Upload(1, BLOCK, [0], [0]), Upload(2, BLOCK, [SLOT], [SLOT]), Zero(3, [(2 * SLOT, SLOT)]))
    assert late.wait_held(3, SECONDS)
    desk.wait_health(queued=3)
    late.complete(1)
    desk.wait_copy(2)
    assert (desk.pool.bytes[SLOT : SLOT + BLOCK] == 2).all()
    assert not desk.pool.bytes[:SLOT].any()
    desk.wait_health(queued=2)
    late.complete(1)
    desk.answer(3)
    late.complete()
    desk.wait_copy(1)
    answers = [report.op for report in desk.reports if isinstance(report, CopyDone | Zeroed)]
    assert answers == [2, 3, 1]


def test_a_copy_that_fails_is_told_and_the_others_go_on(desk: Desk, late: LateCopies) -> None:
    desk.send(Upload(1, BLOCK, [0], [0]), Upload(2, BLOCK, [0], [SLOT]))
    assert late.wait_held(2, SECONDS)
    late.fail(DeviceError("failed", "the driver says no"))
    failed = desk.answer(1)
    assert isinstance(failed, OpFailed)
    assert failed.problem == "the driver says no"
    late.complete_all()
    desk.wait_copy(2)


def test_what_is_not_in_the_pool_is_refused_and_harms_nothing(desk: Desk) -> None:
    desk.send(Upload(1, BLOCK, [0], [8 * SLOT]), Upload(2, BLOCK, [0, SLOT], [0]), Zero(3, [(0, 9 * SLOT)]))
    for op in (1, 2, 3):
        assert isinstance(desk.answer(op), OpFailed)
    desk.send(Upload(4, BLOCK, [0], [-1]))
    assert isinstance(desk.answer(4), OpFailed)


def test_of_a_lost_device_nothing_is_answered_and_the_worker_ends(desk: Desk, late: LateCopies) -> None:
    desk.send(Upload(1, BLOCK, [0], [0]), Upload(2, BLOCK, [0], [SLOT]))
    assert late.wait_held(2, SECONDS)
    late.fail(DeviceLost("failed", "an uncorrectable error of memory"))
    desk.wait_ended()
    assert isinstance(desk.worker.failure, DeviceLost)
    desk.reports += desk.channel.receive()
    assert not [report for report in desk.reports if isinstance(report, CopyDone | OpFailed)]


def test_a_stop_waits_for_what_is_in_flight(desk: Desk, late: LateCopies) -> None:
    desk.send(Upload(1, BLOCK, [0], [0]), Stop(SECONDS))
    assert late.wait_held(1, SECONDS)
    late.complete()
    desk.wait_type(Stopped)
    kinds = [type(report) for report in desk.reports if isinstance(report, CopyDone | Stopped)]
    assert kinds == [CopyDone, Stopped]
    desk.wait_ended()


def test_a_stop_does_not_wait_longer_than_its_budget(desk: Desk, late: LateCopies) -> None:
    desk.send(Upload(1, BLOCK, [0], [0]))
    assert late.wait_held(1, SECONDS)
    desk.send(Stop(0.05))
    desk.wait_type(Stopped)
    desk.wait_ended()


def test_the_speed_of_large_copies_is_told() -> None:
    signs = VitalSigns(
        DeviceFacts(name="a GPU", kind="vmm", numa_node=0, arena_numa_node=1), _Oldest(0.0), Roll(), lambda _: None
    )
    signs.note_copy("upload", LARGE_BYTES, 0.5)
    signs.note_copy("download", LARGE_BYTES - 1, 0.5)
    signs.pinning = Pinning(False, "the limit of locked memory is 8 MiB")
    health = signs.health()
    assert (health.upload_bytes_per_second, health.download_bytes_per_second) == (2 * LARGE_BYTES, 0.0)
    assert (health.device_numa, health.arena_numa) == (0, 1)
    assert (health.is_pinned, health.why_not_pinned) == (False, "the limit of locked memory is 8 MiB")


class _Oldest(InFlight):
    """One copy that has been in flight for so long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1

    def oldest_seconds(self) -> float:
        return self._seconds


@pytest.mark.parametrize(("seconds", "problem", "dies"), [(5.0, "", 0), (25.0, "for 25 s", 0), (91.0, "for 91 s", 1)])
def test_a_copy_that_hangs_is_named_and_ends_the_process_at_last(seconds: float, problem: str, dies: int) -> None:
    told: list[object] = []
    deaths: list[str] = []
    facts = DeviceFacts(name="a GPU", kind="vmm", numa_node=0, arena_numa_node=0)
    signs = VitalSigns(facts, _Oldest(seconds), Roll(), told.extend, on_death=deaths.append)
    signs.look()
    assert isinstance(told[0], DeviceHealth)
    assert problem in told[0].problem
    assert bool(told[0].problem) == bool(problem)
    assert len(deaths) == dies


@pytest.mark.parametrize(
    ("owner", "method", "thread"),
    [
        (in_flight.InFlight, "_is_over", "copies"),
        (vital_signs.VitalSigns, "look", "device-pulse"),
        (worker.DeviceWorker, "_pin", "pinning"),
    ],
)
def test_an_exception_in_a_thread_ends_the_worker(
    owner: type, method: str, thread: str, late: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(owner, method)

    def broken(*arguments: object) -> object:
        if threading.current_thread().name == thread:
            raise RuntimeError("what nobody foresaw")
        return real(*arguments)

    monkeypatch.setattr(owner, method, broken)
    desk = Desk(CpuBackend(late))
    desk.send(Upload(1, BLOCK, [0], [0]))
    assert late.wait_held(1, SECONDS)
    deadline = time.monotonic() + SECONDS
    while not desk.deaths and time.monotonic() < deadline:
        time.sleep(0.01)  # between two looks at a condition that has a deadline
    assert desk.deaths == [thread]
    late.complete_all()
    desk.close()
