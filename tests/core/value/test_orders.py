"""Orders of eviction, held against each other and against the slow way to say the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.simulation import PAGE, make_group
from tests.core.test_ghosts import ghost_of
from tierkv.core.extent import Extent
from tierkv.core.grants import Evicted, Lease, Reservation, Waiting
from tierkv.core.keys import chain_keys, pack_tokens
from tierkv.core.state import CacheState, Limits
from tierkv.core.value.density import ALL_ALIKE, Density
from tierkv.core.value.hazards import Hazards, bucket_end
from tierkv.core.value.policies import ONE_KIND, order_of
from tierkv.core.value.tuning import AS_MEASURED

YOUNGEST_ADVANTAGE = AS_MEASURED.youngest_advantage
POLICIES = ["density", "lru", "arc", "gdsf", "literal"]


class Flat:
    """Every block saves the same."""

    def seconds_per_byte(self, extent: Extent) -> float:
        return 1.0

    def seconds_per_byte_at(self, extent: Extent, index: int) -> float:
        return 1.0

    def prefix_tokens(self, extent: Extent, index: int) -> int:
        return extent.first_token + index + 1


class Learnt(Hazards):
    """As if it had learnt what is said here: uses a second, by kind; fewer with age."""

    def __init__(self, rates: dict[int, float]) -> None:
        super().__init__()
        self.rates = rates

    @property
    def has_learnt(self) -> bool:
        return True

    def index(self, kind: int, age: float) -> float:
        return self.rates.get(kind, 1.0)

    def index_in(self, kind: int, bucket: int) -> float:
        return self.index(kind, bucket_end(bucket - 1) if bucket else 0.0)


def extent_of(number: int, *, used: float = 0.0, kind: int = 0, hits: int = 0, orphan: bool = False) -> Extent:
    key = number.to_bytes(32, "big")
    parent = b"p" * 32 if orphan else b"g" * 32
    extent = Extent(group=b"g" * 32, key=key, parent=parent, first_token=0, ranks=1, created=used)
    extent.num_blocks = extent.hot_blocks = 1
    extent.kind, extent.hits = kind, hits
    return extent


# ---- each order by itself


@pytest.mark.parametrize("policy", [*POLICIES, ONE_KIND])
def test_an_order_gives_back_each_extent_once_and_orphans_first(policy: str) -> None:
    order = order_of(policy, Hazards(), Flat())()
    extents = [extent_of(number, used=float(number)) for number in range(5)]
    orphan = extent_of(9, used=100.0, orphan=True)
    for extent in [*extents, orphan]:
        order.offer(extent, 0)
    order.offer(extents[3], 0)
    order.withdraw(extents[2])
    order.withdraw(extent_of(77))
    assert orphan in order
    assert extents[2] not in order
    victims = []
    while (cheapest := order.cheapest(200.0)) is not None:
        victim = order.next_victim(200.0)
        assert victim is not None
        assert order.rank(victim, 0, 200.0) >= cheapest  # the clock of gdsf has gone on
        assert order.pop(200.0) is victim
        victims.append(victim)
    assert victims[0] is orphan
    assert set(victims[1:]) == {extents[0], extents[1], extents[3], extents[4]}
    assert order.pop(200.0) is None
    assert order.next_victim(200.0) is None


def test_an_orphan_goes_first_although_it_became_one_while_it_was_offered() -> None:
    order = Density(Learnt({0: 1.0}), Flat())
    first, second = extent_of(1, used=1.0), extent_of(2, used=2.0)
    order.offer(first, 0)
    order.offer(second, 0)
    assert order.next_victim(3.0) is first
    second.parent = b"p" * 32
    order.offer(second, 0)
    assert order.next_victim(3.0) is second


def test_the_kind_that_comes_back_least_goes_first_though_it_was_used_last() -> None:
    order = Density(Learnt({0: 5.0, 4: 1.0}), Flat())
    often, seldom = extent_of(1, used=1.0, kind=0), extent_of(2, used=9.0, kind=4)
    for extent in (often, seldom):
        order.offer(extent, 0)
    assert order.cheapest(10.0) == (True, 1.0)
    assert order.pop(10.0) is seldom
    assert order.pop(10.0) is often


def test_within_a_kind_the_youngest_goes_when_it_is_clearly_the_cheapest() -> None:
    class Cyclic(Learnt):
        """Nothing comes back before it is 100 s old."""

        young = 0.5

        def index(self, kind: int, age: float) -> float:
            return self.young if age < 50 else 1.0

    hazards = Cyclic({})
    order = Density(hazards, Flat())
    old, young = extent_of(1, used=0.0), extent_of(2, used=90.0)
    for extent in (old, young):
        order.offer(extent, 0)
    assert order.next_victim(100.0) is young
    hazards.young = 0.99 / YOUNGEST_ADVANTAGE
    hazards.version += 1
    assert order.next_victim(100.0) is young
    hazards.young = 1.01 / YOUNGEST_ADVANTAGE
    hazards.version += 1
    assert order.next_victim(100.0) is old


def test_what_is_new_is_refused_where_it_is_clearly_worth_less_than_the_next_victim() -> None:
    order = Density(Learnt({4: 0.5}), Flat())
    order.offer(extent_of(1, kind=0), 0)
    cheapest = order.cheapest(1.0)
    assert cheapest is not None
    assert order.rank_of_new(4, 1.0) == (True, 0.5 * YOUNGEST_ADVANTAGE) < cheapest
    assert (order.rank_of_new(0, 1.0) or cheapest) > cheapest
    assert Density(Hazards(), Flat()).rank_of_new(4, 1.0) is None, "nothing is refused before there is data"
    assert Density(Learnt({4: 0.5}), Flat(), ALL_ALIKE).rank_of_new(4, 1.0) is None


def test_a_block_that_saves_more_for_its_bytes_stays() -> None:
    class ByKind(Flat):
        """Extents of one model cost twice as much to compute, for the same bytes."""

        def seconds_per_byte(self, extent: Extent) -> float:
            return 1.0 + extent.hits

        def seconds_per_byte_at(self, extent: Extent, index: int) -> float:
            return 1.0 + index

    order = Density(Learnt({}), ByKind())
    dear, cheap = extent_of(1, used=0.0, kind=2, hits=1), extent_of(2, used=5.0)
    order.offer(dear, 0)
    order.offer(cheap, 0)
    assert order.pop(10.0) is cheap
    by_position = order_of("gdsf", Hazards(), ByKind())()
    deep, shallow = extent_of(1, used=0.0), extent_of(2, used=5.0)
    deep.num_blocks = deep.hot_blocks = 4
    by_position.offer(deep, 3)
    by_position.offer(shallow, 0)
    assert by_position.pop(10.0) is shallow


class Priced(Flat):
    """What one extent saves is another's several times over."""

    def __init__(self) -> None:
        self.prices: dict[Extent, float] = {}

    def seconds_per_byte(self, extent: Extent) -> float:
        return self.prices[extent]

    def seconds_per_byte_at(self, extent: Extent, index: int) -> float:
        return self.prices[extent]


