"""Counting host memory: what the books say is what is there, and what is not is found, while the cache goes on."""

from __future__ import annotations

import pytest

from tests.core.simulation import Bench
from tierkv.core import recount
from tierkv.core.instructions import Difference
from tierkv.core.recount import HostRecount


def counted(bench: Bench, job: HostRecount | None = None) -> list[Difference]:
    job = job or bench.state.recount_host()
    while (found := job.step(bench.now)) is None:
        pass
    return found


@pytest.fixture
def busy() -> Bench:
    bench = Bench(host_slots=24, nvme_bytes=1 << 20, extent_blocks=2)
    for token in range(5):
        bench.store_durably(bench.prompt(token, 50, 51))
    return bench


def test_what_is_there_is_what_is_booked_whoever_has_it(busy: Bench) -> None:
    lease = busy.load(busy.prompt(4, 50, 51))
    busy.reserve(busy.prompt(90, 91))
    assert counted(busy) == []
    busy.release(lease)
    assert counted(busy) == []


def test_what_changes_meanwhile_is_no_difference(busy: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recount, "EXTENTS_AT_A_TIME", 1)
    job = busy.state.recount_host()
    for token in range(100, 110):
        if job.step(busy.now) is not None:
            break
        busy.store_durably(busy.prompt(token, 60, 61))
    else:
        assert counted(busy, job) == []
    assert job.total > 3
    assert busy.state._ledger.on_host_change is None
    assert counted(busy) == []


def test_a_sum_that_is_wrong_and_a_slot_of_nobody_are_found(busy: Bench) -> None:
    ledger = busy.state._ledger
    (group,) = ledger.groups.values()
    group.host_slots += 1
    (found,) = counted(busy)
    assert (found.tier, found.what, found.group) == ("host", "slots", group.spec.group.hex())
    assert found.booked_bytes - found.counted_bytes == group.slot_bytes
    group.host_slots -= 1
    lost = ledger.pool.allocate(group.slot_bytes, 1)
    (found,) = counted(busy)
    assert (found.group, found.counted_bytes - found.booked_bytes) == ("", group.slot_bytes)
    ledger.pool.release(lost)
    assert counted(busy) == []
