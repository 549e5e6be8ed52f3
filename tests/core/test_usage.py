"""What operators are told of the tiers."""

from __future__ import annotations

from tests.core.simulation import PAGE, Bench
from tierkv.core.instructions import TierHealth


def test_room_for_growth_is_no_more_than_what_is_left() -> None:
    bench = Bench(host_slots=8, nvme_bytes=20 * PAGE)
    bench.store_durably(bench.prompt(1, 2))
    used = bench.state.tiers()[1].used_bytes
    for overhead, growth in ((8 * PAGE, 4 * PAGE), (20 * PAGE, 16 * PAGE)):
        bench.absorb(bench.state.report(TierHealth(True, overhead, 1 << 30, growth_bytes=growth), bench.now))
        nvme = bench.state.tiers()[1]
        assert overhead - growth <= nvme.overhead_bytes <= overhead
        assert nvme.used_bytes + nvme.reserved_bytes + nvme.overhead_bytes <= nvme.capacity_bytes
        bench.work()
    assert bench.state.tiers()[1].used_bytes < used, "extents go, so that there is room to grow"
    assert bench.state.tiers()[1].overhead_bytes == 20 * PAGE
