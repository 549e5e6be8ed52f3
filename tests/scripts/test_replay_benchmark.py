"""scripts/bench --only replay: figures of the traces that are there, and a word for those that aren't."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
from benchmarks import replay
from benchmarks.measure import Plan
from benchmarks.report import Figure, Remark

CUTS = Path(__file__).parents[1] / "replay" / "traces"


def test_without_a_folder_it_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(replay.VARIABLE, raising=False)
    (said,) = replay.measure(Plan(quick=False, directory=tmp_path))
    assert isinstance(said, Remark)
    assert "TIERKV_TRACES" in said.text


def test_a_trace_that_is_not_there_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(replay.VARIABLE, str(tmp_path))
    said = list(replay.measure(Plan(quick=False, directory=tmp_path)))
    assert [type(one) for one in said] == [Remark] * len(replay.TRACES)


def test_a_trace_that_is_there_is_held_against_its_bars_beside_lru(tmp_path: Path) -> None:
    """Unpacked, and cut further: this is about the report."""
    with lzma.open(CUTS / "mooncake_conversation.jsonl.xz", "rt") as lines:
        (tmp_path / "mooncake_conversation.jsonl").write_text(
            "".join(line for _, line in zip(range(150), lines, strict=False))
        )
    said = list(replay.measure(Plan(quick=True, directory=tmp_path, traces=tmp_path)))
    figures = [one for one in said if isinstance(one, Figure)]
    barred = [figure for figure in figures if figure.least is not None]
    assert [figure.least for figure in barred] == [15.5, 15.5], "with extents of one block and of eight"
    assert all(figure.is_met is (figure.value >= 15.5) for figure in barred)
    assert {figure.labels["extent"] for figure in figures} == {"block", "8 blocks"}
    assert all(figure.ratio == 1.0 for figure in figures if figure.labels["policy"] == "lru")
