"""Real processes that play a device's worker; the supervisor's part is played by the test."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.config.machines import machine
from tierkv.config import MiB, Settings
from tierkv.core.addresses import pool_bases
from tierkv.node import worker_command
from tierkv.node.control import Control, DeviceMapped, WorkerName, WorkerStarted, control_pair
from tierkv.node.device_pools import DevicePools
from tierkv.node.device_watch import DeviceWatch
from tierkv.node.sessions import AskedDevice, Session
from tierkv.node.worker_command import WorkerResources, device_worker_config
from tierkv.node.worker_watch import Died
from tierkv.wire.pools import PoolKind
from tierkv.wire.session import DeviceGrant, MapDevice

POOL_BYTES = 2 * MiB

OFFERS = """
import os, signal, socket, sys
from tierkv.wire.pools import PoolFailed, PoolKind, PoolOffer, encode_pool_message
from tierkv.workers.device.config import DeviceWorkerConfig
config = DeviceWorkerConfig.decode(sys.argv[1])
export = socket.socket(fileno=config.export_fd)
def offer(num_descriptors=1, **fields):
    memory = [os.memfd_create("pool") for _ in range(num_descriptors)]
    usual = dict(epoch=config.epoch, kind=PoolKind.MEMFD, uuid="cpu", num_bytes=config.num_bytes)
    socket.send_fds(export, [encode_pool_message(PoolOffer(**(usual | fields)))], memory)
def fail(problem):
    export.send(encode_pool_message(PoolFailed(epoch=config.epoch, problem=problem)))
