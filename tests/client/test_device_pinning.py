"""The arena is registered with a GPU's driver while a pool is mapped, copied from by the GPU then, and let go of by the
driver before it is unmapped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.client.conftest import TOKENS, make_identity, stamped, store
from tests.client.fake_device import DeviceNode
from tests.client.test_device_copies import POISON, Pages, store_on
from tierkv.client import Client, DevicePool, Group, connect
from tierkv.client.device.pinning import PinnedArena
from tierkv.core.reasons import Reason
from tierkv.device.backends import Pending, Pinning, PoolMap
from tierkv.device.cpu import CpuBackend
from tierkv.device.layouts import PagedLayout
from tierkv.device.memory import HostMemory
from tierkv.errors import DeviceError

SECONDS = 20


class Driver:
    """What of this process is registered, for all devices of it."""

    def __init__(self) -> None:
        self.registered: list[int] = []
        self.calls: list[str] = []
        self.may_end = threading.Event()
        self.may_end.set()
        self.is_registering = threading.Event()
        self.let_go = threading.Event()
        self.why_not = ""
        self.copied: list[str] = []
        self.fails = False


class GpuBackend(CpuBackend):
    """Host memory with a driver that memory is registered with."""

    cuda_version = 12080

    def __init__(self, driver: Driver, uuid: str = "cpu") -> None:
        super().__init__(uuid=uuid)
        self.driver = driver

    def register_host(self, memory: HostMemory) -> Pinning:
        self.driver.is_registering.set()
        assert self.driver.may_end.wait(SECONDS)
        self.driver.calls.append("register")
        if self.driver.why_not:
            return Pinning(False, self.driver.why_not)
        self.driver.registered.append(memory.address)
        return Pinning(True)

    def unregister_host(self, memory: HostMemory) -> None:
        if memory.address in self.driver.registered:
            assert f"{memory.address:x}-" in Path("/proc/self/maps").read_text(), "it is unmapped already"
            self.driver.registered.remove(memory.address)
            self.driver.calls.append("unregister")
        self.driver.let_go.set()

    def gather(self, layout: PagedLayout, pages: object, slots: PoolMap | HostMemory, offsets: object) -> Pending:
        self._note(slots)
        return super().gather(layout, pages, slots, offsets)  # type: ignore[arg-type]

    def scatter(self, slots: PoolMap | HostMemory, offsets: object, layout: PagedLayout, pages: object) -> Pending:
        self._note(slots)
        return super().scatter(slots, offsets, layout, pages)  # type: ignore[arg-type]

    def _note(self, slots: PoolMap | HostMemory) -> None:
        self.driver.copied.append("arena" if slots.address in self.driver.registered else "pool")
        if self.driver.fails:
            raise DeviceError("failed", "an illegal address")


@pytest.fixture
def node(node_dir: Path) -> Iterator[DeviceNode]:
    fake = DeviceNode(node_dir)
    yield fake
    fake.close()


@pytest.fixture
def driver() -> Driver:
    return Driver()


def map_on(client: Client, driver: Driver, name: str = "cpu") -> DevicePool:
    client._state.pool(name)._open_backend = lambda uuid: GpuBackend(driver, uuid)
    return client.map_device(name)


def wait_pinned(pool: DevicePool) -> None:
    mapped = pool._current
    assert mapped is not None
    assert mapped._pinned is not None
    for thread in threading.enumerate():
        if thread.name == "tierkv-pinning":
            thread.join(SECONDS)
    assert mapped.arena is not None


class NoHost(Pages):
    """Pages whose way through host memory is closed."""

    def write_blocks(self, first_block: int, blocks: object) -> None:
        raise AssertionError("by way of host memory")

    def read_blocks(self, first_block: int, blocks: object) -> None:
        raise AssertionError("by way of host memory")


@pytest.mark.parametrize("in_host", [(0, 1, 2, 3), (0, 2)], ids=["all in the arena", "some in the arena"])
def test_a_device_copies_from_the_arena_by_itself_once_it_is_pinned(
    node: DeviceNode, client: Client, group: Group, driver: Driver, in_host: tuple[int, ...]
) -> None:
    pool = map_on(client, driver)
    rows = store_on(pool, group)
    node.only_in_host(group.keys(TOKENS), in_host)
    wait_pinned(pool)
    pages = NoHost()
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.copy_into(pages.on(pool)) == 4
    assert (pages.blocks(4) == rows).all()
    assert set(driver.copied) == ({"arena"} if len(in_host) == 4 else {"arena", "pool"})


def test_a_device_copies_into_the_arena_by_itself(
    node: DeviceNode, client: Client, group: Group, driver: Driver
) -> None:
    pool, pages = map_on(client, driver), NoHost()
    wait_pinned(pool)
    pages.fill(stamped(group, 4))
    with group.reserve(TOKENS) as ticket:  # without a device: all its slots are in the arena
        ticket.copy_from(pages.on(pool))
        assert ticket.commit().reason is None
    assert driver.copied == ["arena"]
    back = Pages()
    with group.acquire(TOKENS) as lease:
        assert lease.copy_into(back.on(pool)) == 4
    assert (back.blocks(4) == stamped(group, 4)).all()


@pytest.mark.parametrize("where", ["arena", "both"])
def test_a_copy_from_the_arena_that_fails_proves_no_block(
    node: DeviceNode, client: Client, group: Group, driver: Driver, where: str
) -> None:
    pool, pages = map_on(client, driver), Pages()
    store_on(pool, group)
    node.only_in_host(group.keys(TOKENS), (0, 1, 2, 3) if where == "arena" else (0, 1))
    wait_pinned(pool)
    driver.fails = True
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.copy_into(pages.on(pool)) == 0
    assert (pages.memory == POISON).all()
    assert pool.reason == "failed"


def test_a_copy_into_the_arena_that_fails_is_not_published(
    node: DeviceNode, client: Client, group: Group, driver: Driver
) -> None:
    pool, pages = map_on(client, driver), Pages()
    wait_pinned(pool)
    pages.fill(stamped(group, 4))
    driver.fails = True
    with group.reserve(TOKENS) as ticket:
        ticket.copy_from(pages.on(pool))
        assert ticket.commit().reason is Reason.DEVICE_DOWN
    assert group.match(TOKENS).blocks == 0


def test_while_it_is_being_pinned_and_where_it_can_not_be_blocks_go_through_host_memory(
    node: DeviceNode, client: Client, group: Group, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.may_end.clear()
    driver.why_not = "the limit of locked memory is 65536 bytes"
    pool, rows = map_on(client, driver), store(group, TOKENS)
    for _ in range(2):
        pages = Pages()
        with group.acquire(TOKENS) as lease:
            assert lease.copy_into(pages.on(pool)) == 4
        assert (pages.blocks(4) == rows).all()
        driver.may_end.set()
        for thread in threading.enumerate():
            if thread.name == "tierkv-pinning":
                thread.join(SECONDS)
    assert driver.copied == []
    assert caplog.text.count("is not pinned") == 1
    assert driver.why_not in caplog.text


def test_one_arena_is_registered_once_for_all_devices_and_all_epochs_and_let_go_of_before_it_is_unmapped(
    node: DeviceNode, driver: Driver
) -> None:
    client = connect(node.directory, timeout_seconds=SECONDS)
    pool = map_on(client, driver)
    wait_pinned(pool)
    node.changed_grant = {"uuid": "cpu:1"}
    assert map_on(client, driver, "cpu:1").is_mapped
    node.changed_grant = {}
    node.end_pool()
    while pool.is_mapped:
        node.settle()
    assert client.map_device("cpu").is_mapped
    assert driver.calls == ["register"]
    group = client.open(make_identity())
    store_on(pool, group)
    lease = group.acquire(TOKENS, device=pool)
    client.close()
    assert driver.calls == ["register"], "a lease may still be copied"
    lease.release()
    assert driver.calls == ["register", "unregister"]
    assert not client._state._retired, "the session was not ended"


def test_a_client_that_is_closed_meanwhile_ends_its_session_when_the_driver_has_let_go(
    node: DeviceNode, driver: Driver
) -> None:
    driver.may_end.clear()
    client = connect(node.directory, timeout_seconds=SECONDS)
    map_on(client, driver)
    assert driver.is_registering.wait(SECONDS)
    client.close()
    assert client._state._retired, "the arena was unmapped while it was being registered"
    driver.may_end.set()
    assert driver.let_go.wait(SECONDS)
    for thread in threading.enumerate():
        if thread.name == "tierkv-pinning":
            thread.join(SECONDS)
    assert driver.calls == ["register", "unregister"]
    assert not client._state._retired


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_arena_whose_registering_broke_is_let_go_of_all_the_same() -> None:
    class Broken(CpuBackend):
        def register_host(self, memory: HostMemory) -> Pinning:
            assert may_end.wait(SECONDS)
            raise RuntimeError("nobody thought of this")

    may_end, let_go = threading.Event(), threading.Event()
    PinnedArena(Broken(), np.zeros(4096, np.uint8)).let_go(let_go.set)
    may_end.set()
    assert let_go.wait(SECONDS)
