"""`tierkv torture`: what it refuses, what it says, and its exit codes. Whole tortures are in e2e/test_torture.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tierkv.torture import run as run_module
from tierkv.torture.verdict import Verdict
from tierkv_cli.main import run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dir", "x"], "--minutes"),
        (["--minutes", "1"], "--dir"),
        (["--minutes", "0", "--dir", "x"], "--minutes"),
        (["--minutes", "-3", "--dir", "x"], "--minutes"),
        (["--minutes", "0.09", "--dir", "x"], "--minutes"),
        (["--minutes", "nan", "--dir", "x"], "--minutes"),
        (["--minutes", "soon", "--dir", "x"], "--minutes"),
        (["--minutes", "1", "--dir", "x", "--seed", "-1"], "--seed"),
    ],
)
def test_bad_input_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["torture", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_directory_that_holds_anything_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("mine")
    assert run(["torture", "--minutes", "1", "--dir", str(tmp_path)]) == 2
    assert "dir: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert run(["torture", "--minutes", "1", "--dir", str(tmp_path / "precious")]) == 2
    assert "no directory" in capsys.readouterr().err


def test_a_directory_without_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "DISK_BYTES", 2**62)
    assert run(["torture", "--minutes", "1", "--dir", str(tmp_path / "new")]) == 2
    assert "MiB free" in capsys.readouterr().err


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Verdict:
    """What a torture comes to that takes no time."""
    found = Verdict(11, seconds=61.0)
    found.kills.update({"front anytime": 3, "engine leased": 1})
    found.rounds.update({"roomy": 1})
    found.operations.update({"load": 1_000})

    def torture(folder: Path, rounds: Iterable[Any], seed: int, **options: Any) -> Verdict:
        found.seed = seed
        options["progress"](found, "roomy")
        return found

    monkeypatch.setattr(run_module, "torture", torture)
    return found


def test_a_clean_verdict_is_exit_code_0(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["torture", "--minutes", "1", "--dir", "/d", "--seed", "11"]) == 0
    said = capsys.readouterr().out
    assert "clean: 1 m 1 s" in said
    assert "repeat: tierkv torture --seed 11 --minutes 1 --dir /d" in said
    assert "1 engine, 3 front" in said


def test_a_finding_is_exit_code_4_and_told(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> None:
    verdict.find_leak("temp files", "in tmp/: x")
    assert run(["torture", "--minutes", "1", "--dir", "/d", "--seed", "11"]) == 4
    said = capsys.readouterr().out
    assert "leak of temp files: in tmp/: x" in said
    assert "NOT CLEAN" in said
    assert run(["torture", "--minutes", "1", "--dir", "/d", "--seed", "11", "--json"]) == 4
    told = json.loads(capsys.readouterr().out)
    assert (told["clean"], told["leaks"]["temp files"]) == (False, 1)


def test_an_interrupted_one_without_findings_is_exit_code_130(
    verdict: Verdict, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict.interrupted = True
    assert run(["torture", "--minutes", "1", "--dir", "/d", "--seed", "11"]) == 130
    assert "interrupted, clean so far" in capsys.readouterr().out


def test_without_a_seed_a_new_one_is_chosen_and_told(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["torture", "--minutes", "1", "--dir", "/d", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert f"--seed {told['seed']}" in told["repeat"]


def test_the_seed_is_told_before_anything_is_done(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["torture", "--minutes", "1", "--dir", "/d", "--seed", "11"]) == 0
    assert capsys.readouterr().err.startswith("torture: seed 11, in /d\n")


def test_without_a_finished_round_it_is_not_clean(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> None:
    verdict.rounds.clear()
    assert run(["torture", "--minutes", "0.1", "--dir", "/d"]) == 4
    assert "nothing was tried in so short a time" in capsys.readouterr().out


def test_a_clean_one_without_a_kill_says_so(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> None:
    verdict.kills.clear()
    assert run(["torture", "--minutes", "0.1", "--dir", "/d"]) == 0
    assert "no kill and no other trouble was tried" in capsys.readouterr().out
