"""Blocks to and from slots in a pool: every copy completes, then generations are compared, then somebody is told.

Copies of the device here complete when a test says so, the last one first, and read their source at that moment: who
looks before, or gives a source away before, is found out.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.conftest import BLOCK_BYTES, TOKENS, make_identity, poisoned, stamped, store
from tests.client.fake_device import DeviceNode
from tests.client.fake_node import hold
from tierkv.client import Client, DevicePages, DevicePool, Group, aio
from tierkv.client.device.copies import Copies
from tierkv.core.reasons import Reason
from tierkv.device.cpu import CpuBackend
from tierkv.device.late import LateCopies
from tierkv.device.layouts import PagedLayout
from tierkv.errors import DeviceError
from tierkv.wire.messages import Abort, Acquire, Commit, Reserve

SPOILED = 0xEE
LAYERS, NUM_PAGES = 2, 8
POISON = 0xFF


@pytest.fixture
def node(node_dir: Path) -> Iterator[DeviceNode]:
    fake = DeviceNode(node_dir)
    yield fake
    fake.close()


@pytest.fixture
def pool(client: Client) -> DevicePool:
    return client.map_device("cpu")


@pytest.fixture
def late() -> LateCopies:
    return LateCopies()


@pytest.fixture
def late_pool(client: Client, late: LateCopies) -> DevicePool:
    client._state.pool("cpu")._open_backend = lambda name: CpuBackend(late)
    return client.map_device("cpu")


class Pages:
    """An engine's memory: each layer's part of a block on a page. Block i is on page 7 - i."""

    def __init__(self, layers: int = LAYERS) -> None:
        self.memory = np.full((layers, NUM_PAGES, BLOCK_BYTES // layers), POISON, np.uint8)

    def blocks(self, count: int, *, first: int = 0) -> np.ndarray:
        rows = [np.concatenate([layer[7 - block] for layer in self.memory]) for block in range(first, first + count)]
        return np.array(rows)

    def fill(self, rows: np.ndarray, *, first: int = 0) -> None:
        for block, row in enumerate(rows, first):
            self.memory[:, 7 - block] = row.reshape(len(self.memory), -1)

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        self.fill(blocks, first=first_block)

    def read_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        blocks[:] = self.blocks(len(blocks), first=first_block)

    def on(self, pool: DevicePool, *, count: int = 4, first_block: int = 0) -> DevicePages:
        pages = [7 - block for block in range(first_block, first_block + count)]
        return DevicePages(
            pool=pool, layouts=[PagedLayout.of(list(self.memory))], pages=[pages], host=self, first_block=first_block
        )


def store_on(pool: DevicePool, group: Group, tokens: list[int] = TOKENS) -> np.ndarray:
    rows = stamped(group, len(tokens) // group.block_tokens)
    with group.reserve(tokens, device=pool) as ticket:
        ticket.copy_from(rows)
        assert ticket.commit().reason is None
    return rows


def in_thread(job: Callable[[], Any]) -> Future[Any]:
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(job())
        except BaseException as error:  # noqa: BLE001 - it is the test's
            done.set_exception(error.with_traceback(None))  # whose frames would keep views of the arena

    threading.Thread(target=run, daemon=True).start()
    return done


# ---- which memory


def test_what_was_stored_on_a_device_is_read_there(node: DeviceNode, group: Group, pool: DevicePool) -> None:
    rows = store_on(pool, group)
    node.spoil_arena()
    with group.acquire(TOKENS, device=pool) as lease:
        assert (lease.blocks, lease.device_blocks) == (4, 4)
        destination = poisoned(4)
        assert lease.copy_into(destination) == 4
    assert (destination == rows).all()


def test_who_names_no_device_reads_what_was_stored_there_in_host_memory(
    node: DeviceNode, group: Group, pool: DevicePool
) -> None:
    rows = store_on(pool, group)
    with group.acquire(TOKENS) as lease:
        destination = poisoned(4)
        assert (lease.copy_into(destination), lease.device_blocks) == (4, 0)
    assert (destination == rows).all()


@pytest.mark.parametrize("in_host", [(0,), (3,), (0, 2), (1, 2, 3), ()], ids=str)
def test_slots_of_both_kinds_come_out_in_the_order_of_the_prompt(
    node: DeviceNode, group: Group, pool: DevicePool, in_host: tuple[int, ...]
) -> None:
    rows = store_on(pool, group)
    node.only_in_host(group.keys(TOKENS), in_host)
    pages = Pages()
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.device_blocks == 4 - len(in_host)
        destination = poisoned(4)
        assert lease.copy_into(destination) == 4
        assert lease.copy_into(pages.on(pool)) == 4
        apart = np.full((4, 2 * BLOCK_BYTES), POISON, np.uint8)[:, :BLOCK_BYTES]
        assert lease.copy_into(apart) == 4
    assert (destination == rows).all()
    assert (pages.blocks(4) == rows).all()
    assert (apart == rows).all()


def test_a_ticket_takes_slots_of_both_kinds(node_dir: Path, quick: None) -> None:
    from tierkv.client import connect

    node = DeviceNode(node_dir, pool_pages=2)
    with connect(node.directory, timeout_seconds=5) as client:
        group, pool, pages = client.open(make_identity()), client.map_device("cpu"), Pages()
        pages.fill(stamped(group, 4))
        with group.reserve(TOKENS, device=pool) as ticket:
            ticket.copy_from(pages.on(pool))
            ticket.commit()
        with group.acquire(TOKENS, device=pool) as lease:
            assert lease.device_blocks == 2
            destination = poisoned(4)
            assert lease.copy_into(destination) == 4
        assert (destination == stamped(group, 4)).all()
    node.close()


def test_pages_are_gathered_and_scattered_on_the_device(node: DeviceNode, group: Group, pool: DevicePool) -> None:
    rows, source, target = stamped(group, 4), Pages(), Pages()
    source.fill(rows)
    with group.reserve(TOKENS, device=pool) as ticket:
        source.read_blocks = None  # type: ignore[method-assign, assignment]
        ticket.copy_from(source.on(pool))
        ticket.commit()
    node.spoil_arena()
    with group.acquire(TOKENS, device=pool) as lease:
        target.write_blocks = None  # type: ignore[method-assign, assignment]
        assert lease.copy_into(target.on(pool)) == 4
    assert (target.blocks(4) == rows).all()
    assert (target.memory[:, :4] == POISON).all(), "pages of nobody's blocks were written to"


def test_only_the_blocks_that_have_a_page_are_written(node: DeviceNode, group: Group, pool: DevicePool) -> None:
    rows, pages = store_on(pool, group), Pages()
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.copy_into(pages.on(pool, first_block=1, count=2)) == 4
    assert (pages.blocks(2, first=1) == rows[1:3]).all()
    assert (pages.blocks(1) == POISON).all()
    assert (pages.blocks(1, first=3) == POISON).all()


def test_page_groups_have_pages_of_their_own_and_may_lack_one(node: DeviceNode, group: Group, pool: DevicePool) -> None:
    rows = store_on(pool, group)
    one, other = np.full((2, 4, BLOCK_BYTES // 2), POISON, np.uint8)
    both = DevicePages(
        pool=pool,
        layouts=[PagedLayout.of([one]), PagedLayout.of([other])],
        pages=[[0, 1, 2, 3], [-1, -1, 3, 0]],
        host=Pages(),
    )
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.copy_into(both) == 4
    half = BLOCK_BYTES // 2
    assert (one == rows[:, :half]).all()
    assert (other[[3, 0]] == rows[2:, half:]).all()
    assert (other[[1, 2]] == POISON).all()
    with group.reserve([*range(16)], device=pool) as ticket, pytest.raises(ValueError, match="have not all got a page"):
        ticket.copy_from(both)


def test_pages_of_another_pool_go_by_way_of_host_memory(node: DeviceNode, group: Group, pool: DevicePool) -> None:
    rows, pages = store_on(pool, group), Pages()
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.copy_into(pages.on(DevicePool("cuda:1"))) == 4
    assert (pages.blocks(4) == rows).all()


def test_views_and_single_blocks_are_the_arenas_alone(node: DeviceNode, group: Group, pool: DevicePool) -> None:
    store_on(pool, group)
    with group.acquire(TOKENS, device=pool) as lease, pytest.raises(ValueError, match="in a GPU's pool"):
        lease.raw_views()
    with group.reserve([*range(8)], device=pool) as ticket:
        with pytest.raises(ValueError, match="in a GPU's pool"):
            list(ticket.runs())
        with pytest.raises(ValueError, match="in a GPU's pool"):
            ticket.write(0, poisoned(1))


# ---- copy, event, generations, tell


@dataclass
class Copying:
    """A lease whose copies have been asked for and are held; `valid` comes when they have completed."""

    node: DeviceNode
    group: Group
    late: LateCopies
    pages: Pages = field(default_factory=Pages)

    def begin(self, pool: DevicePool, *, in_host: tuple[int, ...] = ()) -> Future[int]:
        stored = in_thread(lambda: store_on(pool, self.group))
        assert self.late.wait_held(1, 20)
        self.late.complete_all()
        self.rows = stored.result(20)
        self.keys = self.group.keys(TOKENS)
        self.node.only_in_host(self.keys, in_host)
        self.lease = self.group.acquire(TOKENS, device=pool)
        valid: Future[int] = in_thread(lambda: self.lease.copy_into(self.pages.on(pool)))
        assert self.late.wait_held(1, 20)
        return valid


@pytest.fixture
def copying(node: DeviceNode, group: Group, late: LateCopies) -> Iterator[Copying]:
    made = Copying(node, group, late)
    yield made
    made.late.complete_all()
    made.lease.release()


def test_nobody_is_told_before_the_copy_has_completed(copying: Copying, late_pool: DevicePool) -> None:
    valid = copying.begin(late_pool)
    with pytest.raises(TimeoutError):
        valid.result(0.1)
    assert (copying.pages.memory == POISON).all()
    copying.late.complete_all()
    assert valid.result(20) == 4
    assert (copying.pages.blocks(4) == copying.rows).all()


@pytest.mark.scenario("B020", then="what was overwritten while it was copied is not handed out")
def test_generations_are_compared_behind_the_copy_and_not_when_it_was_asked_for(
    copying: Copying, late_pool: DevicePool
) -> None:
    """The slot is given to somebody else while the copy waits on its stream: it copies the other one's bytes."""
    valid = copying.begin(late_pool)
    devices = copying.node.devices
    at = devices.device_slots[copying.keys[64:96]] - devices.base
    copying.node.bump_in_pool(copying.keys, 2)
    devices.pool.bytes[at : at + BLOCK_BYTES] = bytes([SPOILED]) * BLOCK_BYTES
    copying.late.complete_all()
    assert valid.result(20) == 2
    assert (copying.pages.blocks(2) == copying.rows[:2]).all()
    assert (copying.pages.blocks(1, first=2) == SPOILED).all(), "then nothing was tried"


