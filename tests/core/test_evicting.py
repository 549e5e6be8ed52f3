"""Evicting by an operator's word: what a preview lists is what goes, in that order, and a preview changes nothing."""

from __future__ import annotations

import pytest

from tests.core.simulation import PAGE, Bench
from tierkv.core import evicting
from tierkv.core.evicting import EvictState, Victim
from tierkv.core.extent import Extent
from tierkv.core.grants import Evicted
from tierkv.core.ledger import Ledger
from tierkv.core.left import AS_IT_IS, Left
from tierkv.core.reasons import Reason

POLICIES = ("lru", "density", "arc", "gdsf", "literal")


@pytest.fixture(params=POLICIES)
def bench(request: pytest.FixtureRequest) -> Bench:
    """Prompts that share their beginnings, on disk and in memory, used at different times."""
    bench = Bench(host_slots=64, nvme_bytes=1 << 22, extent_blocks=2, policy=request.param)
    for token in range(6):
        bench.store_durably(bench.prompt(7, 8, token, 100 + token, 200 + token))
        bench.tick(3.0)
    for token in (4, 1):
        bench.release(bench.load(bench.prompt(7, 8, token, 100 + token)))
        bench.tick(5.0)
    return bench


def used_bytes(bench: Bench, tier: str) -> int:
    return next(one.used_bytes for one in bench.state.tiers() if one.tier == tier)


def run(bench: Bench, tier: str, to_bytes: int, fingerprint: str = "") -> list[EvictState]:
    states = []
    while True:
        state, effects = bench.state.evict(tier, to_bytes, fingerprint, bench.now)
        bench.absorb(effects)
        bench.work()
        bench.state.check()
        states.append(state)
        if state.finished:
            return states


def leave_memory(bench: Bench) -> None:
    """What hangs on a file keeps it."""
    assert run(bench, "host", 0)[-1].used_bytes == 0
    bench.notices.clear()


def gone(bench: Bench, tier: str) -> list[tuple[bytes, int, int]]:
    found = [one for one in bench.notices if isinstance(one, Evicted) and one.reason is Reason.OPERATOR]
    assert {one.tier for one in found} <= {tier}
    return [(one.key, one.blocks, one.num_bytes) for one in found]


def listed(victims: list[Victim]) -> list[tuple[bytes, int, int]]:
    return [(one.key, one.blocks, one.num_bytes) for one in victims]


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8])
def test_what_a_preview_lists_is_what_goes_and_in_that_order(bench: Bench, tier: str, share: float) -> None:
    if tier == "nvme":
        leave_memory(bench)
    used = used_bytes(bench, tier)
    to_bytes = int(used * share)
    preview = bench.state.preview_eviction(tier, to_bytes, "", bench.now)
    bench.state.check()
    if bench.limits.policy == "gdsf":  # its clock moves with each victim, and counts from each offer
        run(bench, tier, to_bytes)
        assert used_bytes(bench, tier) <= to_bytes
        return
    assert bench.state.preview_eviction(tier, to_bytes, "", bench.now).victims == preview.victims
    states = run(bench, tier, to_bytes)
    assert gone(bench, tier) == listed(preview.victims)
    assert sum(state.num_bytes for state in states) == preview.num_bytes == used - preview.used_bytes
    assert sum(state.lost_seconds for state in states) == pytest.approx(preview.lost_seconds)
    assert used_bytes(bench, tier) == preview.used_bytes <= to_bytes


def test_a_preview_goes_by_the_rule_that_evictions_go_by(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, ledger = Ledger.host_floor, bench.state._ledger
    spared = next(one for one in ledger.tree if one.has_kids)  # which can go only when what hangs there has gone

    def spare_one(ledger: Ledger, extent: Extent, left: Left = AS_IT_IS) -> int | None:
        return None if extent is spared else rule(ledger, extent, left)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "host_floor", spare_one)
        preview = bench.state.preview_eviction("host", 0, "", bench.now)
        assert spared.key not in [victim.key for victim in preview.victims]
        run(bench, "host", 0)
        assert used_bytes(bench, "host") == preview.used_bytes > 0
        if bench.limits.policy != "gdsf":
            assert gone(bench, "host") == listed(preview.victims)
    ledger.reconsider(spared)


def test_what_is_still_in_another_tier_is_not_lost(bench: Bench) -> None:
    preview = bench.state.preview_eviction("host", 0, "", bench.now)
    assert {victim.to for victim in preview.victims} == {"nvme"}
    assert (preview.lost_tokens, preview.lost_seconds) == (0, 0.0)
    run(bench, "host", 0)
    after = bench.state.preview_eviction("nvme", 0, "", bench.now)
    assert {victim.to for victim in after.victims} == {"dropped"}
    assert after.lost_tokens == after.tokens > 0
    assert after.lost_seconds > 0


