"""Shares as stories: who may keep what when others want it too, and that what nobody uses is anybody's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.core.simulation import PAGE, Bench, Prompt, make_group
from tierkv.core.grants import GroupSpec
from tierkv.core.shares import REST, ShareName, Shares

FILE = 3 * PAGE
ACME, OTHER, WIDE = make_group(salt="acme"), make_group(salt="other"), make_group(salt="wide", block_bytes=PAGE + 1)


def sharing(*shares: tuple[str, float], **shape: object) -> Bench:
    settings = {"host_slots": 8, "extent_blocks": 1, "policy": "lru", "shares": shares} | shape
    bench = Bench(**settings)  # type: ignore[arg-type]
    for spec in (ACME, OTHER, WIDE):
        bench.disk.specs[spec.group] = spec
        bench.absorb(bench.state.open_group(spec, bench.now))
    return bench


def store(bench: Bench, spec: GroupSpec, *numbers: int) -> None:
    for number in numbers:
        bench.tick(1.0)
        bench.store_durably(Prompt(spec, (number,)))


def in_memory(bench: Bench, spec: GroupSpec, numbers: range) -> list[int]:
    return [number for number in numbers if bench.match(Prompt(spec, (number,)))[1]]


def on_disk(bench: Bench, spec: GroupSpec) -> int:
    return sum(name[0] == spec.group for name in bench.disk.files)


def test_what_others_do_not_use_may_be_borrowed_and_goes_back_to_whom_it_belongs() -> None:
    bench = sharing(("tenant:acme", 0.5), ("tenant:other", 0.5))
    store(bench, ACME, *range(8))
    assert len(in_memory(bench, ACME, range(8))) == 8, "nobody else wants it"
    store(bench, OTHER, *range(4))
    assert len(in_memory(bench, OTHER, range(4))) == 4
    assert in_memory(bench, ACME, range(8)) == [4, 5, 6, 7]
    store(bench, OTHER, 4, 5)
    assert in_memory(bench, ACME, range(8)) == [4, 5, 6, 7], "who is beyond its own share takes from itself"
    assert in_memory(bench, OTHER, range(6)) == [2, 3, 4, 5]


def test_without_shares_the_newest_have_it_all() -> None:
    bench = sharing()
    store(bench, ACME, *range(8))
    store(bench, OTHER, *range(6))
    assert in_memory(bench, ACME, range(8)) == [6, 7]


def test_one_that_uses_less_than_its_share_keeps_it_however_old_it_is() -> None:
    bench = sharing(("tenant:acme", 0.25))
    store(bench, ACME, 1, 2)
    store(bench, OTHER, *range(40))
    assert in_memory(bench, ACME, range(3)) == [1, 2]


def test_files_are_shared_alike() -> None:
    bench = sharing(("tenant:acme", 0.5), nvme_bytes=8 * 3 * PAGE, host_slots=4)
    store(bench, ACME, *range(8))
    assert on_disk(bench, ACME) == 8
    store(bench, OTHER, *range(4))
    assert (on_disk(bench, ACME), on_disk(bench, OTHER)) == (4, 4)
    store(bench, OTHER, *range(10, 40))
    assert on_disk(bench, ACME) >= 3, "all but what is evicted ahead of need, a part in 64"


def test_a_share_holds_across_block_sizes() -> None:
    bench = sharing(("tenant:wide", 0.5), host_slots=8)
    bench.limits = replace(bench.limits, slab_bytes=2 * PAGE)
    bench.start()
    for spec in (ACME, WIDE):
        bench.absorb(bench.state.open_group(spec, bench.now))
    store(bench, ACME, *range(8))
    store(bench, WIDE, 1, 2)
    assert in_memory(bench, WIDE, range(3)) == [1, 2]
    store(bench, ACME, *range(10, 30))
    assert in_memory(bench, WIDE, range(3)) == [1, 2], (
        "newer blocks of another size don't take what is within its share"
    )


def test_where_nobody_is_beyond_a_share_the_policy_decides_among_all() -> None:
    bench = sharing(("tenant:acme", 0.9), ("tenant:other", 0.1))
    store(bench, OTHER, 1)
    lease = bench.load(Prompt(OTHER, (1,)))
    store(bench, ACME, *range(7))
    store(bench, ACME, 7)
    assert in_memory(bench, ACME, range(8)) == [1, 2, 3, 4, 5, 6, 7]
    bench.release(lease)


def test_a_restart_knows_whose_files_they_are() -> None:
    bench = sharing(("tenant:acme", 0.5), nvme_bytes=8 * 3 * PAGE)
    store(bench, OTHER, *range(6))
    store(bench, ACME, *range(2))
    bench.start()
    used = {one.name: one.used_bytes for one in bench.state.shares() if one.tier == "nvme"}
    assert used == {"tenant:acme": 2 * FILE, REST: 6 * FILE}


def test_a_model_that_is_renamed_takes_its_blocks_to_another_share() -> None:
    bench = sharing(("model:llama", 0.5))
    store(bench, ACME, 1, 2)
    bench.work()

    def used() -> dict[str, list[int]]:
        rows: dict[str, list[int]] = {}
        for one in bench.state.shares():
            rows.setdefault(one.name, []).append(one.used_bytes)
        return rows

    assert used() == {"model:llama": [0, 0], REST: [2 * PAGE, 2 * FILE]}
    bench.absorb(bench.state.open_group(replace(ACME, model_name="llama"), bench.now))
    assert used() == {"model:llama": [2 * PAGE, 2 * FILE], REST: [0, 0]}
    bench.fill_host()


@pytest.mark.parametrize("policy", ["density", "lru", "arc", "gdsf", "literal"])
def test_every_policy_decides_within_shares(policy: str) -> None:
    bench = sharing(("tenant:acme", 0.5), policy=policy)
    store(bench, OTHER, *range(8))
    store(bench, ACME, *range(4))
    assert len(in_memory(bench, ACME, range(4))) == 4
    store(bench, OTHER, *range(10, 30))
    assert len(in_memory(bench, ACME, range(4))) == 4


def test_of_several_shares_that_cover_a_group_the_first_counts_and_the_rest_is_what_is_left() -> None:
    shares = Shares([("model:fake", 0.4), ("tenant:acme", 0.2)])
    assert shares.of(ACME).name == "model:fake"
    assert shares.of(replace(ACME, model_name="x")).name == "tenant:acme"
    assert shares.of(replace(OTHER, model_name="x")) is shares.rest
    assert (shares.rest.name, round(shares.rest.part, 6)) == (REST, 0.4)
    assert Shares([("model:ffffff", 0.4)]).of(ACME).name == "model:ffffff", "by digits of the fingerprint"


@pytest.mark.parametrize("name", ["acme", "model:", "tenant:", "tenant:digest:12", "host:x", ""])
def test_what_is_no_name_of_a_share_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="write"):
        ShareName(name)
