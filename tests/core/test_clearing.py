"""Clearing a tenant's data in the middle of its transfers: what comes late publishes nothing and takes nothing away."""

from __future__ import annotations

import pytest

from tests.core.simulation import Bench
from tierkv.core.grants import Refused, Reservation
from tierkv.core.purge_scope import OfTenant
from tierkv.core.purges import PurgePhase, PurgeState
from tierkv.core.reasons import Reason


def clear(bench: Bench, purge: bytes = b"purge") -> PurgeState:
    answer, effects = bench.state.start_purge(purge, OfTenant(""), bench.now)
    bench.absorb(effects)
    assert isinstance(answer, PurgeState)
    return answer


@pytest.mark.scenario(
    "B078",
    then="the blocks of a store that was under way are a miss, its late commit is refused as purged, and what others "
    "stored in the meantime is right; the answer tells how many blocks went and how many tickets still hold some",
)
@pytest.mark.parametrize("nvme_bytes", [0, 1 << 30])
def test_a_store_that_was_under_way_when_its_tenant_was_cleared_publishes_nothing(nvme_bytes: int) -> None:
    bench = Bench(host_slots=6, nvme_bytes=nvme_bytes)
    there, under_way = bench.prompt(1, 2), bench.prompt(3, 4)
    bench.store(there)
    ticket = bench.reserve(under_way)
    assert isinstance(ticket, Reservation)
    bench.fill(under_way, ticket)
    receipt = clear(bench)
    assert (receipt.about.blocks, receipt.tickets) == (2, 1)
    assert bench.match(there) == bench.match(under_way) == (0, 0)
    new = bench.store(under_way)  # others may store the same blocks, in other slots
    assert set(new.offsets).isdisjoint(ticket.offsets)
    bench.arena.write(ticket.offsets, ["late", "late"])
    assert bench.commit(ticket) == Refused(Reason.PURGED)
    assert bench.commit(ticket) == Refused(Reason.PURGED)
    assert bench.match(under_way) == (2, 2)
    bench.release(bench.load(under_way))
    bench.work()
    bench.tick(100.0)
    bench.work()
    done = bench.state.purge_progress(b"purge")
    assert done is not None
    assert (done.phase, done.tickets, done.held_bytes) == (PurgePhase.GONE, 0, 0)
    assert bench.match(under_way)[0] == 2
    bench.release(bench.load(under_way))