@pytest.mark.parametrize("policy", ["density", "gdsf"])
def test_a_model_that_turns_out_to_be_slow_to_compute_stays(policy: str) -> None:
    savings = Priced()
    order = Density(Learnt({}), savings) if policy == "density" else order_of(policy, Hazards(), savings)()
    slow, fast, other = extent_of(1, used=0.0, kind=2), extent_of(2, used=5.0), extent_of(3, used=5.0, kind=3)
    savings.prices = {slow: 1.0, fast: 2.0, other: 50.0}
    for extent in (slow, fast):
        order.offer(extent, 0)
    assert order.next_victim(10.0) is slow
    savings.prices[slow] = 4.0
    order.repriced()
    order.offer(other, 0)
    assert order.pop(10.0) is fast
    assert order.pop(10.0) is slow


def test_greedy_dual_reckons_a_million_anew_in_slices_with_the_clock_that_they_were_offered_at() -> None:
    savings = Priced()
    order = order_of("gdsf", Hazards(), savings)()
    old = [extent_of(number) for number in range(100)]
    savings.prices = dict.fromkeys(old, 1.0)
    for extent in old:
        order.offer(extent, 0)
    gone = order.pop(1.0)  # the clock is at 1 now
    late = extent_of(200)
    savings.prices = dict.fromkeys([*old, late], 10.0)
    order.repriced()
    order.offer(late, 0)
    changed = [extent for extent in old if extent is not gone]
    for number in range(300, 320):
        extent = extent_of(number)
        savings.prices[extent] = 10.0
        order.offer(extent, 0)
    popped = []
    while (cheapest := order.cheapest(2.0)) is not None and cheapest[1] <= 10.0:
        popped.append(order.pop(2.0))
    assert set(popped) == set(changed), "offered at 0, so worth 10; what came later 11"
    assert late in order


