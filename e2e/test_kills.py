"""Every process of ours killed under load: what was reported flushed is served right afterwards, everything else is
right or absent, nothing is wrong, nothing is left. `python -m e2e.chaos_run` does the same for as long as one likes.

CHAOS_SEED chooses another order and other moments.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.chaos_run import ROUND, ROUND_OF_EVICTIONS, make_plan, run

pytestmark = pytest.mark.timeout(600)

SEED = int(os.environ.get("CHAOS_SEED", "1"))


def test_what_was_flushed_outlives_fifty_kills_and_nothing_is_ever_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = run(tmp_path, SEED, len(ROUND), evicts=False)
    with capsys.disabled():
        print(f"\n{verdict}")
    assert verdict.kills.total() >= 50
    assert verdict.held >= 25
    assert (verdict.wrong, verdict.lost, verdict.absent) == ([], [], 0)


def test_what_was_evicted_meanwhile_is_absent_and_nothing_is_ever_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = run(tmp_path, SEED, len(ROUND_OF_EVICTIONS), evicts=True)
    with capsys.disabled():
        print(f"\n{verdict}")
    assert (verdict.wrong, verdict.lost) == ([], [])
    assert verdict.absent > 0


def test_a_plan_follows_from_its_seed_and_has_every_scenario() -> None:
    assert make_plan(1, ROUND, len(ROUND)) == make_plan(1, ROUND, len(ROUND))
    assert make_plan(1, ROUND, len(ROUND)) != make_plan(2, ROUND, len(ROUND))
    assert sorted(map(repr, make_plan(3, ROUND, len(ROUND)))) == sorted(map(repr, ROUND))
    assert len(make_plan(1, ROUND, 2 * len(ROUND) + 1)) == 2 * len(ROUND) + 1
