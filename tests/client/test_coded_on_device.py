"""A coded group with slots in a pool and an engine's pages on the same device: coded and decoded there, by the bytes
and the promises of the way through host memory. Copies complete when a test says so, the last one first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.conftest import TOKENS
from tests.client.fake_device import DeviceNode
from tests.client.test_coded_groups import CODEC, CODED, RAW, SHAPE, as_read, coded_identity, raw_rows
from tests.client.test_device_copies import in_thread
from tierkv.client import Client, DevicePages, DevicePool, Group, connect
from tierkv.client.device.pool import MappedPool
from tierkv.core.reasons import Reason
from tierkv.device.cpu import CpuBackend
from tierkv.device.late import LateCopies
from tierkv.device.layouts import PagedLayout
from tierkv.device.memory import HostMemory
from tierkv.errors import DeviceError
from tierkv.wire.messages import Abort, Commit, ReportBad

POISON = 0xFF


class Pages:
    """Two layers in a page group each, or in one. Block i is on page 7 - i. On the device alone: host memory is
    refused."""

    def __init__(self, groups: int = 1) -> None:
        self.memory = np.full((2, 8, RAW // 2), POISON, np.uint8)
        self._groups = groups

    def rows(self, count: int = 4) -> np.ndarray:
        return np.array([self.memory[:, 7 - block].reshape(-1) for block in range(count)])

    def fill(self, rows: np.ndarray) -> None:
        for block, row in enumerate(rows):
            self.memory[:, 7 - block] = row.reshape(2, -1)

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        raise AssertionError("a block went through host memory")

    read_blocks = write_blocks

    def on(self, pool: DevicePool, *, first_block: int = 0, count: int = 4) -> DevicePages:
        pages = [7 - block for block in range(first_block, first_block + count)]
        layers = list(self.memory)
        layouts = [PagedLayout.of(layers)] if self._groups == 1 else [PagedLayout.of([layer]) for layer in layers]
        return DevicePages(pool=pool, layouts=layouts, pages=[pages] * self._groups, host=self, first_block=first_block)


@pytest.fixture
def node(node_dir: Path) -> Iterator[DeviceNode]:
    made = DeviceNode(node_dir)
    yield made
    made.close()


@pytest.fixture
def late() -> LateCopies:
    return LateCopies()


@pytest.fixture
def pool(client: Client, late: LateCopies) -> DevicePool:
    client._state.pool("cpu")._open_backend = lambda name: CpuBackend(late)
    return client.map_device("cpu")


@pytest.fixture
def coded(client: Client) -> Group:
    return client.open(coded_identity(), kv_shape=SHAPE)


def with_copies(late: LateCopies, count: int, job: Callable[[], Any]) -> Any:
    """What `job` returns, whose copies are completed once there are so many, the last one first."""
    done = in_thread(job)
    assert late.wait_held(count, 20)
    assert not done.done()
    late.complete_all()
    return done.result(20)


def store(late: LateCopies, pool: DevicePool, group: Group, rows: np.ndarray) -> None:
    pages = Pages()
    pages.fill(rows)
    with group.reserve(TOKENS, device=pool) as ticket:
        with_copies(late, 1, lambda: ticket.copy_from(pages.on(pool)))
        assert ticket.commit().reason is None


def slot_in_pool(node: DeviceNode, group: Group, block: int) -> int:
    devices, keys = node.devices, group.keys(TOKENS)
    return devices.device_slots[keys[32 * block : 32 * block + 32]] - devices.base


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("in_host", [(), (0,), (1, 3), (0, 1, 2)], ids=str)
def test_slots_of_both_kinds_hold_what_a_host_codes_and_come_back_as_a_host_decodes(
    node: DeviceNode, coded: Group, late: LateCopies, pool: DevicePool, in_host: tuple[int, ...], groups: int
) -> None:
    rows, back = raw_rows(4), Pages(groups)
    store(late, pool, coded, rows)
    expected = np.empty((4, CODED), np.uint8)
    CODEC.encode(rows, expected)
    for block in range(4):
        at = slot_in_pool(node, coded, block)
        assert bytes(node.devices.pool.bytes[at : at + CODED]) == expected[block].tobytes()
    node.only_in_host(coded.keys(TOKENS), in_host)
    with coded.acquire(TOKENS, device=pool) as lease:
        assert lease.device_blocks == 4 - len(in_host)
        valid = with_copies(late, 1 + bool(in_host), lambda: lease.copy_into(back.on(pool)))
        assert (valid, lease.reason) == (4, None)
        through_host = np.zeros_like(rows)
        if not in_host:
            assert with_copies(late, 1, lambda: lease.copy_into(through_host)) == 4
            assert through_host.tobytes() == back.rows().tobytes()
    assert back.rows().tobytes() == as_read(rows).tobytes()
    assert (back.memory[:, :4] == POISON).all()


def test_a_ticket_is_coded_into_slots_of_both_kinds(node_dir: Path, quick: None) -> None:
    node, late, source, back = DeviceNode(node_dir, pool_pages=2), LateCopies(), Pages(2), Pages()
    rows = raw_rows(4)
    source.fill(rows)
    with connect(node.directory, timeout_seconds=5) as client:
        client._state.pool("cpu")._open_backend = lambda name: CpuBackend(late)
        group, pool = client.open(coded_identity(), kv_shape=SHAPE), client.map_device("cpu")
        with group.reserve(TOKENS, device=pool) as ticket:
            assert ticket.device_blocks == 2
            with_copies(late, 2, lambda: ticket.copy_from(source.on(pool)))
            assert ticket.commit().reason is None
        with group.acquire(TOKENS) as lease:  # in host memory, by the host
            through_host = np.zeros_like(rows)
            assert lease.copy_into(through_host) == 4
        with group.acquire(TOKENS, device=pool) as lease:
            assert with_copies(late, 2, lambda: lease.copy_into(back.on(pool))) == 4
    assert through_host.tobytes() == back.rows().tobytes() == as_read(rows).tobytes()
    node.close()


@pytest.mark.scenario("B216", then="a ticket that is coded on a device is refused with non_finite, counted, not stored")
@pytest.mark.parametrize("pool_pages", [64, 2], ids=["pool", "both"])
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_a_block_that_is_not_finite_is_never_published(
    node_dir: Path, quick: None, number: float, pool_pages: int
) -> None:
    node, late, source = DeviceNode(node_dir, pool_pages=pool_pages), LateCopies(), Pages()
    rows = raw_rows(4)
    rows.view(np.float16)[[1, 3], 5] = number
    source.fill(rows)
    with connect(node.directory, timeout_seconds=5) as client:
        client._state.pool("cpu")._open_backend = lambda name: CpuBackend(late)
        group, pool = client.open(coded_identity(), kv_shape=SHAPE), client.map_device("cpu")
        with group.reserve(TOKENS, device=pool) as ticket:
            with_copies(late, 1 + (pool_pages == 2), lambda: ticket.copy_from(source.on(pool)))
            assert ticket._facts.refused_block == 1
            committed = ticket.commit()
        assert (committed.visible, committed.staged, committed.reason) == (0, 0, Reason.NON_FINITE)
        assert client.counters.by_reason == {Reason.NON_FINITE: 1}
        assert len(node.saw(Abort, at_least=1)) == 1
        assert not node.saw(Commit)
        assert group.match(TOKENS).blocks == 0
        assert pool.is_mapped
    node.close()


@pytest.mark.scenario("B217", then="a bad scale in a pool is damage: the lease is shorter, and the node is told which")
@pytest.mark.parametrize("in_host", [(), (0,), (3,)], ids=str)
def test_a_scale_that_no_coding_makes_is_damage_and_the_node_is_told(
    node: DeviceNode, client: Client, coded: Group, late: LateCopies, pool: DevicePool, in_host: tuple[int, ...]
) -> None:
    rows, back = raw_rows(4), Pages()
    store(late, pool, coded, rows)
    at = slot_in_pool(node, coded, 2)
    node.devices.pool.bytes[at : at + 4] = bytes(4)
    node.only_in_host(coded.keys(TOKENS), in_host)
    with coded.acquire(TOKENS, device=pool) as lease:
        valid = with_copies(late, 1 + bool(in_host), lambda: lease.copy_into(back.on(pool)))
        assert (valid, lease.reason) == (2, Reason.BAD_SCALE)
    assert back.rows(2).tobytes() == as_read(rows)[:2].tobytes()
    (told,) = node.saw(ReportBad, at_least=1)
    assert coded.keys(TOKENS)[64:96] in told.keys
    assert client.counters.by_reason == {Reason.BAD_SCALE: 1}


def load_with(late: LateCopies, pool: DevicePool, lease: Any, copies: int) -> tuple[Pages, Future[int]]:
    back = Pages()
    valid = in_thread(lambda: lease.copy_into(back.on(pool)))
    assert late.wait_held(copies, 20)
    return back, valid


def test_what_is_revoked_while_it_is_decoded_is_revoked_and_no_damage(
    node: DeviceNode, client: Client, coded: Group, late: LateCopies, pool: DevicePool
) -> None:
    rows = raw_rows(4)
    store(late, pool, coded, rows)
    with coded.acquire(TOKENS, device=pool) as lease:
        back, valid = load_with(late, pool, lease, 1)
        at = slot_in_pool(node, coded, 2)
        node.bump_in_pool(coded.keys(TOKENS), 2)
        node.devices.pool.bytes[at : at + CODED] = bytes(CODED)
        late.complete_all()
        assert valid.result(20) == 2
        assert lease.reason is not Reason.BAD_SCALE
    assert back.rows(2).tobytes() == as_read(rows)[:2].tobytes()
    assert not node.saw(ReportBad)


@pytest.mark.parametrize("notice", [True, False], ids=["told", "not told yet"])
@pytest.mark.parametrize("in_host", [(), (0, 1)], ids=str)
def test_a_pool_that_dies_while_it_is_decoded_proves_nothing_of_what_lies_in_it(
    node: DeviceNode, coded: Group, late: LateCopies, pool: DevicePool, in_host: tuple[int, ...], notice: bool
) -> None:
    rows = raw_rows(4)
    store(late, pool, coded, rows)
    node.only_in_host(coded.keys(TOKENS), in_host)
    with coded.acquire(TOKENS, device=pool) as lease:
        back, valid = load_with(late, pool, lease, 1 + bool(in_host))
        at = slot_in_pool(node, coded, 3)
        node.devices.pool.bytes[at : at + 4] = bytes(4)
        node.end_pool(notice=notice)
        late.complete_all()
        assert valid.result(20) == len(in_host)
        assert lease.reason is not Reason.BAD_SCALE
    assert back.rows(len(in_host)).tobytes() == as_read(rows)[: len(in_host)].tobytes()
    assert not node.saw(ReportBad)


@pytest.mark.parametrize(("failing", "count"), [(0, 2), (1, 0)], ids=["of the pool", "of the arena"])
def test_a_copy_that_fails_proves_nothing_of_its_own_blocks(
    node: DeviceNode, coded: Group, late: LateCopies, pool: DevicePool, failing: int, count: int
) -> None:
    rows = raw_rows(4)
    store(late, pool, coded, rows)
    node.only_in_host(coded.keys(TOKENS), (0, 1))
    with coded.acquire(TOKENS, device=pool) as lease:
        back, valid = load_with(late, pool, lease, 2)
        late.fail(DeviceError("failed", "an illegal address"), failing)
        late.complete_all()
        assert valid.result(20) == count
        assert lease.reason is not Reason.BAD_SCALE
    assert back.rows(count).tobytes() == as_read(rows)[:count].tobytes()
    assert (pool.is_mapped, pool.problem) == (False, "an illegal address")
    assert not node.saw(ReportBad)


@pytest.mark.parametrize("fault", ["the copy fails", "the pool ends"])
def test_what_was_not_coded_into_the_pool_is_not_published(
    node: DeviceNode, coded: Group, late: LateCopies, pool: DevicePool, fault: str
) -> None:
    source = Pages()
    source.fill(raw_rows(4))
    with coded.reserve(TOKENS, device=pool) as ticket:
        copied = in_thread(lambda: ticket.copy_from(source.on(pool)))
        assert late.wait_held(1, 20)
        if fault == "the copy fails":
            late.fail(DeviceError("failed", "an illegal address"))
        else:
            node.end_pool()
            while pool.is_mapped:
                node.settle()
        late.complete_all()
        copied.result(20)
        committed = ticket.commit()
    assert (committed.visible, committed.staged, committed.reason) == (0, 0, Reason.DEVICE_DOWN)
    assert node.saw(Commit) == []
    assert coded.match(TOKENS).blocks == 0


def test_blocks_without_a_page_are_judged_too_as_a_host_does(
    node: DeviceNode, coded: Group, late: LateCopies, pool: DevicePool
) -> None:
    rows, back = raw_rows(4), Pages()
    store(late, pool, coded, rows)
    with coded.acquire(TOKENS, device=pool) as lease:
        assert with_copies(late, 1, lambda: lease.copy_into(back.on(pool, first_block=1, count=2))) == 4
        assert back.rows()[1:3].tobytes() == as_read(rows)[1:3].tobytes()
        assert (back.rows()[[0, 3]] == POISON).all()
        at = slot_in_pool(node, coded, 3)
        node.devices.pool.bytes[at : at + 4] = bytes(4)
        assert with_copies(late, 1, lambda: lease.copy_into(back.on(pool, first_block=1, count=2))) == 3
    with coded.reserve([*range(16)], device=pool) as ticket, pytest.raises(ValueError, match="have not all got a page"):
        ticket.copy_from(back.on(pool, first_block=1, count=2))


def test_a_device_without_the_codec_leaves_it_to_the_host(
    node: DeviceNode, coded: Group, late: LateCopies, pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, back = raw_rows(4), Pages()
    store(late, pool, coded, rows)
    monkeypatch.setattr(CpuBackend, "codes", lambda self, codec: False)
    written: list[int] = []

    def write(first_block: int, blocks: np.ndarray) -> None:
        written.extend(range(first_block, first_block + len(blocks)))
        for block, row in enumerate(blocks, first_block):
            back.memory[:, 7 - block] = row.reshape(2, -1)

    back.write_blocks = write  # type: ignore[method-assign]
    with coded.acquire(TOKENS, device=pool) as lease:
        assert with_copies(late, 1, lambda: lease.copy_into(back.on(pool))) == 4
    assert written == [0, 1, 2, 3]
    assert back.rows().tobytes() == as_read(rows).tobytes()


def test_where_the_device_reaches_the_arena_blocks_of_both_are_coded_there(
    node: DeviceNode, coded: Group, late: LateCopies, pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arena(mapped: MappedPool) -> HostMemory:
        assert mapped.session.arena is not None
        return HostMemory(mapped.session.arena.writable)

    monkeypatch.setattr(MappedPool, "arena", property(arena))
    rows, source, back = raw_rows(4), Pages(), Pages(2)
    source.fill(rows)
    with coded.reserve(TOKENS) as ticket:
        assert ticket.device_blocks == 0
        with_copies(late, 1, lambda: ticket.copy_from(source.on(pool)))
        assert ticket.commit().reason is None
    with coded.acquire(TOKENS, device=pool) as lease:
        assert lease.device_blocks == 0
        assert with_copies(late, 1, lambda: lease.copy_into(back.on(pool))) == 4
        through_host = np.zeros_like(rows)
        assert lease.copy_into(through_host) == 4
    assert through_host.tobytes() == back.rows().tobytes() == as_read(rows).tobytes()


def test_damage_is_told_once_however_often_it_is_copied(
    node: DeviceNode, client: Client, coded: Group, late: LateCopies, pool: DevicePool
) -> None:
    """Behind the first word another engine may store the block anew, which a second one would drop."""
    store(late, pool, coded, raw_rows(4))
    at = slot_in_pool(node, coded, 2)
    node.devices.pool.bytes[at : at + 4] = bytes(4)
    with coded.acquire(TOKENS, device=pool) as lease:
        for _ in range(2):
            assert with_copies(late, 1, lambda: lease.copy_into(Pages().on(pool))) == 2
        node.bump_in_pool(coded.keys(TOKENS), 1)
        assert with_copies(late, 1, lambda: lease.copy_into(Pages().on(pool))) == 1
    assert len(node.saw(ReportBad, at_least=1)) == 1
    assert client.counters.by_reason == {Reason.BAD_SCALE: 2, Reason.REVOKED: 1}


def test_a_ticket_whose_second_copy_did_not_end_is_not_published(
    node: DeviceNode, coded: Group, late: LateCopies, pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Pages()
    source.fill(raw_rows(4))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with coded.reserve(TOKENS, device=pool) as ticket:
        with_copies(late, 1, lambda: ticket.copy_from(source.on(pool)))
        monkeypatch.setattr(CpuBackend, "encode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ticket.copy_from(source.on(pool))
        with pytest.raises(ValueError, match="not written"):
            ticket.commit()
    assert not node.saw(Commit)
