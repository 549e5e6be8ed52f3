"""What happens by itself as time passes."""

from __future__ import annotations

from array import array

from tierkv.core.grants import Committed, GroupSpec
from tierkv.core.identity import Identity, Layout
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.state import CacheState, Limits

PAGE = 4096
SESSION = b"s" * 16
IDENTITY = Identity("ab" * 32, "", Layout("u8", (PAGE,), "x", 1, "fake"))
GROUP = IDENTITY.group_key()


def make_state() -> CacheState:
    limits = Limits(
        host_bytes=8 * PAGE,
        slab_bytes=PAGE,
        extent_bytes=4 * PAGE,
        nvme_bytes=0,
        seal_after_seconds=10.0,
        session_bytes=2**40,
        inflight_writes=1,
        inflight_reads=4,
    )
    state = CacheState(limits, array("Q", bytes(8 * 8)))
    state.open_session(SESSION, 0.0)
    return state


def store_block(state: CacheState, tokens: list[int], now: float) -> None:
    packed = pack_tokens(tokens)
    keys = chain_keys(GROUP, packed, 1)
    grant = bytes(tokens).ljust(16, b"\xff")
    state.reserve(
        grant=grant,
        session=SESSION,
        holder=SESSION,
        group=GROUP,
        rank=0,
        keys=keys,
        first=len(tokens) - 1,
        tokens=packed[-4:],
        now=now,
    )
    assert state.commit(grant, now)[0] == Committed(1, 0)


def num_growing(state: CacheState) -> int:
    return len(state._ledger.unsealed)


def test_an_extent_is_sealed_when_it_has_not_grown_for_a_while_and_the_next_wakeup_says_when() -> None:
    state = make_state()
    state.open_group(GroupSpec(group=GROUP, identity=IDENTITY), 0.0)
    store_block(state, [1], 0.0)
    store_block(state, [2], 4.0)
    assert state.next_wakeup() == 10.0
    store_block(state, [1, 3], 2.0)  # growth puts it off
    assert state.next_wakeup() == 12.0
    state.tick(12.0)
    assert num_growing(state) == 1
    assert state.next_wakeup() == 14.0
    state.tick(14.0)
    assert num_growing(state) == 0
    assert state.next_wakeup() is None
    state.check()


def test_a_slow_writer_is_waited_for_four_times_its_own_interval() -> None:
    state = make_state()
    state.open_group(GroupSpec(group=GROUP, identity=IDENTITY), 0.0)
    store_block(state, [1], 0.0)
    store_block(state, [1, 2], 9.0)
    state.tick(9.0 + 35.9)
    assert num_growing(state) == 1
    state.tick(9.0 + 36.0)
    assert num_growing(state) == 0
