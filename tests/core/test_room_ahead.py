"""Room for the next reservation, made while nobody waits for it."""

from __future__ import annotations

from array import array

import pytest

from tierkv.core import tickets
from tierkv.core.grants import Committed, Evicted, GroupSpec, Reservation
from tierkv.core.identity import Identity, Layout
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.ledger import Effect
from tierkv.core.state import CacheState, Limits

PAGE = 4096
SLOTS = 2 * tickets.AHEAD_SHARE
SESSION = b"s" * 16
IDENTITY = Identity(
    weights="ab" * 32,
    config="",
    layout=Layout(dtype="u8", block_bytes=(PAGE,), axes="x", block_tokens=1, engine="fake"),
)
GROUP = IDENTITY.group_key()


def make_state(slots: int) -> CacheState:
    limits = Limits(
        host_bytes=slots * PAGE,
        slab_bytes=2 * PAGE,
        extent_bytes=2 * PAGE,
        nvme_bytes=0,
        seal_after_seconds=10.0,
        session_bytes=2**40,
        inflight_writes=1,
        inflight_reads=1,
    )
    state = CacheState(limits, array("Q", bytes(slots * 8)))
    state.open_group(GroupSpec(group=GROUP, identity=IDENTITY), 0.0)
    state.open_session(SESSION, 0.0)
    return state


def store(state: CacheState, number: int, blocks: int) -> list[Effect]:
    """Reserve and commit a prompt of its own; the effects of the reservation."""
    tokens = pack_tokens(range(number * 1000, number * 1000 + blocks))
    grant = number.to_bytes(16, "little")
    answer, effects = state.reserve(
        grant=grant,
        session=SESSION,
        holder=SESSION,
        group=GROUP,
        rank=0,
        keys=chain_keys(GROUP, tokens, 1),
        first=0,
        tokens=tokens,
        now=float(number),
    )
    assert isinstance(answer, Reservation)
    assert state.commit(grant, float(number))[0] == Committed(len(answer.offsets), 0)
    state.check()
    return effects


def evicted(effects: list[Effect]) -> int:
    return sum(effect.blocks for effect in effects if isinstance(effect, Evicted))


def test_a_reservation_like_the_last_one_finds_room_that_was_made_before() -> None:
    state = make_state(SLOTS)
    for number in range(SLOTS // 2):
        store(state, number, 2)
    assert state.has_idle_work
    assert evicted(state.make_ready(500.0)) == 2
    state.check()
    assert not state.has_idle_work
    assert state.make_ready(500.0) == []
    assert evicted(store(state, 900, 2)) == 0


@pytest.mark.scenario("B212", then="at the limit 300 stores find their room made before; none pays for an eviction")
def test_at_the_limit_no_store_evicts_while_it_is_asked_for() -> None:
    state = make_state(SLOTS)
    for number in range(SLOTS // 2 + 300):
        assert evicted(store(state, number, 2)) == 0
        state.make_ready(float(number))
    assert state.tiers()[0].used_bytes == (SLOTS - 2) * PAGE


def test_no_more_is_made_than_a_small_share_of_host_memory() -> None:
    state = make_state(SLOTS)
    store(state, 1, SLOTS)
    assert evicted(state.make_ready(2.0)) == SLOTS // tickets.AHEAD_SHARE
    tiny = make_state(8)
    store(tiny, 1, 8)
    assert tiny.make_ready(2.0) == []


def test_nothing_is_evicted_ahead_while_there_is_room() -> None:
    state = make_state(SLOTS)
    store(state, 1, SLOTS - 2)
    assert state.make_ready(2.0) == []


def test_what_a_ticket_is_writing_or_a_lease_reading_is_not_made_room_of() -> None:
    state = make_state(SLOTS)
    store(state, 1, SLOTS)
    tokens = pack_tokens(range(1000, 1000 + SLOTS))
    state.acquire(
        grant=b"g" * 16,
        session=SESSION,
        group=GROUP,
        keys=chain_keys(GROUP, tokens, 1),
        max_blocks=SLOTS,
        deadline=9.0,
        now=3.0,
    )
    assert state.make_ready(4.0) == []
    state.check()
