"""Tickets that no honest client asks for: they are refused, and nothing of them stays."""

from __future__ import annotations

from tests.core.simulation import Bench
from tierkv.core.grants import Lease, Refused, Reservation
from tierkv.core.reasons import Reason


def reserve(bench: Bench, keys: bytes, grant: bytes) -> Reservation | Refused:
    answer, effects = bench.state.reserve(
        grant=grant,
        session=b"engine",
        holder=b"engine",
        group=bench.spec.group,
        rank=0,
        keys=keys,
        first=0,
        tokens=b"",
        now=bench.now,
    )
    bench.absorb(effects)
    return answer


def test_keys_that_repeat_are_no_chain_and_get_no_slots() -> None:
    bench = Bench(host_slots=8)
    keys = bench.prompt(1, 2).keys
    assert reserve(bench, keys[:32] * 3, b"a grant") == Refused(Reason.KEY_MISMATCH)
    assert reserve(bench, keys + keys, b"another") == Refused(Reason.KEY_MISMATCH)
    assert bench.host_used() == 0
    bench.absorb(bench.state.abort(b"a grant", bench.now))
    bench.absorb(bench.state.end_session(b"engine", bench.now))


def test_a_grant_is_one_thing_only() -> None:
    """The blocks of a lease are held under its id: the end of a ticket of the same id would let go of them."""
    bench = Bench(host_slots=8, nvme_bytes=0)
    prompt, other = bench.prompt(1, 2), bench.prompt(3, 4)
    bench.store(prompt)
    lease = bench.load(prompt)
    assert bench.reserve(bench.prompt(1, 2, 5), grant=lease.grant) == Refused(Reason.GRANT_ENDED)
    bench.release(lease)
    ticket = bench.reserve(other, grant=b"ticket")
    assert isinstance(ticket, Reservation)
    answer, effects = bench.state.acquire(
        grant=b"ticket",
        session=b"engine",
        group=prompt.group,
        keys=prompt.keys,
        max_blocks=2,
        deadline=bench.now,
        now=bench.now,
    )
    bench.absorb(effects)
    assert answer == Refused(Reason.GRANT_ENDED)
    assert not isinstance(answer, Lease)


def test_a_grant_id_that_comes_again_for_another_store_gets_no_slots_of_the_first() -> None:
    bench = Bench(host_slots=8, nvme_bytes=0, ranks=2)
    mine, other = bench.prompt(1, 2), bench.prompt(3, 4)
    bench.state.open_session(b"another", bench.now)
    ticket = bench.reserve(mine, grant=b"ticket")
    assert isinstance(ticket, Reservation)
    assert bench.reserve(mine, grant=b"ticket") == ticket
    for again in (
        bench.reserve(other, grant=b"ticket"),
        bench.reserve(mine, grant=b"ticket", rank=1),
        bench.reserve(mine, grant=b"ticket", first=1),
        bench.reserve(mine, grant=b"ticket", session=b"another"),
    ):
        assert again == Refused(Reason.GRANT_ENDED)
    bench.absorb(bench.state.abort(ticket.grant, bench.now))
    assert bench.host_used() == 0


def test_the_end_of_the_one_who_asked_leaves_the_holder_its_slots_and_that_of_the_holder_frees_them() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    for session in (b"asker", b"holder"):
        bench.state.open_session(session, bench.now)
    prompt = bench.prompt(1, 2)
    answer, effects = bench.state.reserve(
        grant=b"ticket",
        session=b"asker",
        holder=b"holder",
        group=prompt.group,
        rank=0,
        keys=prompt.keys,
        first=0,
        tokens=prompt.tokens_from(0),
        now=bench.now,
    )
    bench.absorb(effects)
    assert isinstance(answer, Reservation)
    bench.absorb(bench.state.end_session(b"asker", bench.now))
    assert (bench.state.num_tickets, bench.host_used()) == (1, 2)
    bench.absorb(bench.state.end_session(b"holder", bench.now))
    assert (bench.state.num_tickets, bench.host_used()) == (0, 0)
