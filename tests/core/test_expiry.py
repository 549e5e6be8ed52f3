"""Retention as stories: what nobody uses for a tenant's time is gone from every tier, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.simulation import Bench, Prompt, make_group
from tierkv.core.expiry import LOOKED_AT
from tierkv.core.grants import Evicted, GroupSpec
from tierkv.core.instructions import TierHealth
from tierkv.core.reasons import Reason
from tierkv.core.tenancy import TenantName

DAY = 86_400.0
ACME, OTHER, INLINE = make_group(salt="acme"), make_group(salt="other"), make_group(salt="inline:1001:x")


def keeping(*rules: tuple[str, float], **shape: object) -> Bench:
    bench = Bench(**({"host_slots": 16, "extent_blocks": 1} | shape))  # type: ignore[arg-type]
    bench.limits = replace(bench.limits, ttl=rules)
    for spec in (ACME, OTHER, INLINE):
        bench.disk.specs[spec.group] = spec
    start(bench)
    return bench


def start(bench: Bench) -> None:
    bench.start()
    for spec in (ACME, OTHER, INLINE):
        bench.absorb(bench.state.open_group(spec, bench.now))


def of(spec: GroupSpec, *tokens: int) -> Prompt:
    return Prompt(spec, tokens)


def let_pass(bench: Bench, seconds: float) -> None:
    """The front looks no later than it is asked to, and the worker does what it is told."""
    end = bench.now + seconds
    while True:
        bench.now = max(bench.now, min(bench.state.next_wakeup() or end, end))
        bench.tick(0.0)
        bench.work()
        if bench.now >= end:
            return


def blocks(bench: Bench, *prompts: Prompt) -> list[int]:
    return [bench.match(prompt)[0] for prompt in prompts]


def test_what_a_tenant_has_not_used_for_its_time_is_gone_from_memory_and_disk() -> None:
    bench = keeping(("acme", DAY))
    mine, other = of(ACME, 1, 2, 3), of(OTHER, 1, 2, 3)
    for prompt in (mine, other):
        bench.store_durably(prompt)
    let_pass(bench, DAY - 1)
    assert blocks(bench, mine, other) == [3, 3]
    let_pass(bench, DAY / 100 + 2)
    assert blocks(bench, mine, other) == [0, 3]
    assert {name[0] for name in bench.disk.files} == {OTHER.group}
    assert bench.state.counts.evicted_blocks["nvme", Reason.EXPIRED] == 3
    assert bench.state.counts.evicted_blocks["host", Reason.EXPIRED] == 3
    went = [notice for notice in bench.notices if isinstance(notice, Evicted)]
    assert {(one.tier, one.to, one.reason) for one in went} == {
        ("host", "nvme", Reason.EXPIRED),
        ("nvme", "dropped", Reason.EXPIRED),
    }


def test_a_use_puts_it_off_for_all_that_the_use_came_by() -> None:
    bench = keeping(("default", DAY))
    prompt = of(ACME, 1, 2, 3)
    bench.store_durably(prompt)
    for _ in range(3):
        let_pass(bench, DAY / 2)
        bench.release(bench.load(prompt.first(2)))
    assert blocks(bench, prompt) == [2], "the block that nobody reached is gone"


def test_a_tenant_goes_by_its_own_rule_and_the_others_by_the_default() -> None:
    bench = keeping(("acme", 2 * DAY), ("user:1001", 4 * DAY), ("none", 8 * DAY), ("default", DAY))
    prompts = [of(OTHER, 1), of(ACME, 1), of(INLINE, 1), bench.prompt(1)]
    for prompt in prompts:
        bench.store_durably(prompt)
    for passed, left in ((1.1, [0, 1, 1, 1]), (2.1, [0, 0, 1, 1]), (4.1, [0, 0, 0, 1]), (8.2, [0, 0, 0, 0])):
        let_pass(bench, 1_000 + passed * DAY - bench.now)
        assert blocks(bench, *prompts) == left, passed


def test_without_a_default_others_keep_what_there_is_room_for() -> None:
    bench = keeping(("acme", DAY))
    bench.store_durably(of(OTHER, 1))
    let_pass(bench, 400 * DAY)
    assert blocks(bench, of(OTHER, 1)) == [1]


def test_a_restart_forgets_no_use_and_what_was_over_meanwhile_goes_at_once() -> None:
    bench = keeping(("default", DAY))
    early, late = of(ACME, 1), of(ACME, 2)
    bench.store_durably(early)
    let_pass(bench, DAY / 2)
    bench.store_durably(late)
    let_pass(bench, DAY / 4)
    bench.now += DAY / 2
    start(bench)
    let_pass(bench, 1.0)
    assert blocks(bench, early, late) == [0, 1]


def test_what_is_held_or_pinned_stays_until_it_is_not() -> None:
    bench = keeping(("default", DAY), pinned_share=0.5)
    held, pinned = of(ACME, 1), of(ACME, 2)
    for prompt in (held, pinned):
        bench.store_durably(prompt)
    lease = bench.load(held)
    pin = bench.pin(pinned)
    let_pass(bench, 3 * DAY)
    assert blocks(bench, held, pinned) == [1, 1]
    bench.release(lease)
    bench.unpin(pin.record.pin)  # type: ignore[union-attr]
    let_pass(bench, DAY / 50)
    assert blocks(bench, held, pinned) == [0, 0]


def test_nothing_goes_before_what_hangs_on_it() -> None:
    bench = keeping(("default", DAY))
    bench.store_durably(of(ACME, 1, 2))
    let_pass(bench, 0.9 * DAY)
    bench.store_durably(of(ACME, 1, 2, 3))
    let_pass(bench, 0.5 * DAY)
    assert blocks(bench, of(ACME, 1, 2, 3)) == [3]
    let_pass(bench, DAY)
    assert blocks(bench, of(ACME, 1, 2, 3)) == [0]
    assert bench.state.num_extents == 0


def test_what_never_got_to_disk_expires_from_memory_and_from_a_disk_that_takes_no_removal_nothing_does() -> None:
    bench = keeping(("default", DAY))
    bench.store_durably(of(ACME, 1))
    bench.absorb(bench.state.report(TierHealth(False, 0, 0, Reason.READ_ONLY), bench.now))
    bench.store_durably(of(ACME, 2))
    let_pass(bench, 1.1 * DAY)
    assert blocks(bench, of(ACME, 1), of(ACME, 2)) == [1, 0]
    bench.absorb(bench.state.report(TierHealth(True, 0, 1 << 30), bench.now))
    let_pass(bench, DAY / 50)
    assert blocks(bench, of(ACME, 1)) == [0]


def test_all_ranks_expire_together() -> None:
    bench = keeping(("default", DAY), ranks=2)
    prompt = bench.prompt(1, 2)
    bench.store_durably(prompt)
    let_pass(bench, 1.1 * DAY)
    assert blocks(bench, prompt) == [0]
    assert bench.disk.files == {}


def test_much_expires_in_slices_between_which_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.core.expiry.EVICTIONS_AT_A_TIME", 2)
    bench = keeping(("default", DAY))
    for number in range(5):
        bench.store_durably(of(ACME, number))
    bench.now += 2 * DAY
    left = []
    for _ in range(3):
        bench.tick(0.0)
        left.append(bench.state.num_extents)
    assert left == [3, 1, 0]


def test_a_round_looks_at_so_many_and_goes_on_with_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.core.expiry.LOOKED_AT", 2)
    bench = keeping(("acme", DAY))
    for number in range(5):
        bench.store_durably(of(OTHER, number))
    bench.now += 2 * DAY
    for _ in range(2):
        bench.tick(0.0)
        assert bench.state.next_wakeup() == 0.0
    bench.tick(0.0)
    due = bench.state.next_wakeup()
    assert due is not None
    assert due >= bench.now + DAY / 100
    assert LOOKED_AT > 2


def test_without_a_rule_nobody_looks() -> None:
    bench = keeping()
    bench.store_durably(of(ACME, 1))
    bench.tick(10.0)
    assert bench.state.next_wakeup() is None


@pytest.mark.parametrize(
    ("name", "covered", "not_covered"),
    [
        ("acme", ["acme"], ["", "acme2", "inline:1:acme"]),
        ("none", [""], ["none", "x"]),
        ("user:1", ["inline:1:", "inline:1:acme"], ["inline:12:", "user:1", ""]),
    ],
)
def test_a_name_covers_the_salts_that_it_means(name: str, covered: list[str], not_covered: list[str]) -> None:
    assert all(map(TenantName(name).covers, covered))
    assert not any(map(TenantName(name).covers, not_covered))


def test_a_digest_covers_the_salt_that_has_it() -> None:
    from blake3 import blake3

    digits = blake3(b"acme").hexdigest()[:8]
    assert TenantName(f"digest:{digits}").covers("acme")
    assert not TenantName(f"digest:{digits}").covers("")


@pytest.mark.parametrize("name", ["", "digest:", "digest:0123", "digest:XYZXYZXY", "user:", "user:01", "user:root"])
def test_what_looks_like_a_name_and_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="write"):
        TenantName(name)
