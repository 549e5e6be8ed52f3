"""However a torture ends, there is a verdict. The rounds here take no time."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Self

import pytest

from tierkv.torture import run as run_module
from tierkv.torture.plan import CRAMPED, each_once
from tierkv.torture.run import torture

PLANNED = each_once(CRAMPED, seed=7)


class _Round:
    """Does one thing instead of a round's, and is left in order."""

    left = 0

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        type(self).left += 1


def test_a_bug_of_the_torture_is_a_finding_with_its_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Buggy(_Round):
        def play(self, _: Any) -> float:
            raise IndexError("nothing to choose from")

    monkeypatch.setattr(run_module, "Round", Buggy)
    verdict = torture(tmp_path, [PLANNED], 7)
    assert "a bug of the torture itself" in verdict.findings[0]
    assert "nothing to choose from" in verdict.findings[0]
    assert json.loads((tmp_path / "verdict.json").read_text())["findings"] == verdict.findings
    assert "IndexError" in (tmp_path / "traceback.txt").read_text()
    assert (tmp_path / "001-cramped").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    done: list[str] = []

    class Interrupted(_Round):
        def play(self, go_on: Any) -> float:
            os.kill(os.getpid(), number)
            done.append("what was under way")
            go_on()
            done.append("another step")
            return 0.0

    monkeypatch.setattr(run_module, "Round", Interrupted)
    before = signal.getsignal(number)
    verdict = torture(tmp_path, [PLANNED, PLANNED], 7)
    assert (verdict.interrupted, done, Interrupted.left) == (True, ["what was under way"], 1)
    assert signal.getsignal(number) == before