def test_greedy_dual_lets_what_is_hit_often_age() -> None:
    order = order_of("gdsf", Hazards(), Flat())()
    favourite = extent_of(0, hits=3)
    order.offer(favourite, 0)
    for number in range(1, 4):
        order.offer(extent_of(number), 0)
        assert order.pop(1.0) is not favourite
    for number in range(4, 20):
        order.offer(extent_of(number), 0)
        if order.pop(1.0) is favourite:
            break
    assert favourite not in order


def test_tokens_times_rate_keeps_the_long_prefix_until_its_rate_has_faded() -> None:
    order = order_of("literal", Hazards(), Flat())()
    long, short = extent_of(1, used=0.0), extent_of(2, used=299.0)
    long.first_token = 1
    order.offer(long, 0)
    order.offer(short, 0)
    assert order.pop(300.0) is short
    order.offer(extent_of(3, used=301.0), 0)
    assert order.pop(302.0) is long


def test_arc_moves_its_border_towards_what_was_regretted() -> None:
    order = order_of("arc", Hazards(), Flat())()
    once = [extent_of(number, used=float(number)) for number in range(3)]
    again = [extent_of(number, used=float(number - 10), hits=1) for number in range(3, 6)]
    for extent in [*once, *again]:
        order.offer(extent, 0)
    assert order.next_victim(10.0) is once[0]
    order.regretted(ghost_of(0, 4))
    assert order.next_victim(10.0) is again[0]
    order.regretted(ghost_of(0, 4, hits=1))
    assert order.next_victim(10.0) is once[0]


# ---- a victim chosen quickly is the one that looking at all would choose


@dataclass
class Slow:
    """Density as it is defined: all leaves are looked at each time."""

    hazards: Hazards
    offers: dict[Extent, tuple[int, int]]

    def cheapest(self, now: float) -> float:
        by_kind: dict[int, list[tuple[float, int, Extent]]] = {}
        for extent, (number, index) in self.offers.items():
            by_kind.setdefault(extent.kind_at(index), []).append((extent.used_at(index), number, extent))
        ranks = []
        for kind, leaves in by_kind.items():
            ranks.append(self.hazards.index(kind, now - min(leaves)[0]))
            ranks.append(self.hazards.index(kind, now - max(leaves)[0]) * YOUNGEST_ADVANTAGE)
        return min(ranks)


