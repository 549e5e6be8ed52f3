"""A verdict is clean only when nothing was found."""

from __future__ import annotations

from collections import Counter

import pytest

from tierkv.torture.verdict import LEAKS, Verdict


def test_a_verdict_without_findings_is_clean() -> None:
    verdict = Verdict(7, rounds=Counter(roomy=1))
    assert verdict.is_clean
    assert verdict.as_object()["clean"] is True
    assert set(verdict.as_object()["leaks"]) == set(LEAKS)


@pytest.mark.parametrize("where", ["wrong", "lost", "broken", *LEAKS])
def test_one_finding_of_any_kind_spoils_it(where: str) -> None:
    verdict = Verdict(7)
    if where in LEAKS:
        verdict.find_leak(where, "this")
    else:
        getattr(verdict, where).append("this")
    assert not verdict.is_clean
    assert len(verdict.findings) == 1
    assert where in verdict.findings[0]
    assert "this" in verdict.findings[0]
    told = verdict.as_object()
    assert (told["leaks"][where] if where in LEAKS else told[where]) == 1
    assert told["findings"] == verdict.findings


def test_one_without_a_finished_round_is_not_clean_and_has_tried_nothing() -> None:
    verdict = Verdict(7)
    assert (verdict.is_clean, verdict.has_tried, verdict.findings) == (False, False, [])


def test_an_interrupted_one_is_not_clean_but_has_no_findings() -> None:
    verdict = Verdict(7, interrupted=True)
    assert (verdict.is_clean, verdict.findings) == (False, [])
