"""Every process of ours killed under load, every trouble, every damage: what was reported flushed is served right
afterwards, everything else is right or absent, nothing is wrong, nothing is left. `tierkv torture` does the same for as
long as one likes; here some scenarios are played under each of the conditions. And a torture can fail: what is planted
is found.

CHAOS_SEED chooses others, and other moments; CHAOS_STEPS how many (0: each of them once).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import environment
from tierkv.torture import round as round_module
from tierkv.torture.plan import ALL_CONDITIONS, DAMAGED, ROOMY, STEADY, Conditions, PlannedRound, each_once
from tierkv.torture.processes import descendants, is_same
from tierkv.torture.reckoning import Reckoning
from tierkv.torture.run import VERDICT, torture
from tierkv.torture.verdict import Verdict
from tierkv.torture.waits import wait_until

pytestmark = pytest.mark.timeout(1200)

SEED = int(os.environ.get("CHAOS_SEED", "1"))
STEPS = int(os.environ.get("CHAOS_STEPS", "6"))


@pytest.mark.parametrize("conditions", ALL_CONDITIONS, ids=lambda conditions: conditions.name)
def test_what_was_flushed_outlives_every_kill_and_nothing_is_ever_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], conditions: Conditions
) -> None:
    planned = each_once(conditions, SEED)
    if STEPS:
        most = STEPS * 2 if conditions in (ROOMY, DAMAGED) else STEPS
        planned = dataclasses.replace(planned, steps=planned.steps[:most])
    verdict = torture(tmp_path / "torture", [planned], SEED)
    with capsys.disabled():
        print(f"\n{conditions.name}: {json.dumps(verdict.as_object())}")
    assert verdict.findings == []
    assert not (tmp_path / "torture").exists(), "nothing is left"
    assert verdict.rounds == {conditions.name: 1}, "it came to its end"
    if conditions.name in ("roomy", "cramped", "failing", "worst"):
        assert verdict.held * 2 >= verdict.kills.total()
    if conditions.evicts:
        assert verdict.absent > 0
    if conditions is ROOMY:
        assert verdict.kills.total() * 4 >= len(planned.steps) * 3
        assert verdict.absent == 0
    if conditions is STEADY:
        assert {what.split()[0] for what in verdict.kills} == {"engine"}
        assert len(verdict.episodes) * 3 >= len(planned.steps)


# ---- what is planted is found

JUST_THE_END = [PlannedRound(STEADY, 1, ())]


def with_files(monkeypatch: pytest.MonkeyPatch, name: str, folder: Path) -> Verdict:
    monkeypatch.setattr(round_module, "FILES", f"e2e.broken_files:{name}")
    return torture(folder, JUST_THE_END, 1)


def test_a_byte_that_is_changed_after_it_was_verified_is_found_and_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = with_files(monkeypatch, "FlippingFiles", tmp_path / "torture")
    assert verdict.wrong
    assert "1 flipped bits" in verdict.wrong[0]
    assert (tmp_path / "torture" / "001-steady" / "node.log").exists(), "the evidence is kept"
    told = json.loads((tmp_path / "torture" / VERDICT).read_text())
    assert told["findings"] == verdict.findings


def test_a_file_that_was_reported_flushed_and_is_not_there_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books would tell of it as well, before memory has forgotten what the file held; here who reads must."""
    monkeypatch.setattr(Reckoning, "_require_books", lambda self: None)
    verdict = with_files(monkeypatch, "ForgetfulFiles", tmp_path / "torture")
    assert verdict.lost
    assert not verdict.wrong


@pytest.mark.parametrize(
    ("files", "leak"),
    [("LeakyFiles", "descriptors"), ("LitteringFiles", "temp files")],
    ids=["descriptor", "file"],
)
def test_what_is_left_behind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, leak: str) -> None:
    verdict = with_files(monkeypatch, files, tmp_path / "torture")
    assert verdict.leaks[leak]
    assert len(verdict.findings) == 1


# ---- the command


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tierkv_cli.main", "torture", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_interrupted_it_ends_with_the_verdict_so_far_and_leaves_nothing(tmp_path: Path) -> None:
    with start("--minutes", "60", "--dir", str(tmp_path / "torture"), "--seed", "4", "--json") as command:
        wait_until(lambda: len(descendants(command.pid)) >= 6, "nodes and engines run", 120.0)
        started = {(one.pid, one.started) for one in descendants(command.pid)}
        command.send_signal(signal.SIGINT)
        said, _ = command.communicate(timeout=120)
    told = json.loads(said)
    assert (command.returncode, told["interrupted"], told["findings"], told["seed"]) == (130, True, [], 4)
    assert not (tmp_path / "torture").exists()
    assert not running(started)


def test_killed_it_takes_its_nodes_and_engines_along(tmp_path: Path) -> None:
    with start("--minutes", "60", "--dir", str(tmp_path / "torture"), "--seed", "4") as command:
        wait_until(lambda: len(descendants(command.pid)) >= 6, "nodes and engines run", 120.0)
        started = {(one.pid, one.started) for one in descendants(command.pid)}
        command.kill()
        command.communicate(timeout=120)
    wait_until(lambda: not running(started), "all its processes are gone")


def running(processes: set[tuple[int, int]]) -> list[int]:
    return [pid for pid, started in processes if is_same(pid, started)]
