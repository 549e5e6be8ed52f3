"""Nobody waits for another's mass eviction: it is done in slices, and between two of them requests are answered.

What is counted is the work of one turn, which must not grow with the number of extents.
"""

from __future__ import annotations

import gc

import pytest

from tests.core.simulation import make_group
from tierkv.core import tier_room
from tierkv.core.grants import Evicted
from tierkv.core.instructions import ExtentRow, Recovered, Remove, RemoveDone, Rows, TierHealth
from tierkv.core.state import CacheState, Limits

EXTENTS = 20_000
FILE_BYTES = 8_192
PAGE = 4_096
RECOVERED = Recovered(
    seconds=0.1,
    extents=EXTENTS,
    index_rows=EXTENTS,
    headers_read=0,
    quarantined=0,
    foreign=0,
    unknown_format=0,
    temp_removed=0,
    index_rebuilt=False,
)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture(scope="module")
def large() -> tuple[CacheState, bytes]:
    """Many extents of one block, on disk; and their group."""
    spec = make_group()
    limits = Limits(
        host_bytes=16 * PAGE,
        slab_bytes=PAGE,
        extent_bytes=PAGE,
        nvme_bytes=EXTENTS * FILE_BYTES,
        seal_after_seconds=5.0,
        session_bytes=1 << 30,
        inflight_writes=4,
        inflight_reads=4,
        page_bytes=PAGE,
    )
    gc.disable()  # as the front does while it loads
    state = CacheState(limits, [0] * 16)
    state.open_group(spec, 1.0)
    state.worker_started(1.0)
    rows = [
        ExtentRow(key_of(n), spec.group, 0, key_of(n), PAGE, FILE_BYTES, 0.0, float(n), 0)
        for n in range(1, EXTENTS + 1)
    ]
    for start in range(0, EXTENTS, 1_000):
        state.report(Rows(spec.identity.weights, spec.group, 0, rows[start : start + 1_000]), 1.0)
    state.report(RECOVERED, 1.0)
    state.report(TierHealth(writable=True, overhead_bytes=0, free_bytes=1 << 50), 1.0)
    gc.enable()
    return state, spec.group


@pytest.mark.scenario(
    "B151", then="of half of all extents no event evicts more than a slice, and what stays is found meanwhile"
)
def test_half_of_a_large_tier_goes_in_slices(large: tuple[CacheState, bytes]) -> None:
    state, group = large
    most = 2 * tier_room.EVICTIONS_AT_A_TIME  # an event of its own, and what is due after each
    evicted, now, removes = 0, 2.0, []
    effects = state.nvme_limit(EXTENTS // 2 * FILE_BYTES, now)
    for turn in range(2 * EXTENTS):
        slice_ = [effect for effect in effects if isinstance(effect, Evicted)]
        removes += [effect for effect in effects if isinstance(effect, Remove)]
        assert len(slice_) <= most, f"in turn {turn}"
        evicted += len(slice_)
        due = state.next_wakeup()
        if due is None or due > now:
            break
        assert state.match(group, key_of(EXTENTS - turn % 1_000)).blocks == 1, "what was used last is still there"
        effects = state.tick(now)
    assert evicted == EXTENTS // 2
    assert state.match(group, key_of(1)).blocks == 0
    for remove in removes:
        state.report(RemoveDone(remove.op), now)
    assert state.next_wakeup() is None or state.next_wakeup() > now  # type: ignore[operator]
