"""The numbers of the density order: what a study may set, and that they are used where they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.core.value.hazards import Hazards
from tierkv.core.value.kinds import kind_of_new, kind_of_used
from tierkv.core.value.tuning import AS_MEASURED, Tuning, names

PAGE = Path(__file__).parents[3] / "docs/replay.md"


def test_the_defaults_are_those_that_the_figures_were_made_with() -> None:
    assert (AS_MEASURED.own_share, AS_MEASURED.shrinkage_units, AS_MEASURED.youngest_advantage) == (0.6, 300.0, 1.5)
    assert (AS_MEASURED.memory_requests, AS_MEASURED.memory_units) == (2_000.0, 10_000.0)
    assert (AS_MEASURED.suffix_tokens, AS_MEASURED.gap_seconds, AS_MEASURED.least_share) == (1_024.0, 15.0, 0.01)
    assert (AS_MEASURED.learn_requests, AS_MEASURED.learn_seconds) == (250, 30.0)


def test_a_number_is_set_by_name_and_leaves_the_others_alone() -> None:
    assert AS_MEASURED.with_text("own_share=0.75") == Tuning(own_share=0.75)
    assert AS_MEASURED.with_text(" learn_requests = 10 ").learn_requests == 10


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("own_shares=1", "'own_shares' is none of suffix_tokens, gap_seconds"),
        ("own_share", "own_share needs a number after '=', not ''"),
        ("own_share=much", "own_share needs a number after '=', not 'much'"),
        ("own_share=1.5", "own_share is a share, at most 1"),
        ("memory_units=0", "memory_units has to be more than 0"),
        ("gap_seconds=nan", "gap_seconds has to be more than 0"),
        ("learn_requests=2.5", "learn_requests needs a whole number after '=', not '2.5'"),
    ],
)
def test_what_makes_no_sense_is_said_in_words(assignment: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        AS_MEASURED.with_text(assignment)


def test_each_is_on_the_page_with_its_default() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for name in names():
        assert any(row.startswith(f"| `{name}` | {getattr(AS_MEASURED, name):,g} |") for row in rows), name


def test_edges_of_kinds_move_with_their_scales() -> None:
    wide = Tuning(suffix_tokens=2_048.0, gap_seconds=30.0)
    for tokens in (900, 1_100, 7_100, 32_000):
        assert kind_of_new(2 * tokens, wide) == kind_of_new(tokens, AS_MEASURED)
    for gap in (40.0, 46.0, 230.0, 1_000.0):
        assert kind_of_used(1, 2 * gap, wide) == kind_of_used(1, gap, AS_MEASURED)


def index_of(tuning: Tuning, kind: int) -> float:
    """Where kind 0 comes back after ten seconds, and kind 4 does not."""
    hazards = Hazards(tuning)
    hazards.request(0.0)
    for number in range(500):
        now = float(number)
        hazards.begin(0, now, 1.0)
        hazards.begin(4, now, 1.0)
        if number >= 10:
            hazards.end(0, now - 10, now, 1.0)
        hazards.request(now)
    return hazards.index(kind, 0.0)


def test_the_more_weight_a_kind_has_of_its_own_the_further_apart_they_are() -> None:
    def apart(tuning: Tuning) -> float:
        return index_of(tuning, 0) / index_of(tuning, 4)

    assert apart(Tuning(own_share=0.1)) < apart(AS_MEASURED) < apart(Tuning(own_share=1.0))
    assert apart(Tuning(shrinkage_units=1e6)) < apart(AS_MEASURED) < apart(Tuning(shrinkage_units=1.0))


def test_where_too_few_come_back_nothing_is_learnt() -> None:
    def has_learnt(least_share: float) -> bool:
        hazards = Hazards(Tuning(least_share=least_share))
        for number in range(130):
            hazards.request(float(number))
            hazards.begin(0, float(number), 1.0)
            if number % 20 == 0:
                hazards.end(0, float(number), float(number), 1.0)
        return hazards.has_learnt

    assert has_learnt(0.01)
    assert not has_learnt(0.2)
