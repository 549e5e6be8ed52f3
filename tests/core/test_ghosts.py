"""What is remembered of blocks that no tier has any more: noted when they go, regretted when asked for, bounded."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.core.simulation import Bench, split
from tierkv.core.extent import Extent
from tierkv.core.ghosts import Ghost, Ghosts
from tierkv.core.grants import Evicted, Lease, Regretted
from tierkv.core.purge_scope import OfPrefix, OfTenant
from tierkv.core.reasons import Reason
from tierkv.core.value.cost import prefill_seconds
from tierkv.core.value.kinds import kind_of_used
from tierkv.core.value.reuse import Piece, Reuse
from tierkv.core.value.tuning import AS_MEASURED

GROUP = b"g" * 32
KEYS = [bytes([number]) * 32 for number in range(20)]


def ghost_of(start: int, stop: int, *, hits: int = 0, group: bytes = GROUP) -> Ghost:
    return Ghost(
        group=group,
        key=KEYS[start],
        keys=b"".join(KEYS[start:stop]),
        blocks=stop - start,
        first_token=start * 16,
        block_tokens=16,
        hits=hits,
        last_used=1.0,
        last_cached_use=1.0,
        evicted_at=2.0,
        tier="host",
        reason=Reason.EVICTED,
    )


def found(bench: Bench) -> list[Ghost]:
    return list(bench.state._ledger.ghosts)


def regrets(bench: Bench) -> list[Regretted]:
    return [notice for notice in bench.notices if isinstance(notice, Regretted)]


# ---- the records by themselves


def test_blocks_that_go_one_by_one_from_the_end_become_one_ghost() -> None:
    ghosts = Ghosts(10)
    ghosts.note(ghost_of(7, 8))
    ghosts.note(ghost_of(6, 7), KEYS[7])
    ghosts.note(ghost_of(4, 6), KEYS[6])
    assert list(ghosts) == [ghost_of(4, 8)]


def test_blocks_that_were_used_otherwise_stay_apart() -> None:
    ghosts = Ghosts(10)
    ghosts.note(ghost_of(6, 8))
    ghosts.note(ghost_of(4, 6, hits=3), KEYS[6])
    assert list(ghosts) == [ghost_of(6, 8), ghost_of(4, 6, hits=3)]


def test_each_that_comes_or_goes_is_told_whatever_it_was_for() -> None:
    draw, ghosts = random.Random(6), Ghosts(5)
    told: Counter[Ghost] = Counter()

    def change(ghost: Ghost, sign: int) -> None:
        told[ghost] += sign

    ghosts.on_change = change
    for step in range(3_000):
        start = draw.randrange(19)
        match draw.randrange(8):
            case 0:
                for stretch in ghosts.claim(GROUP, KEYS[start : draw.randrange(start + 1, 21)]):
                    if draw.random() < 0.5:
                        ghosts.put_back(stretch.ghost)
            case 1:
                ghosts.forget(frozenset({GROUP}) if draw.random() < 0.5 else frozenset({b"x" * 32}))
            case _:
                ghost = replace(ghost_of(start, start + 1), evicted_at=float(step))
                ghosts.note(ghost, KEYS[start + 1] if draw.random() < 0.7 else b"")
        assert +told == Counter(list(ghosts))
        assert min(told.values(), default=0) >= 0


def test_of_too_many_the_oldest_are_forgotten() -> None:
    ghosts = Ghosts(3)
    for start in range(5):
        ghosts.note(ghost_of(start, start + 1))
    assert [ghost.key for ghost in ghosts] == KEYS[2:5]


def test_a_prompt_finds_the_ghosts_along_it_as_far_as_it_goes_along_with_them() -> None:
    ghosts = Ghosts(10)
    ghosts.note(ghost_of(2, 6))
    ghosts.note(ghost_of(6, 9, hits=1))
    other_way = [*KEYS[:8], KEYS[19]]
    assert [(s.start, s.ghost.blocks) for s in ghosts.along(GROUP, other_way)] == [(2, 4), (6, 2)]
    assert ghosts.along(GROUP, [*KEYS[:4], KEYS[19]])[0].ghost == ghost_of(2, 4)
    assert ghosts.along(GROUP, KEYS[3:6]) == []
    assert ghosts.along(b"another" * 4, KEYS) == []


def test_what_is_stored_again_is_claimed_and_the_blocks_behind_it_stay_ghosts() -> None:
    ghosts = Ghosts(10)
    ghosts.note(ghost_of(2, 6))
    assert [stretch.ghost for stretch in ghosts.claim(GROUP, KEYS[:4])] == [ghost_of(2, 4)]
    assert list(ghosts) == [ghost_of(4, 6)]
    assert [stretch.ghost for stretch in ghosts.claim(GROUP, KEYS[4:9])] == [ghost_of(4, 6)]
    assert len(ghosts) == 0


def test_what_is_left_of_a_claimed_ghost_takes_the_place_of_one_that_begins_there_and_that_is_told() -> None:
    """Blocks that another node had in files of its own may be remembered twice."""
    ghosts, replaced = Ghosts(100), []
    ghosts.on_replaced = replaced.append
    ghosts.note(ghost_of(0, 4))
    ghosts.note(ghost_of(2, 3, hits=1))
    ghosts.claim(GROUP, KEYS[:2])
    assert replaced == [ghost_of(2, 3, hits=1)]
    assert list(ghosts) == [ghost_of(2, 4)]


def test_a_ghost_is_found_in_its_group_only() -> None:
    ghosts = Ghosts(10)
    ghosts.note(ghost_of(2, 6))
    assert ghosts.find(GROUP, KEYS[2]) == ghost_of(2, 6)
    assert ghosts.find(b"another" * 4, KEYS[2]) is None
    assert ghosts.find(GROUP, KEYS[3]) is None


def test_recomputing_costs_more_the_deeper_it_is() -> None:
    assert prefill_seconds(12_000, 0, 12_000.0) == pytest.approx(1.15)
    assert prefill_seconds(100, 40_000, 100.0) == pytest.approx(2.0, rel=0.002)
    halves = prefill_seconds(512, 0, 12_000.0) + prefill_seconds(512, 512, 12_000.0)
    assert prefill_seconds(1024, 0, 12_000.0) == pytest.approx(halves)


# ---- where blocks leave


def test_blocks_evicted_from_memory_that_are_nowhere_else_become_a_ghost() -> None:
    bench = Bench(host_slots=3, nvme_bytes=0, extent_blocks=3)
    first = bench.prompt(1, 2, 3)
    bench.store(first)
    bench.seal(first)
    bench.tick(5.0)
    bench.store(bench.prompt(7, 8))
    (ghost,) = found(bench)
    assert (ghost.key, ghost.blocks, ghost.first_token) == (first.key(1), 2, 1)
    assert (ghost.tier, ghost.reason, ghost.last_used, ghost.evicted_at) == ("host", Reason.EVICTED, 1000.0, 1005.0)


def test_blocks_that_are_still_on_nvme_are_no_ghosts_until_they_leave_that_too() -> None:
    bench = Bench(host_slots=2, nvme_bytes=9 * 4096, extent_blocks=2)
    first = bench.prompt(1, 2)
    bench.store_durably(first)
    bench.tick(1.0)
    bench.store_durably(bench.prompt(3, 4))
    assert bench.match(first) == (2, 0)
    assert found(bench) == []
    bench.tick(1.0)
    bench.store_durably(bench.prompt(5, 6))
    assert bench.match(first) == (0, 0)
    assert [(ghost.key, ghost.blocks, ghost.tier) for ghost in found(bench)] == [(first.key(0), 2, "nvme")]


def test_a_damaged_file_leaves_a_ghost_that_says_so() -> None:
    bench = Bench(host_slots=4, extent_blocks=2)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    bench.disk.damage((prompt.group, 0, prompt.key(0)), 0)
    bench.start()
    assert bench.load(prompt).blocks == 0
    assert [(ghost.blocks, ghost.reason) for ghost in found(bench)] == [(2, Reason.CHECKSUM)]


def test_asking_for_what_was_evicted_is_told_as_a_regret_with_what_it_costs() -> None:
    bench = Bench(host_slots=3, nvme_bytes=0, extent_blocks=3)
    prompt = bench.prompt(1, 2, 3)
    bench.store(prompt)
    bench.seal(prompt)
    bench.tick(5.0)
    bench.store(bench.prompt(7, 8))
    lease = bench.acquire(bench.prompt(1, 2, 9))
    assert isinstance(lease, Lease)
    assert lease.blocks == 1
    (regret,) = regrets(bench)
    assert (regret.key, regret.blocks, regret.tokens, regret.reason) == (prompt.key(1), 1, 1, Reason.EVICTED)
    assert regret.seconds == prefill_seconds(1, 1, 12_000.0)
    assert (regret.tier, regret.evicted_at) == ("host", 1005.0)
    assert bench.state.counts.regretted_tokens == {Reason.EVICTED: 1}
    bench.release(lease)


def test_what_was_asked_for_in_vain_and_stored_again_has_no_hit_of_it_and_is_used_again_all_the_same() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    prompt, other = bench.prompt(1, 2), bench.prompt(3, 4)
    for one in (prompt, other):
        bench.tick(5.0)
        bench.store(one)
        bench.seal(one)
    bench.tick(5.0)
    lease = bench.acquire(prompt)
    assert isinstance(lease, Lease)
    assert lease.blocks == 0
    bench.store(prompt)
    bench.seal(prompt)
    extent = bench.state._ledger.tree.heads[prompt.key(0)]
    assert (extent.hits_at(0), extent.hits_at(1), extent.uses_at(0), extent.uses_at(1)) == (0, 0, 1, 1)
    assert {extent.kind_at(0), extent.kind_at(1)} == {kind_of_used(1, 10.0, AS_MEASURED)}
    bench.release(bench.load(prompt))
    assert (extent.hits, extent.uses, extent.kind) == (1, 2, kind_of_used(2, 0.0, AS_MEASURED))
    bench.notices.clear()
    bench.tick(5.0)
    bench.store(other)
    evicted = [one for one in bench.notices if isinstance(one, Evicted)]
    assert sum(one.blocks for one in evicted) == 2
    assert {one.hits for one in evicted} == {1}


def test_hits_of_an_extent_are_told_apart_where_its_tail_was_computed_again() -> None:
    extent = Extent(group=GROUP, key=KEYS[0], parent=GROUP, first_token=0, ranks=1, created=0.0)
    Reuse().grow(extent, [Piece(2, 1, 0, 5), Piece(3, 0, 1, 5)], 16, 1.0)
    extent.num_blocks = 5
    assert [extent.hits_at(index) for index in range(5)] == [1, 1, 0, 0, 0]
    assert [extent.uses_at(index) for index in range(5)] == [1, 1, 1, 1, 1]
    extent.touch(1, 2.0, AS_MEASURED)
    assert [extent.hits_at(index) for index in (0, 1)] == [2, 1]
    extent.touch(5, 3.0, AS_MEASURED)
    assert (extent.hits_at(4), extent.uses_at(4)) == (3, 3)


def test_of_more_histories_than_two_those_of_equal_worth_are_joined_with_the_fewer_hits() -> None:
    extent = Extent(group=GROUP, key=KEYS[0], parent=GROUP, first_token=0, ranks=1, created=0.0)
    found, computed, new = Piece(2, 1, 0, 5), Piece(3, 0, 1, 5), Piece(1, 0, 0, 2)
    Reuse().grow(extent, [found, computed, new], 16, 1.0)
    assert (extent.hot_blocks, extent.hits, extent.uses, extent.kind) == (5, 0, 1, 5)
    assert (extent.tail_hits, extent.tail_misses, extent.tail_kind) == (0, 0, 2)


def test_what_is_stored_again_is_no_ghost_any_more() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    prompt, other = bench.prompt(1, 2), bench.prompt(3, 4)
    for one in (prompt, other, prompt):
        bench.tick(1.0)
        bench.store(one)
        bench.seal(one)
    assert [ghost.key for ghost in found(bench)] == [other.key(0)]
    lease = bench.load(prompt)
    bench.release(lease)
    assert regrets(bench) == []


def test_a_purge_leaves_no_ghost_of_what_it_took_nor_of_what_was_evicted_before() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    bench.store(bench.prompt(1, 2))
    bench.seal(bench.prompt(1, 2))
    bench.tick(1.0)
    bench.store(bench.prompt(3))
    bench.seal(bench.prompt(3))
    assert len(found(bench)) == 1
    _, effects = bench.state.start_purge(b"job", OfTenant(""), bench.now)
    bench.absorb(effects)
    assert found(bench) == []


def test_a_purge_of_a_prefix_that_was_evicted_forgets_that_it_ever_was() -> None:
    bench = Bench(host_slots=2, nvme_bytes=0)
    gone = bench.prompt(1, 2)
    bench.store(gone)
    bench.seal(gone)
    bench.tick(1.0)
    bench.store(bench.prompt(3, 4))
    assert [ghost.key for ghost in found(bench)] == split(gone.keys)[:1]
    _, effects = bench.state.start_purge(b"job", OfPrefix(gone.key(0).hex()), bench.now)
    bench.absorb(effects)
    assert found(bench) == []