@pytest.mark.parametrize("notice", [True, False], ids=["told", "not told yet"])
def test_a_pool_that_dies_during_the_copy_proves_nothing_of_what_lies_in_it(
    copying: Copying, client: Client, late_pool: DevicePool, notice: bool
) -> None:
    valid = copying.begin(late_pool, in_host=(0, 1))
    copying.node.end_pool(notice=notice)
    copying.late.complete_all()
    assert valid.result(20) == 2
    assert (copying.pages.blocks(2) == copying.rows[:2]).all()


def test_a_pool_that_ended_proves_nothing_though_its_generations_were_not_bumped(
    copying: Copying, late_pool: DevicePool
) -> None:
    valid = copying.begin(late_pool, in_host=(0,))
    copying.node.tell_ended(1)
    while late_pool.is_mapped:
        copying.node.settle()
    copying.late.complete_all()
    assert valid.result(20) == 1


def test_a_copy_that_fails_is_a_shorter_answer_and_every_other_one_is_waited_for(
    copying: Copying, client: Client, late_pool: DevicePool
) -> None:
    valid = copying.begin(late_pool, in_host=(0,))
    copying.late.fail(DeviceError("failed", "an illegal address"))
    assert valid.result(20) == 1
    assert (late_pool.is_mapped, late_pool.reason, late_pool.problem) == (False, "failed", "an illegal address")
    assert client.counters.by_reason[Reason.REVOKED] == 1
    late_pool._retry_at = 0.0
    with copying.group.acquire(TOKENS, device=late_pool) as again:
        assert (late_pool.is_mapped, again.device_blocks) == (True, 3)