"""
STAYS = "\noffer()\nsignal.pause()"


def settings(devices: str = "cpu") -> Settings:
    given = {"gpu_devices": devices, "gpu_bytes": POOL_BYTES, "slab_bytes": MiB, "host_bytes": 8 * MiB}
    return Settings.model_validate(given, context={"machine": machine()})


@dataclass
class Incarnation:
    control: Control
    arena_fd: int
    number: int = 7
    arena_bytes: int = 8 * MiB
    pool_bases: list[int] = field(default_factory=lambda: pool_bases(8 * MiB, MiB, [POOL_BYTES, POOL_BYTES]))


@dataclass
class Desk:
    front: Control
    incarnation: Incarnation
    write: Callable[[str], Any]
    ended: list[tuple[int, int]] = field(default_factory=list)
    now: float = 100.0

    def __post_init__(self) -> None:
        self.watch = DeviceWatch(settings(), 0, lambda device, epoch: self.ended.append((device, epoch)))

    def start(self, program: str = STAYS) -> WorkerStarted:
        self.write(OFFERS + program)
        self.watch.begin(self.now)
        self.watch.start_if_due(self.incarnation, self.now)
        found = self.front.wait(5.0)
        assert found is not None
        message, descriptors = found
        assert isinstance(message, WorkerStarted)
        for fd in descriptors:
            socket.socket(fileno=fd).close()
        return message

    def hear(self) -> None:
        """What the worker says next of its pool."""
        assert select.select(self.watch.filenos(), [], [], 10)[0], "it says nothing"
        self.watch.hear()

    def open(self, program: str = STAYS) -> int:
        """One whose pool the front knows; its pid."""
        started = self.start(program)
        self.hear()
        self.watch.recovered(started.pid)
        return started.pid

    def until_dead(self) -> Died | None:
        assert select.select(self.watch.pidfds(), [], [], 10)[0], "it did not end"
        return self.watch.reap(self.now, is_stopping=False)

    def descriptor_of_pool(self) -> int:
        pool = self.watch.pool()
        assert pool is not None
        return pool.fd


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""), os.getcwd())))
    monkeypatch.setattr(worker_command, "DEVICE_WORKER_MODULE", "device_player")
    supervisor, theirs = control_pair()
    front = Control(theirs)
    arena_fd = os.memfd_create("arena")
    desk = Desk(front, Incarnation(supervisor, arena_fd), (tmp_path / "device_player.py").write_text)
    yield desk
    desk.watch.kill()
    desk.watch.wait()
    supervisor.close()
    front.close()
    os.close(arena_fd)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_pool_may_be_mapped_once_it_was_offered_and_the_front_knows_it(desk: Desk) -> None:
    started = desk.start()
    assert (started.worker, started.device) == (WorkerName.DEVICE, 0)
    desk.hear()
    assert desk.watch.pool() is None
    desk.watch.recovered(started.pid)
    assert is_open(desk.descriptor_of_pool())


def test_what_the_front_says_of_a_worker_that_has_died_since_opens_nothing(desk: Desk) -> None:
    first = desk.open()
    desk.watch.kill()
    assert desk.until_dead() is not None
    desk.start()
    desk.hear()
    desk.watch.recovered(first)
    assert desk.watch.pool() is None


def test_a_dead_workers_pool_is_let_go_of_at_once_and_those_who_may_map_it_are_told(desk: Desk) -> None:
    pid = desk.open()
    fd = desk.descriptor_of_pool()
    desk.watch.kill()
    assert desk.until_dead() == Died(pid, "killed by SIGKILL")
    assert (desk.watch.pool(), is_open(fd), desk.ended) == (None, False, [(0, 1)])


def test_the_next_pool_of_a_device_has_another_epoch(desk: Desk) -> None:
    desk.open()
    desk.watch.kill()
    desk.until_dead()
    desk.open()
    pool = desk.watch.pool()
    assert pool is not None
    assert pool.offer.epoch == 2


def test_a_pool_goes_with_its_incarnation(desk: Desk) -> None:
    desk.open()
    fd = desk.descriptor_of_pool()
    desk.watch.incarnation_ended()
    assert (desk.watch.pool(), is_open(fd), desk.ended) == (None, False, [(0, 1)])
    assert desk.until_dead() is None  # of an earlier incarnation: nobody is told


def test_why_there_is_no_pool_is_told_in_the_workers_own_words(desk: Desk) -> None:
    desk.start("\nfail('the driver says: out of memory')\nraise SystemExit(2)")
    died = desk.until_dead()
    assert died is not None
    assert died.how == desk.watch.why_away == "the driver says: out of memory"
    assert desk.watch.next_due() is not None  # it is tried again
    assert desk.start("\nfail('out of memory')\nraise SystemExit(2)").restarts == 0  # nothing had started
    died = desk.until_dead()
    assert died is not None
    assert died.pause_seconds == pytest.approx(0.1)
    desk.now += 1.0
    assert desk.start().restarts == 0
    desk.hear()
    desk.watch.kill()
    assert desk.until_dead() is not None
    desk.now += 30.0
    assert desk.start().restarts == 1


def test_a_device_that_never_comes_is_left_alone_for_half_a_minute_at_most(desk: Desk) -> None:
    for _ in range(14):
        desk.start("\nraise SystemExit(2)")
        desk.until_dead()
        due = desk.watch.next_due()
        assert due is not None
        delay, desk.now = due - desk.now, due
        assert delay < 30.1
    assert delay == pytest.approx(30.0)


@pytest.mark.parametrize(
    "program",
    [
        "\nexport.send(b'nonsense')",
        "\noffer(num_bytes=config.num_bytes + 4096)",
        "\noffer(0)",
        "\noffer(2)",
        "\noffer(1, kind=PoolKind.IPC, handle=b'h')",
    ],
)
def test_a_worker_that_offers_what_can_not_be_is_ended_and_nothing_of_it_is_kept(desk: Desk, program: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    desk.start(program + "\nsignal.pause()")
    desk.hear()
    died = desk.until_dead()
    assert died is not None
    assert died.how == "killed by SIGKILL"
    assert (desk.watch.pool(), len(os.listdir("/proc/self/fd"))) == (None, before)


def test_an_offer_is_taken_once(desk: Desk) -> None:
    before = len(os.listdir("/proc/self/fd"))
    desk.open("\noffer()\noffer()\nsignal.pause()")
    while select.select(desk.watch.filenos(), [], [], 0)[0]:
        desk.watch.hear()
    desk.watch.kill()
    desk.until_dead()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_worker_of_a_device_is_told_which_and_how_much_of_it() -> None:
    made = settings("3,cpu:1")
    resources = WorkerResources(channel_fd=4, arena_fd=5, arena_bytes=6, lifeline_fd=7)
    told = [device_worker_config(made, resources, device, epoch=9, export_fd=8) for device in (0, 1)]
    assert [(one.device, one.index, one.num_bytes, one.epoch) for one in told] == [
        ("3", 0, POOL_BYTES, 9),
        ("cpu", 1, POOL_BYTES, 9),
    ]


# ---- who asks for it


@dataclass
class Asking:
    """Sessions that only remember what they were told, and in which order the front was."""

    front: Control
    told: list[Any] = field(default_factory=list)

    def tell_pool_ended(self, device: int, epoch: int) -> None:
        self.told.append(("ended", device, epoch))

    def grant_pool(self, session: Session, grant: DeviceGrant, fd: int) -> None:
        heard = self.front.wait(5.0)
        assert heard is not None, "the front is to know first"
        assert heard[0] == DeviceMapped(token=session.token, device=grant.device)
        self.told.append(grant)

    def refuse_pool(self, session: Session, code: str, problem: str) -> None:
        self.told.append((code, problem))


SESSION = Session(b"t" * 16, 7, 1, "engine", True, None, None)


@pytest.fixture
def pools(desk: Desk) -> Iterator[tuple[DevicePools, Asking, Desk]]:
    asking = Asking(desk.front)
    made = DevicePools(settings(), asking)  # type: ignore[arg-type]
    desk.watch = made.watches[0]
    yield made, asking, desk
    desk.watch.kill()
    desk.watch.wait()


def ask(pools: DevicePools, desk: Desk, uuid: str = "cpu", cuda_version: int = 0) -> None:
    asked = AskedDevice(SESSION, MapDevice(uuid=uuid, cuda_version=cuda_version))
    pools.ask(asked, desk.incarnation)  # type: ignore[arg-type]


def test_the_front_hears_of_a_mapping_before_the_session_learns_how(pools: tuple[DevicePools, Asking, Desk]) -> None:
    made, asking, desk = pools
    desk.open()
    ask(made, desk)
    grant = asking.told[-1]
    assert (grant.device, grant.epoch, grant.uuid, grant.kind) == (0, 1, "cpu", "memfd")
    assert (grant.base, grant.num_bytes) == (8 * MiB, POOL_BYTES)


def test_without_a_pool_a_session_is_told_why_and_that_it_may_come(pools: tuple[DevicePools, Asking, Desk]) -> None:
    made, asking, desk = pools
    ask(made, desk)
    assert asking.told[-1] == ("pool_down", "the pool of cpu is away: its worker is starting")
    desk.open()
    desk.watch.kill()
    desk.until_dead()
    ask(made, desk)
    assert asking.told[-1] == ("pool_down", "the pool of cpu is away: killed by SIGKILL")


def test_a_device_of_which_the_node_has_nothing_is_named_with_those_it_has(
    pools: tuple[DevicePools, Asking, Desk],
) -> None:
    made, asking, desk = pools
    ask(made, desk, "GPU-1234")
    assert asking.told[-1] == ("no_pool", "this node has no pool on GPU-1234; it has cpu")


def test_which_gpu_a_device_is_must_have_been_said_before_another_is_denied(desk: Desk) -> None:
    asking = Asking(desk.front)
    made = DevicePools(settings("3"), asking)  # type: ignore[arg-type]
    ask(made, desk, "GPU-1234")
    assert asking.told[-1] == ("pool_down", "gpu0 has not said which GPU it is: its worker is starting")


@pytest.mark.parametrize(("cuda_version", "is_granted"), [(0, True), (12_080, True), (13_000, False)])
def test_handles_are_given_only_to_drivers_of_the_same_major_version(
    pools: tuple[DevicePools, Asking, Desk], cuda_version: int, is_granted: bool
) -> None:
    made, asking, desk = pools
    desk.open("\noffer(kind=PoolKind.VMM, uuid='GPU-7', cuda_version=12040)\nsignal.pause()")
    ask(made, desk, cuda_version=cuda_version)
    if is_granted:
        assert asking.told[-1].kind == PoolKind.VMM
    else:
        code, problem = asking.told[-1]
        assert (code, "CUDA 12.4" in problem, "CUDA 13.0" in problem) == ("cuda_version", True, True)


def test_a_session_of_an_earlier_front_is_refused(pools: tuple[DevicePools, Asking, Desk]) -> None:
    made, asking, desk = pools
    desk.open()
    desk.incarnation.number = 8
    ask(made, desk)
    assert asking.told[-1] == ("pool_down", "the front of this session is gone")
