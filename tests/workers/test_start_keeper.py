"""Records of starts in a storage worker: kept when told, told at the next start, and never in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.desk import Desk
from tierkv.core.instructions import KeepStart, StartsFound, TierHealth
from tierkv.core.starts import LastEnd, Start, StartKind

MOMENT = 1_700_000_000_000


def start(number: int = MOMENT, **changes: object) -> Start:
    values = {"number": number, "kind": StartKind.NODE, "began": number / 1_000, "last_end": LastEnd.CLEAN}
    return Start(**(values | changes))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_what_one_worker_was_told_the_next_one_tells(root: Path) -> None:
    with Desk(root) as desk:
        assert desk.wait_type(StartsFound).starts == ()
        desk.send(KeepStart(start()), KeepStart(start(ended=True)), KeepStart(start(MOMENT + 1)))
        desk.stop()
    with Desk(root) as desk:
        found = desk.wait_type(StartsFound).starts
    assert [(one.number, one.ended) for one in found] == [(MOMENT, True), (MOMENT + 1, False)]


def test_a_worker_that_follows_another_of_the_same_front_tells_nothing_again(root: Path) -> None:
    with Desk(root) as desk:
        desk.send(KeepStart(start()))
        desk.stop()
    with Desk(root, sends_rows=False) as desk:
        desk.wait_type(TierHealth)
        assert not [report for report in desk.reports if isinstance(report, StartsFound)]


def test_a_directory_that_must_not_change_gets_no_record_and_the_records_of_others_in_it_are_not_ours(
    root: Path,
) -> None:
    with Desk(root) as desk:
        desk.send(KeepStart(start()))
        desk.stop()
    with Desk(root, read_only=True) as desk:
        assert desk.wait_type(StartsFound).starts == ()
        desk.send(KeepStart(start(MOMENT + 1)))
        desk.stop()
    assert [path.name for path in (root / "starts").iterdir()] == [f"{MOMENT}-node.json"]


def test_a_folder_that_is_gone_is_made_again_and_one_that_cant_be_costs_nothing_but_the_record(root: Path) -> None:
    with Desk(root) as desk:
        desk.wait_type(StartsFound)
        (root / "starts").rmdir()
        (root / "starts").write_text("in its place")
        desk.send(KeepStart(start()))
        desk.health(lambda health: bool(health.errors))
        desk.stop()
    (root / "starts").unlink()
    with Desk(root) as desk:
        assert desk.wait_type(StartsFound).starts == ()
        desk.send(KeepStart(start()))
        desk.stop()
    assert (root / "starts" / f"{MOMENT}-node.json").exists()
    assert not list((root / "tmp").iterdir())