def test_an_event_of_the_engine_that_can_not_be_waited_for_is_a_failed_copy_and_no_exception(
    node: DeviceNode, group: Group, pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_on(pool, group)
    node.only_in_host(group.keys(TOKENS), (0,))

    def fail(self: CpuBackend, event: object) -> None:
        raise DeviceError("failed", "an event of another device")

    monkeypatch.setattr(CpuBackend, "wait_for", fail)
    pages = Pages()
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.copy_into(pages.on(pool)) == 1
    assert pool.problem == "an event of another device"
    assert (pages.blocks(3, first=1) == POISON).all()


class Failing:
    """A destination in host memory that takes so many blocks, and no more."""

    def __init__(self, takes: int) -> None:
        self.takes = takes

    def write_blocks(self, first_block: int, blocks: np.ndarray) -> None:
        if first_block + len(blocks) > self.takes:
            raise RuntimeError("the engine's memory is gone")


def test_an_engine_that_fails_during_a_copy_hears_of_it_when_nothing_is_under_way_any_more(
    node: DeviceNode, group: Group, late: LateCopies, late_pool: DevicePool
) -> None:
    stored = in_thread(lambda: store_on(late_pool, group))
    assert late.wait_held(1, 20)
    late.complete_all()
    stored.result(20)
    node.only_in_host(group.keys(TOKENS), (3,))
    pages = Pages()
    pages.write_blocks = Failing(0).write_blocks  # type: ignore[method-assign]
    with group.acquire(TOKENS, device=late_pool) as lease:
        ended = in_thread(lambda: lease.copy_into(pages.on(late_pool)))
        assert late.wait_held(1, 20)
        with pytest.raises(TimeoutError):
            ended.result(0.1)
        late.complete_all()
        with pytest.raises(RuntimeError, match="is gone"):
            ended.result(20)


class Interrupted:
    """A copy whose first wait is ended by Ctrl-C."""

    def __init__(self) -> None:
        self.waits = 0
        self.is_done = False
        self.seconds = 0.0

    def wait(self, timeout_seconds: float) -> bool:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt
        self.is_done = True
        return True


def test_ctrl_c_is_heard_when_nothing_is_under_way_any_more(pool: DevicePool) -> None:
    mapped = pool._current
    assert mapped is not None
    pending = [Interrupted(), Interrupted()]

    def copy_both() -> None:
        with Copies(mapped) as copies:
            copies.begin(lambda: pending[0])
            copies.begin(lambda: pending[1])
            copies.complete()

    with pytest.raises(KeyboardInterrupt):
        copy_both()
    assert [copy.is_done for copy in pending] == [True, True]
    assert mapped.is_usable


def test_a_ticket_is_written_when_its_copies_have_completed_and_not_when_they_were_asked_for(
    node: DeviceNode, group: Group, late: LateCopies, late_pool: DevicePool
) -> None:
    pages = Pages()
    pages.fill(stamped(group, 4))
    with group.reserve(TOKENS, device=late_pool) as ticket:
        copied = in_thread(lambda: ticket.copy_from(pages.on(late_pool)))
        assert late.wait_held(1, 20)
        with pytest.raises(TimeoutError):
            copied.result(0.1)
        with pytest.raises(ValueError, match="were granted and not written"):
            ticket.commit()
        late.complete_all()
        copied.result(20)
        assert ticket.commit().reason is None
    pool = node.devices.pool
    assert bytes(pool.bytes[: 4 * BLOCK_BYTES]) == stamped(group, 4).tobytes()


@pytest.mark.parametrize(
    "fault", ["the copy fails", "the pool ends during the copy", "the pool ends before the commit"]
)
def test_what_did_not_get_into_the_pool_is_not_published_and_the_commit_says_why(
    node: DeviceNode, client: Client, group: Group, late: LateCopies, late_pool: DevicePool, fault: str
) -> None:
    with group.reserve(TOKENS, device=late_pool) as ticket:
        copied = in_thread(lambda: ticket.copy_from(stamped(group, 4)))
        assert late.wait_held(1, 20)
        if fault == "the copy fails":
            late.fail(DeviceError("failed", "an illegal address"))
        elif fault == "the pool ends during the copy":
            node.end_pool()
            while late_pool.is_mapped:
                node.settle()
        late.complete_all()
        copied.result(20)
        if fault == "the pool ends before the commit":
            node.end_pool()
            while late_pool.is_mapped:
                node.settle()
        committed = ticket.commit()
    assert (committed.visible, committed.staged, committed.reason) == (0, 0, Reason.DEVICE_DOWN)
    assert node.saw(Commit) == []
    assert len(node.saw(Abort, at_least=1)) == 1
    assert client.counters.by_reason[Reason.DEVICE_DOWN] == 1
    assert group.match(TOKENS).blocks == 0


# ---- the pool of then, and the pool of now


def remap(node: DeviceNode, client: Client, pool: DevicePool) -> None:
    """The pool's process dies, and this one has mapped its successor."""
    before = pool.epoch
    node.end_pool()
    while pool.is_mapped:
        node.settle()
    assert client.map_device("cpu").epoch == (before or 0) + 1


def test_a_ticket_of_a_pool_that_died_is_never_written_through_the_next_one(
    node: DeviceNode, client: Client, group: Group, pool: DevicePool
) -> None:
    node.script[Reserve].append(hold)
    reserved = in_thread(lambda: group.reserve(TOKENS, device=pool, deadline_seconds=20))
    node.wait_for(Reserve)
    remap(node, client, pool)
    node.release_held()
    ticket = reserved.result(20)
    assert (ticket.granted, ticket.reason) == ([], Reason.DEVICE_DOWN)
    ticket.copy_from(stamped(group, 4))
    assert not any(node.devices.pool.bytes[:]), "somebody else's slots were written to"
    assert len(node.saw(Abort, at_least=1)) == 1
    assert node.has_no_grants()


def test_a_lease_of_a_pool_that_died_is_not_proven_by_the_next_one(
    node: DeviceNode, client: Client, group: Group, pool: DevicePool
) -> None:
    store_on(pool, group)
    node.script[Acquire].append(hold)
    acquired = in_thread(lambda: group.acquire(TOKENS, device=pool, deadline_seconds=20))
    node.wait_for(Acquire)
    remap(node, client, pool)
    node.release_held()
    with acquired.result(20) as lease:
        assert lease.copy_into(poisoned(4)) == 0


def test_a_lease_of_a_pool_that_died_keeps_what_lies_before_it_in_host_memory(
    node: DeviceNode, client: Client, group: Group, pool: DevicePool
) -> None:
    rows = store_on(pool, group)
    node.only_in_host(group.keys(TOKENS), (0, 1))
    node.script[Acquire].append(hold)
    acquired = in_thread(lambda: group.acquire(TOKENS, device=pool, deadline_seconds=20))
    node.wait_for(Acquire)
    node.refuse_pool = None
    node.end_pool()
    while pool.is_mapped:
        node.settle()
    node.release_held()
    with acquired.result(20) as lease:
        assert (lease.blocks, lease.device_blocks, lease.reason) == (2, 0, Reason.DEVICE_DOWN)
        destination = poisoned(4)
        assert lease.copy_into(destination) == 2
    assert (destination[:2] == rows[:2]).all()
    assert node.has_no_grants()


def test_a_part_that_another_process_asked_for_lies_in_the_holders_pool(
    node: DeviceNode, client: Client, group: Group, pool: DevicePool
) -> None:
    from tierkv.client import HOLDERS, connect
    from tierkv.wire.messages import Holder

    rows = store_on(pool, group)
    with connect(node.directory, timeout_seconds=5) as scheduler:
        asking = scheduler.open(make_identity())
        holders = (Holder(0, client.session_token()),)
        with asking.acquire(TOKENS, holders=holders, device=HOLDERS) as lease:
            assert (lease.blocks, lease.device_blocks) == (4, 4)
            handed = (lease.grant, client.session_token(), lease.parts[0])
            with group.hold(*handed) as part:
                destination = poisoned(4)
                assert part.copy_into(destination) == 4
            assert (destination == rows).all()
            with group.hold(*handed) as held:
                remap(node, client, pool)
                assert held.copy_into(poisoned(4)) == 0
            with group.hold(*handed) as late_part:
                assert late_part.copy_into(poisoned(4)) == 0


def test_addresses_of_a_pool_are_nonsense_to_who_never_asked_for_one(
    node: DeviceNode, client: Client, group: Group
) -> None:
    from tierkv.client import connect

    with connect(node.directory, timeout_seconds=5) as other:
        pool = other.map_device("cpu")
        store_on(pool, other.open(make_identity()))
        with other.open(make_identity()).acquire(TOKENS, device=pool) as lease:
            part = lease.parts[0]
            held = group.hold(b"g" * 16, client.session_token(), part)
            assert (held.blocks, held.reason) == (0, Reason.WIRE_ERROR)


# ---- asyncio


async def _late_lease(node: DeviceNode, late: LateCopies, pages: Pages) -> tuple[int, bool]:
    async with await aio.connect(node.directory, timeout_seconds=5) as client:
        client._state.pool("cpu")._open_backend = lambda name: CpuBackend(late)
        pool = await client.map_device("cpu")
        group = await client.open(make_identity(2**20))
        rows = np.arange(2**20, dtype=np.uint32).astype(np.uint8)
        async with group.reserve(TOKENS[:4], device=pool) as ticket:
            copy = asyncio.ensure_future(ticket.copy_from(rows))
            while not late.held:
                await asyncio.sleep(0)
            late.complete_all()
            await copy
            assert (await ticket.commit()).reason is None
        destination = np.full(2**20, POISON, np.uint8)
        async with group.acquire(TOKENS[:4], device=pool) as lease:
            loading = asyncio.ensure_future(lease.copy_into(destination))
            while not late.held:
                await asyncio.sleep(0)
            loading.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            was_done = loading.done()
            late.complete_all()
            with pytest.raises(asyncio.CancelledError):
                await loading
            valid = asyncio.ensure_future(lease.copy_into(destination))
            while not late.held:
                await asyncio.sleep(0)
            late.complete_all()
            count = await valid
        assert (destination == rows).all()
        return count, was_done


def test_the_client_for_asyncio_waits_for_copies_even_when_it_is_cancelled(node_dir: Path, quick: None) -> None:
    node = DeviceNode(node_dir, pages=1024, pool_pages=512)
    assert asyncio.run(_late_lease(node, LateCopies(), Pages())) == (1, False)
    node.close()


def test_stored_in_host_memory_and_asked_for_on_a_device_is_read_where_it_is(
    node: DeviceNode, group: Group, pool: DevicePool
) -> None:
    rows, pages = store(group, TOKENS), Pages()
    with group.acquire(TOKENS, device=pool) as lease:
        assert lease.device_blocks == 0
        assert lease.copy_into(pages.on(pool)) == 4
    assert (pages.blocks(4) == rows).all()
