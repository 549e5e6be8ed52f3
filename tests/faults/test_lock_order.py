"""The locks of a client and of a storage worker are taken in one order, whatever happens at the same time."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.client.conftest import TOKENS, make_identity, poisoned, stamped
from tests.client.fake_node import FakeNode
from tests.faults.lock_order import LockOrder, TracedLock, traced
from tests.storage.samples import Sample
from tests.workers.desk import Desk, remove_order
from tierkv.client import connect
from tierkv.core.instructions import OpFailed


def test_two_locks_taken_in_both_orders_are_a_cycle() -> None:
    order = LockOrder()
    one, two, three = (TracedLock(order, name) for name in ("one", "two", "three"))
    with one, two, three:
        pass
    assert order.cycles() == []
    with three:
        assert one.acquire(blocking=False), "a try is never stuck"
        one.release()
    assert order.cycles() == []
    with three, one:
        pass
    assert {frozenset(cycle) for cycle in order.cycles()} >= {frozenset({"one", "three"})}
    with one, pytest.raises(AssertionError, match="one"):
        one.acquire()


@pytest.mark.scenario("B150", then="no order of the locks of a client that many threads use can stop it")
def test_a_client_that_threads_share_takes_its_locks_in_one_order(runtime_dir: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=runtime_dir))
    node = FakeNode(folder)
    try:
        with traced() as order, connect(folder, timeout_seconds=20) as client:
            group = client.open(make_identity())

            def live(number: int) -> None:
                tokens = [1_000 * number, *TOKENS]
                for turn in range(20):
                    with group.reserve(tokens) as ticket:
                        if ticket.granted:
                            ticket.copy_from(stamped(group, len(tokens) // 4))
                            ticket.commit()
                    with group.acquire(tokens) as lease:
                        lease.copy_into(poisoned(lease.blocks))
                    if number == 0 and turn % 5 == 0:
                        node.restart_front(notice=turn % 2 == 0)

            with ThreadPoolExecutor(4) as pool:
                list(pool.map(live, range(4)))
            client.close()
        assert order.edges, "locks are held while others are taken"
        assert order.cycles() == []
    finally:
        node.close()
        shutil.rmtree(folder)


@pytest.mark.scenario("B150", then="no order of the locks of a storage worker can stop it")
def test_a_storage_worker_takes_its_locks_in_one_order(tmp_path: Path) -> None:
    samples = [Sample(seed=seed) for seed in range(6)]
    with traced() as order, Desk(tmp_path / "data") as desk:
        for sample in samples:
            desk.open(sample)
        for op, sample in enumerate(samples, start=1):
            desk.store(sample, op)
        for op, sample in enumerate(samples, start=100):
            desk.load(sample, op)
        for op, sample in enumerate(samples, start=200):
            desk.send(remove_order(sample, op))
        for op in range(200, 200 + len(samples)):
            assert not isinstance(desk.answer(op), OpFailed)
        desk.stop()
    assert len(order.taken) > 3
    assert order.cycles() == []
