"""When what was measured is good enough."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.verdicts import LIMITS, measured
from tierkv.core.eval_results import LEAST_NEEDLES, Measured, check_all, why_failed

AT_THE_LIMIT = [
    ("eval_min_agreement", "agreement", 0.9, 0.8999),
    ("eval_max_kl", "kl", 0.1, 0.1001),
    ("eval_max_perplexity_ratio", "coded_perplexity", 11.0, 11.01),
]


def test_what_is_good_in_all_respects_passes() -> None:
    assert why_failed(measured(), LIMITS) == ""
    assert all(check.holds for check in check_all(measured(), LIMITS))


@pytest.mark.parametrize(("setting", "field", "at", "beyond"), AT_THE_LIMIT)
def test_each_limit_holds_at_its_value_and_not_a_hair_beyond(
    setting: str, field: str, at: float, beyond: float
) -> None:
    assert why_failed(measured(**{field: at}), LIMITS) == ""  # type: ignore[arg-type]
    failed = why_failed(measured(**{field: beyond}), LIMITS)  # type: ignore[arg-type]
    assert setting in failed
    assert ";" not in failed, "only this one"


def test_retrieval_is_of_what_the_model_recalls_without_the_codec() -> None:
    assert measured(raw_found=8, both_found=6).retrieval == 0.75
    assert "eval_min_retrieval" in why_failed(measured(raw_found=8, both_found=7), LIMITS)
    assert why_failed(measured(raw_found=10, both_found=9), LIMITS) == ""


def test_where_the_model_recalls_next_to_nothing_by_itself_it_is_not_passed_by_default() -> None:
    poor = measured(raw_found=LEAST_NEEDLES - 1, both_found=LEAST_NEEDLES - 1)
    assert "recalls 4 of 10 facts" in why_failed(poor, LIMITS)
    assert why_failed(poor, msgspec.structs.replace(LIMITS, min_retrieval=0.0)) == ""
    assert "recalls 0 of 10 facts" in why_failed(measured(raw_found=0, both_found=0), LIMITS)


def test_no_needle_asked_for_is_not_a_pass() -> None:
    nothing = msgspec.structs.replace(measured(), needles=())
    assert "0 of 0 facts" in why_failed(nothing, LIMITS)


@pytest.mark.parametrize("field", ["agreement", "kl", "coded_perplexity"])
def test_a_number_that_is_none_holds_nowhere(field: str) -> None:
    broken: Measured = msgspec.structs.replace(measured(), **{field: math.nan})
    assert why_failed(broken, LIMITS)


def test_all_that_is_wrong_is_said() -> None:
    failed = why_failed(measured(agreement=0.5, kl=1.0), LIMITS)
    assert "eval_min_agreement" in failed
    assert "eval_max_kl" in failed
