"""Counters count what happened, once, and never go back, whatever becomes of a request."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields
from typing import Any

import pytest

from tests.core.simulation import Bench
from tests.test_metrics import samples
from tierkv.core.counters import Counters
from tierkv.core.grants import Lease, Reservation, Waiting
from tierkv.core.instructions import Read, Write
from tierkv.core.reasons import Reason
from tierkv.metrics import Snapshot


def flat(counts: Counters) -> Counter[tuple[str, Any]]:
    values: Counter[tuple[str, Any]] = Counter()
    for one in fields(counts):
        value = getattr(counts, one.name)
        if isinstance(value, Counter):
            values.update({(one.name, label): count for label, count in value.items()})
        else:
            values[one.name, None] = value
    return values


@pytest.mark.scenario("B241", then="a request that is sent again counts once, and one that fails counts what it got")
def test_a_lease_counts_once_however_often_it_is_asked_for() -> None:
    bench = Bench(host_slots=8, extent_blocks=1)
    prompt = bench.prompt(1, 2, 3, 4)
    bench.store_durably(prompt)
    bench.disk.damage((prompt.group, 0, prompt.key(2)), 0)
    bench.start()
    lease = bench.acquire(prompt)
    assert isinstance(lease, Waiting)
    for _ in range(3):  # lost replies: the same grant again
        answer, effects = bench.state.acquire(
            grant=f"grant {bench.numbers}".encode(),
            session=b"engine",
            group=prompt.group,
            keys=prompt.keys,
            holders=((0, b"engine"),),
            max_blocks=9,
            deadline=bench.now + 10,
            now=bench.now,
        )
        bench.absorb(effects)
        assert isinstance(answer, Waiting)
    bench.work()
    counts = bench.state.counts
    assert counts.asked_tokens == 4
    assert counts.hit_tokens == {"host": 0, "nvme": 2}
    assert counts.leases == 1


@pytest.mark.scenario("B241", then="in 2,000 random steps no counter goes back; the export parses and adds up")
@pytest.mark.parametrize("seed", range(4))
def test_no_counter_ever_goes_back(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(host_slots=6, nvme_bytes=40 * 4096, extent_blocks=2)
    before = flat(bench.state.counts)
    open_tickets: list[tuple[Any, Reservation]] = []
    for _ in range(500):
        prompt = bench.prompt(rng.randrange(6), *range(rng.randrange(1, 4)))
        match rng.randrange(8):
            case 0 | 1:
                ticket = bench.reserve(prompt)
                if isinstance(ticket, Reservation) and ticket.offsets:
                    bench.fill(prompt, ticket)
                    open_tickets.append((prompt, ticket))
            case 2 if open_tickets:
                bench.commit(open_tickets.pop(rng.randrange(len(open_tickets)))[1])
            case 3 if open_tickets:
                _, ticket = open_tickets.pop(rng.randrange(len(open_tickets)))
                bench.absorb(bench.state.abort(ticket.grant, bench.now))
            case 4 | 5:
                lease = bench.acquire(prompt)
                if isinstance(lease, Waiting):
                    for op in list(bench.worker.runnable()):
                        fails = rng.random() < 0.3
                        bench.worker.run(op, Reason.IO_ERROR if fails and isinstance(op, Read | Write) else None)
                    bench.hear()
                    bench.tick(20.0)
                    lease = bench.ready()
                if isinstance(lease, Lease):
                    bench.release(lease)
            case 6:
                bench.seal(prompt)
                bench.work()
            case _:
                bench.tick(rng.random() * 10)
        now = flat(bench.state.counts)
        assert all(now[name] >= count for name, count in before.items())
        assert sum(bench.state.counts.hit_tokens.values()) <= bench.state.counts.asked_tokens
        before = now
    counts = bench.state.counts
    seen = samples(Snapshot(version="1", core=counts))
    assert seen["tierkv_asked_tokens_total", ()] == counts.asked_tokens > 0
    assert seen["tierkv_missed_tokens_total", ()] == counts.asked_tokens - sum(counts.hit_tokens.values())
