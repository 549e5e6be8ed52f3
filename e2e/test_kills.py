"""Every process of ours killed under load: what was reported flushed is served right afterwards, everything else is
right or absent, nothing is wrong, nothing is left. `python -m e2e.chaos_run` does the same for as long as one likes.

CHAOS_SEED chooses another order and other moments.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.chaos_run import ALL_CONDITIONS, ROOMY, Conditions, run
from e2e.chaos_scenarios import ROUND, make_plan

pytestmark = pytest.mark.timeout(1200)

SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.mark.parametrize("conditions", ALL_CONDITIONS, ids=lambda conditions: conditions.name)
def test_what_was_flushed_outlives_every_kill_and_nothing_is_ever_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], conditions: Conditions
) -> None:
    verdict = run(tmp_path, conditions, SEED)
    with capsys.disabled():
        print(f"\n{verdict}")
    assert (verdict.wrong, verdict.lost) == ([], [])
    assert verdict.held * 2 >= verdict.kills.total()
    assert (verdict.absent > 0) == conditions.evicts
    if conditions is ROOMY:
        assert verdict.kills.total() >= 50


def test_a_plan_follows_from_its_seed_and_has_every_scenario() -> None:
    assert make_plan(1, ROUND, len(ROUND)) == make_plan(1, ROUND, len(ROUND))
    assert make_plan(1, ROUND, len(ROUND)) != make_plan(2, ROUND, len(ROUND))
    assert sorted(map(repr, make_plan(3, ROUND, len(ROUND)))) == sorted(map(repr, ROUND))
    assert len(make_plan(1, ROUND, 2 * len(ROUND) + 1)) == 2 * len(ROUND) + 1
