"""Two block sizes in one arena: neither starves beside what the other used longer ago, and nothing held is taken."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.grants import Committed, GroupSpec, Lease, Reservation
from tierkv.core.identity import Identity, Layout
from tierkv.core.instructions import OpFailed, Recovered, Write, WriteDone, Zero, Zeroed
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.purge_scope import OfTenant
from tierkv.core.purges import PurgeState
from tierkv.core.reasons import Reason
from tierkv.core.state import CacheState, Limits

PAGE = 4096
SLABS = 4
SLAB_PAGES = 4
SESSION = b"s" * 16
SMALL, LARGE = 1, 2  # pages of a block
RECOVERED = Recovered(
    seconds=0.0,
    extents=0,
    index_rows=0,
    headers_read=0,
    quarantined=0,
    foreign=0,
    unknown_format=0,
    temp_removed=0,
    index_rebuilt=False,
)


class Bench:
    """A core whose arena is four slabs, each of four small blocks or two large ones."""

    def __init__(self, *, nvme: bool = False, extent_pages: int = 2, large: int = LARGE) -> None:
        limits = Limits(
            host_bytes=SLABS * SLAB_PAGES * PAGE,
            slab_bytes=SLAB_PAGES * PAGE,
            extent_bytes=max(extent_pages, large) * PAGE,
            nvme_bytes=2**30 if nvme else 0,
            seal_after_seconds=10.0,
            session_bytes=2**40,
            inflight_writes=100,
            inflight_reads=1,
        )
        self.state = CacheState(limits, array("Q", bytes(SLABS * SLAB_PAGES * 8)))
        self.state.open_session(SESSION, 0.0)
        self.now = 0.0
        self.effects: list[object] = []
        self._grants = 0
        self.groups: dict[int, bytes] = {}
        for pages in (SMALL, LARGE):
            size = SMALL if pages == SMALL else large
            layout = Layout(dtype="u8", block_bytes=(size * PAGE,), axes="x", block_tokens=1, engine="fake")
            identity = Identity(weights="ab" * 32, config="", layout=layout)
            self.groups[pages] = identity.group_key()
            self.effects += self.state.open_group(GroupSpec(group=self.groups[pages], identity=identity), 0.0)
            self.state.session_opens(SESSION, self.groups[pages])
        if nvme:
            self.effects += self.state.worker_started(0.0)
            self.effects += self.state.report(RECOVERED, 0.0)

    def keys(self, pages: int, *tokens: int) -> bytes:
        return chain_keys(self.groups[pages], pack_tokens(tokens), 1)

    def _grant(self) -> bytes:
        self._grants += 1
        return self._grants.to_bytes(16, "little")

    def reserve(self, pages: int, *tokens: int) -> Reservation:
        self.now += 1.0
        answer, effects = self.state.reserve(
            grant=self._grant(),
            session=SESSION,
            holder=SESSION,
            group=self.groups[pages],
            rank=0,
            keys=self.keys(pages, *tokens),
            first=0,
            tokens=pack_tokens(tokens),
            now=self.now,
        )
        self.effects += effects
        self.state.check()
        assert isinstance(answer, Reservation)
        return answer

    def store(self, pages: int, *tokens: int) -> int:
        """Blocks that got a slot, and are visible now."""
        ticket = self.reserve(pages, *tokens)
        if ticket.offsets:
            answer, effects = self.state.commit(ticket.grant, self.now)
            self.effects += effects
            assert answer == Committed(len(ticket.offsets), 0)
        self.state.check()
        return len(ticket.offsets)

    def acquire(self, pages: int, *tokens: int) -> Lease:
        self.now += 1.0
        answer, effects = self.state.acquire(
            grant=self._grant(),
            session=SESSION,
            group=self.groups[pages],
            keys=self.keys(pages, *tokens),
            max_blocks=100,
            deadline=self.now,
            now=self.now,
        )
        self.effects += effects
        assert isinstance(answer, Lease)
        return answer

    def acquire_now(self, pages: int, *tokens: int) -> Lease | None:
        """None where it would have to be read from disk first."""
        match = self.state.match(self.groups[pages], self.keys(pages, *tokens))
        return self.acquire(pages, *tokens) if match.blocks == match.host_blocks else None

    def use_if_there(self, pages: int, *tokens: int) -> None:
        lease = self.acquire_now(pages, *tokens)
        if lease is not None:
            self.state.release(lease.grant, None, self.now)

    def use(self, pages: int, *tokens: int) -> None:
        self.state.release(self.acquire(pages, *tokens).grant, None, self.now)

    def cached(self, pages: int, *tokens: int) -> int:
        return self.state.match(self.groups[pages], self.keys(pages, *tokens)).blocks

    def write_all(self) -> None:
        """What was sealed gets onto NVMe."""
        writes = [effect for effect in self.effects if isinstance(effect, Write)]
        self.effects.clear()
        for write in writes:
            self.effects += self.state.report(WriteDone(write.op, 4096, 0.1), self.now)


def full_of_small() -> Bench:
    bench = Bench()
    for prompt in range(SLABS * SLAB_PAGES // 2):
        assert bench.store(SMALL, prompt, prompt + 100) == 2
    return bench


def test_a_size_that_comes_late_gets_what_the_other_used_longest_ago() -> None:
    bench = full_of_small()
    stored = [bench.store(LARGE, 1_000 + number) for number in range(6)]
    assert stored == [1] * 6
    assert [bench.cached(LARGE, 1_000 + number) for number in range(6)] == [1] * 6  # not one slab, over and over
    assert [bench.cached(SMALL, prompt, prompt + 100) for prompt in range(8)] == [0] * 6 + [2] * 2


def test_what_the_other_size_uses_more_is_not_taken_from_it() -> None:
    bench = full_of_small()
    for number in range(8):
        assert bench.store(LARGE, 1_000 + number) == 1
        for prompt in range(2, 8):
            bench.use(SMALL, prompt, prompt + 100)
    assert [bench.cached(SMALL, prompt, prompt + 100) for prompt in range(8)] == [0] * 2 + [2] * 6
    assert [bench.cached(LARGE, 1_000 + number) for number in range(8)] == [0] * 6 + [1] * 2


def test_room_that_is_made_ahead_is_shared_out_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.core.tickets.AHEAD_SHARE", 2)
    bench = full_of_small()
    for number in range(6):
        bench.store(LARGE, 1_000 + number)
        bench.effects += bench.state.make_ready(bench.now)
        bench.state.check()
    assert sum(bench.cached(LARGE, 1_000 + number) for number in range(6)) >= 4


def test_a_slab_goes_with_what_hangs_behind_it_and_the_one_with_which_least_goes() -> None:
    """Of one prompt that fills the arena only the last block is a leaf."""
    bench = Bench()
    assert bench.store(SMALL, *range(16)) == 16
    assert [bench.store(LARGE, 1_000 + number) for number in range(4)] == [1] * 4
    assert bench.cached(SMALL, *range(16)) == 8
    bench.use(LARGE, 1_000)
    lease = bench.acquire(SMALL, *range(5))
    assert bench.store(LARGE, 1_010, 1_011, 1_012, 1_013) == 4  # over its own: of the other size nothing is older
    assert bench.cached(SMALL, *range(16)) == 8
    bench.state.release(lease.grant, None, bench.now)


def test_what_hangs_behind_a_slab_leaves_other_slabs_as_well() -> None:
    bench = Bench(extent_pages=4)
    assert bench.store(SMALL, *range(4)) == 4
    held = [bench.reserve(SMALL, number) for number in range(100, 111)]
    assert bench.store(SMALL, *range(5)) == 1  # the last slot of the arena
    assert bench.store(LARGE, 1_000) == 1
    assert bench.cached(SMALL, *range(5)) == 0
    for ticket in held:
        bench.state.abort(ticket.grant, bench.now)
    bench.state.check()


def test_a_slab_with_a_leased_block_stays_and_another_one_goes() -> None:
    bench = full_of_small()
    lease = bench.acquire(SMALL, 0, 100)  # in the first slab
    assert bench.store(LARGE, 1_000) == 1
    assert bench.cached(SMALL, 0, 100) == 2
    (part,) = lease.parts
    assert list(part.generations) == [0, 0]
    bench.state.release(lease.grant, None, bench.now)


def test_a_slab_that_is_being_written_to_stays() -> None:
    bench = Bench()
    tickets = [bench.reserve(SMALL, number, *range(number * 10, number * 10 + 3)) for number in range(1, 5)]
    assert [len(ticket.offsets) for ticket in tickets] == [4] * 4
    assert bench.store(LARGE, 1_000) == 0
    for ticket in tickets[1:]:
        bench.state.abort(ticket.grant, bench.now)
    assert bench.store(LARGE, 1_000) == 1
    bench.state.abort(tickets[0].grant, bench.now)
    bench.state.check()


def test_a_slab_of_blocks_on_their_way_to_nvme_stays_until_they_are_there() -> None:
    bench = Bench(nvme=True)
    for prompt in range(8):
        assert bench.store(SMALL, prompt, prompt + 100) == 2
    assert bench.store(LARGE, 1_000) == 0
    bench.write_all()
    assert bench.store(LARGE, 1_000) == 1
    assert [bench.cached(SMALL, prompt, prompt + 100) for prompt in range(8)] == [2] * 8  # two are on NVMe only


def test_a_parent_stays_while_what_is_on_nvme_hangs_behind_it() -> None:
    """Else the child's file would be there for nothing. Here the parent's write has failed."""
    bench = Bench(nvme=True)
    assert bench.store(SMALL, *range(4)) == 4
    parent, child = [effect for effect in bench.effects if isinstance(effect, Write)]
    assert (parent.first_token, child.first_token) == (0, 2)
    bench.state.report(OpFailed(parent.op, Reason.IO_ERROR), bench.now)
    bench.state.report(WriteDone(child.op, 4096, 0.1), bench.now)
    others = [bench.reserve(SMALL, number, *range(number * 10, number * 10 + 3)) for number in range(1, 4)]
    assert bench.store(LARGE, 1_000) == 0
    assert bench.cached(SMALL, *range(4)) == 4
    for ticket in others:
        bench.state.abort(ticket.grant, bench.now)


def test_an_empty_slab_that_waits_for_its_rest_to_be_wiped_is_no_relief() -> None:
    """It would be taken, and taken again, without end."""
    bench = Bench(large=3)  # so that a page of a slab belongs to no block
    for number in range(4):
        assert bench.store(LARGE, number) == 1
    answer, effects = bench.state.start_purge(b"purge", OfTenant(""), bench.now)
    assert isinstance(answer, PurgeState)
    zeros = [effect for effect in effects if isinstance(effect, Zero)]
    tails = [zero for zero in zeros if any(size == PAGE for _, size in zero.ranges)]
    for zero in zeros:
        if zero not in tails:
            bench.state.report(Zeroed(zero.op), bench.now)
    assert bench.store(SMALL, *range(100, 108)) == 0  # more than what is being wiped would make room for
    for zero in tails:
        bench.state.report(Zeroed(zero.op), bench.now)
    assert bench.store(SMALL, *range(100, 108)) == 8


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "use", "hold", "let go", "reserve", "abort", "flush", "ahead"]),
        st.sampled_from([SMALL, LARGE]),
        st.integers(0, 5),  # which prompt
        st.integers(1, 6),  # how many blocks of it
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=STEPS, nvme=st.booleans(), large=st.integers(2, 4))
def test_sizes_that_share_an_arena_at_random_keep_the_books_and_what_is_held(
    steps: list[tuple[str, int, int, int]], nvme: bool, large: int
) -> None:
    bench = Bench(nvme=nvme, large=large)
    leases: list[Lease] = []
    tickets: list[Reservation] = []
    for step, pages, number, blocks in steps:
        prompt = [number * 100 + at for at in range(blocks)]
        if step == "store":
            bench.store(pages, *prompt)
        elif step == "use":
            bench.use_if_there(pages, *prompt)
        elif step == "hold":
            leases += [lease for lease in [bench.acquire_now(pages, *prompt)] if lease is not None and lease.blocks]
        elif step == "let go" and leases:
            bench.state.release(leases.pop(0).grant, None, bench.now)
        elif step == "reserve":
            tickets += [ticket for ticket in [bench.reserve(pages, *prompt)] if ticket.offsets]
        elif step == "abort" and tickets:
            bench.effects += bench.state.abort(tickets.pop(0).grant, bench.now)
        elif step == "flush" and nvme:
            bench.write_all()
        elif step == "ahead":
            bench.effects += bench.state.make_ready(bench.now)
        bench.state.check()
        for lease in leases:
            (part,) = lease.parts
            assert part.generations == bench.state._ledger.pool.generations(part.offsets), "taken from under a lease"
    held = {slot for ticket in tickets for slot in ticket.offsets}
    assert len(held) == sum(len(ticket.offsets) for ticket in tickets)
    for lease in leases:
        bench.state.release(lease.grant, None, bench.now)
    for ticket in tickets:
        bench.state.abort(ticket.grant, bench.now)
    bench.state.check()
