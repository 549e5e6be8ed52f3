"""tests/kinds: every scenario has a test or waits for a part, and the tables speak of what exists."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from tests.kinds.markers import Marker, find_markers, names_of_tests
from tests.kinds.page import page
from tests.kinds.tables import ROOT, Kind, Mutation, kind_of_scenario, read_kinds

MARKERS = find_markers()
KINDS = read_kinds()
MUTATIONS = [mutation for kind in KINDS for mutation in kind.mutation]


def is_kind(kind: Kind) -> str:
    return kind.kind


@cache
def names_in(path: str) -> set[str]:
    return names_of_tests((ROOT / path).read_text())


def test_every_scenario_has_a_test_or_waits_for_a_part() -> None:
    named = {marker.scenario for marker in MARKERS} | {one.scenario for kind in KINDS for one in kind.not_applicable}
    assert sorted(kind_of_scenario().keys() - named) == []


def test_every_kind_has_its_table() -> None:
    assert {kind.kind for kind in KINDS} == set(kind_of_scenario().values())


@pytest.mark.parametrize("marker", MARKERS, ids=lambda marker: f"{marker.scenario}-{marker.test.rpartition(':')[2]}")
def test_a_marker_names_a_scenario_that_exists(marker: Marker) -> None:
    assert marker.scenario in kind_of_scenario()


@pytest.mark.parametrize("kind", KINDS, ids=is_kind)
def test_a_kind_speaks_of_its_own_scenarios_and_of_each_once(kind: Kind) -> None:
    for ids in ([one.scenario for one in kind.choice], [one.scenario for one in kind.not_applicable]):
        assert {kind_of_scenario().get(one) for one in ids} <= {kind.kind}
        assert max(Counter(ids).values(), default=1) == 1


@pytest.mark.parametrize("kind", KINDS, ids=is_kind)
def test_what_waits_has_no_test_unless_the_row_says_which_part_waits(kind: Kind) -> None:
    marked = {marker.scenario for marker in MARKERS}
    assert [one.scenario for one in kind.not_applicable if (one.scenario in marked) != bool(one.part)] == []
    assert all(one.waits_for for one in kind.not_applicable)


@pytest.mark.parametrize("kind", KINDS, ids=is_kind)
def test_what_enforces_an_invariant_exists(kind: Kind) -> None:
    rows = [one.partition(": ") for one in kind.enforced_by]
    assert [path for path, _, how in rows if not (ROOT / path).is_file() or not how] == []
    assert kind.invariant.strip()
    assert kind.title.strip()
    if any(kind_of_scenario().get(marker.scenario) == kind.kind for marker in MARKERS):
        assert rows, "a kind with tests is enforced somewhere"
        assert kind.mutation, "at least one mutation shows that its tests notice"


def test_no_two_mutations_share_a_name() -> None:
    assert [name for name, count in Counter(one.name for one in MUTATIONS).items() if count > 1] == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_and_its_test_exists(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.find) == 1
    assert mutation.find != mutation.replace
    path, _, name = mutation.test.partition("::")
    assert re.sub(r"\[.*", "", name) in names_in(path)


def test_the_page_has_every_marked_scenario_and_every_mutation() -> None:
    text = page()
    shown = {scenario for scenario, kind in kind_of_scenario().items() if kind in {one.kind for one in KINDS}}
    assert [one for one in MARKERS if one.scenario in shown and f"| {one.scenario} |" not in text] == []
    assert [mutation.name for mutation in MUTATIONS if mutation.name.replace("|", "\\|") not in text] == []