def test_what_is_held_stays_and_the_reason_says_why_no_more_goes(bench: Bench) -> None:
    lease = bench.load(bench.prompt(7, 8, 4, 104))
    preview = bench.state.preview_eviction("host", 0, "", bench.now)
    assert (preview.finished, preview.reason) == (True, Reason.NO_ROOM)
    assert run(bench, "host", 0)[-1].reason is Reason.NO_ROOM
    assert used_bytes(bench, "host") == preview.used_bytes == 4 * PAGE
    bench.check_lease(bench.prompt(7, 8, 4, 104), lease)
    bench.release(lease)
    assert run(bench, "host", 0)[-1].reason is None
    assert used_bytes(bench, "host") == 0


def test_only_the_model_that_is_meant_goes(bench: Bench) -> None:
    leave_memory(bench)
    weights = next(iter(bench.state.usage())).spec.identity.weights
    assert bench.state.preview_eviction("nvme", 0, "no such model", bench.now).victims == []
    every = bench.state.preview_eviction("nvme", 0, "", bench.now)
    mine = bench.state.preview_eviction("nvme", 0, weights[:8], bench.now)
    assert sorted(listed(mine.victims)) == sorted(listed(every.victims))
    states = run(bench, "nvme", 0, weights[:8])
    assert gone(bench, "nvme") == listed(mine.victims)
    assert states[-1].used_bytes == 0


def test_files_stay_while_what_hangs_on_them_is_in_memory(bench: Bench) -> None:
    preview = bench.state.preview_eviction("nvme", 0, "", bench.now)
    assert preview.reason is Reason.NO_ROOM
    assert {victim.to for victim in preview.victims} == {"host"}
    assert run(bench, "nvme", 0)[-1].used_bytes == preview.used_bytes > 0


def test_it_goes_in_slices_and_a_preview_ends_somewhere(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_memory(bench)
    monkeypatch.setattr(evicting, "EVICTIONS_AT_A_TIME", 3)
    monkeypatch.setattr(evicting, "MAX_VICTIMS", 5)
    preview = bench.state.preview_eviction("nvme", 0, "", bench.now)
    assert (len(preview.victims), preview.is_cut) == (5, True)
    states = run(bench, "nvme", 0)
    assert max(state.evictions for state in states) == 3
    assert len(states) > 2
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]


def test_a_tier_that_holds_less_already_loses_nothing(bench: Bench) -> None:
    assert run(bench, "host", 1 << 40)[0].evictions == 0
    assert bench.state.preview_eviction("nvme", 1 << 40, "", bench.now).victims == []


def test_blocks_that_are_nowhere_else_are_lost_and_say_so() -> None:
    bench = Bench(host_slots=16, nvme_bytes=0, extent_blocks=2)
    for token in range(4):
        bench.store(bench.prompt(token, 50, 51))
    preview = bench.state.preview_eviction("host", 4 * PAGE, "", bench.now)
    assert {victim.to for victim in preview.victims} == {"dropped"}
    assert preview.lost_tokens == preview.tokens == 8 * bench.prompt(0).block_tokens
    run(bench, "host", 4 * PAGE)
    assert gone(bench, "host") == listed(preview.victims)


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "for room"])
def test_of_an_extent_that_is_partly_in_memory_each_block_is_dropped_once(by_hand: bool) -> None:
    """Its tail leaves memory, its file goes, and what was still in memory goes last."""
    bench = Bench(host_slots=8, nvme_bytes=1 << 22, extent_blocks=8)
    prompt = bench.prompt(*range(8))
    bench.store_durably(prompt)
    run(bench, "host", 5 * PAGE)
    if by_hand:
        preview = bench.state.preview_eviction("nvme", 0, "", bench.now)
        (state,) = run(bench, "nvme", 0)
        assert [(one.to, one.first_token, one.blocks) for one in preview.victims] == [("dropped", 5, 3), ("host", 0, 5)]
        assert (preview.num_bytes, preview.evictions) == (state.num_bytes, len(preview.victims))
        assert (preview.lost_tokens, state.lost_tokens, state.tokens, state.evictions) == (3, 3, 8, 2)
    else:
        (extent,) = bench.state._ledger.tree
        bench.state._cascade.send_off(extent, "nvme", bench.now, Reason.EVICTED)
        bench.absorb(bench.state.tick(bench.now))
        bench.work()
    assert bench.match(prompt) == (5, 5)
    run(bench, "host", 2 * PAGE)
    dropped = [one for one in bench.notices if isinstance(one, Evicted) and one.to == "dropped"]
    assert [(one.tier, one.first_token, one.tokens) for one in dropped] == [("nvme", 5, 3), ("host", 2, 3)]
    file = [one for one in bench.notices if isinstance(one, Evicted) and one.tier == "nvme"]
    assert [(one.to, one.key, one.blocks) for one in file] == [
        ("dropped", prompt.key(5), 3),
        ("host", prompt.key(0), 5),
    ]
