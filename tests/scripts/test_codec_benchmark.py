"""scripts/bench --only codec: rates beside a copy, and the error that is promised."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import codec
from benchmarks.measure import Plan
from benchmarks.report import Figure


def test_it_measures_coding_and_decoding_and_the_error_is_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"layers": 1, "heads": 2, "tokens": 16, "dim": 64}
    monkeypatch.setattr(codec, "MODELS", {"a model of 8B": small})
    monkeypatch.setattr(codec, "RAW_BYTES", 1)
    figures = list(codec.measure(Plan(quick=True, directory=tmp_path)))
    assert all(isinstance(figure, Figure) for figure in figures)
    assert [figure.name.partition(",")[0] for figure in figures[:2]] == ["coding", "decoding"]
    assert all(figure.value > 0 for figure in figures)
    *_, mean, largest = figures
    assert largest.is_met
    assert 0.5 < mean.value < 4