STEPS = st.lists(
    st.tuples(st.sampled_from(["offer", "offer", "withdraw", "pop", "learn", "wait"]), st.integers(0, 9)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_the_quick_choice_is_the_choice_of_looking_at_all(steps: list[tuple[str, int]]) -> None:
    hazards = Hazards()
    hazards.request(0.0)
    order = Density(hazards, Flat())
    slow = Slow(hazards, {})
    extents = [extent_of(number) for number in range(10)]
    now = 0.0

    def learn() -> None:
        for kind in range(3):
            hazards.begin(kind, now, 50.0 * kind)
            hazards.end(kind, max(0.0, now - 5 * kind), now, 40.0)
        for _ in range(250):
            hazards.request(now)

    learn()
    for turn, (step, which) in enumerate(steps):
        extent = extents[which]
        match step:
            case "offer":
                extent.kind, extent.last_used = which % 3, now
                order.offer(extent, 0)
                slow.offers[extent] = turn, 0
            case "withdraw":
                order.withdraw(extent)
                slow.offers.pop(extent, None)
            case "pop" if slow.offers:
                victim = order.pop(now)
                assert victim is not None
                del slow.offers[victim]
            case "learn":
                learn()
            case _:
                now += 3.0**which / 10
        assert set(slow.offers) == {extent for extent in extents if extent in order}
        if slow.offers:
            assert order.cheapest(now) == (True, pytest.approx(slow.cheapest(now)))


# ---- with one kind, last use decides, on any trace


Ask = tuple[list[int], float]


def play(policy: str, asks: list[Ask], *, nvme_pages: int) -> list[Any]:
    """What is answered and evicted, in order."""
    spec = make_group()
    limits = Limits(
        host_bytes=6 * PAGE,
        slab_bytes=PAGE,
        extent_bytes=2 * PAGE,
        nvme_bytes=nvme_pages * PAGE,
        seal_after_seconds=5.0,
        session_bytes=1 << 30,
        inflight_writes=4,
        inflight_reads=4,
        page_bytes=PAGE,
        policy=policy,
    )
    state = CacheState(limits, [0] * 6)
    state.open_session(b"s", 0.0)
    state.open_group(spec, 0.0)
    told: list[Any] = []
    now = 0.0
    for number, (tokens, pause) in enumerate(asks):
        now += pause
        keys = chain_keys(spec.group, pack_tokens(tokens), 1)
        read, write = b"r%d" % number, b"w%d" % number
        lease, effects = state.acquire(
            grant=read, session=b"s", group=spec.group, keys=keys, max_blocks=9, deadline=now, now=now
        )
        assert isinstance(lease, Lease | Waiting)
        ticket, more = state.reserve(
            grant=write, session=b"s", holder=b"s", group=spec.group, rank=0, keys=keys, first=0,
            tokens=pack_tokens(tokens), now=now,
        )  # fmt: skip
        assert isinstance(ticket, Reservation)
        effects += more
        if ticket.offsets:
            effects += state.commit(write, now)[1]
        effects += state.release(read, None, now)
        told += [lease, ticket.states]
        told += [(e.key, e.blocks, e.tier) for e in effects if isinstance(e, Evicted)]
        state.check()
    return told


ASKS = st.lists(
    st.tuples(
        st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 2), st.integers(1, 4)),
        st.sampled_from([0.0, 0.1, 1.0, 7.0, 90.0]),
    ),
    max_size=80,
)


@settings(max_examples=60, deadline=None)
@given(ASKS)
def test_with_one_kind_density_is_last_use_to_the_digit(
    asks: list[tuple[tuple[int, int, int, int], float]],
) -> None:
    trace = [([root, branch, leaf, 7][:length], pause) for (root, branch, leaf, length), pause in asks]
    assert play(ONE_KIND, trace, nvme_pages=0) == play("lru", trace, nvme_pages=0)


def test_before_there_is_data_density_is_last_use() -> None:
    trace: list[Ask] = [([number % 5, number], 1.0) for number in range(15)]
    assert play("density", trace, nvme_pages=0) == play("lru", trace, nvme_pages=0)


def test_with_data_density_is_something_else() -> None:
    trace: list[Ask] = [([number % 3] if number % 2 else [number, 1, 2, 3], 1.0) for number in range(200)]
    assert play("density", trace, nvme_pages=0) != play("lru", trace, nvme_pages=0)
