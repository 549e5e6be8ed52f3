"""scripts/benchmarks/report.py and measure.py: what figures say, and that works take turns."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import msgspec
import pytest
from benchmarks.measure import alternate
from benchmarks.report import (
    Answer,
    Figure,
    Machine,
    Remark,
    Report,
    interval_of_median,
    of_rates,
    of_seconds,
    of_values,
    show,
    write_json,
)
from rich.console import Console

MACHINE = Machine(
    processor="p",
    cores=2,
    l3_bytes=2**25,
    memory_bytes=2**34,
    kernel="6",
    python="3",
    directory="/d",
    file_system="ext4",
    commit="c",
)


def report_of(*figures: Figure, problem: str = "", remarks: tuple[Remark, ...] = ()) -> Report:
    answer = Answer(
        benchmark="b",
        question="q?",
        seconds=1,
        busy_before=0,
        busy_after=0,
        figures=figures,
        problem=problem,
        remarks=remarks,
    )
    return Report(machine=MACHINE, started="now", quick=True, answers=(answer,))


def test_the_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    figure = of_values("f", [1.0, 10.0, 3.0], unit="GB/s", beside="copy", limit=[2.0, 10.0, 4.0])
    assert figure.value == 3.0
    assert figure.limit == 4.0
    assert figure.ratio == 0.75


def test_rates_and_durations_keep_their_promises_in_their_own_direction() -> None:
    fast = of_rates("f", 10**9, [1.0], beside="copy", limit=[0.8], least_ratio=0.7)
    slow = of_rates("f", 10**9, [1.0], beside="copy", limit=[0.6], least_ratio=0.7)
    assert (fast.ratio, fast.is_met, slow.is_met) == (0.8, True, False)
    assert of_seconds("f", [0.002], unit="ms", most=2.0).is_met is True
    assert of_seconds("f", [0.003], unit="ms", most=2.0).is_met is False
    assert of_seconds("f", [0.003], unit="ms").is_met is None
    assert of_seconds("f", [1.0], unit="s", beside="cold", limit=[8.0], most_ratio=1 / 8).is_met is True
    assert of_seconds("f", [1.1], unit="s", beside="cold", limit=[8.0], most_ratio=1 / 8).is_met is False


def test_a_missed_promise_or_an_early_end_makes_the_report_bad() -> None:
    good, missed = of_seconds("f", [1.0], unit="s", most=2), of_seconds("f", [3.0], unit="s", most=2)
    assert report_of(good).is_good
    assert not report_of(good, missed).is_good
    assert not report_of(good, problem="OSError: full").is_good


def test_the_file_holds_the_report_and_the_table_every_figure(tmp_path: Path) -> None:
    copying = of_rates("copying in", 10**9, [1.0], beside="memcpy", limit=[0.5], least_ratio=0.7)
    report = report_of(copying, remarks=(Remark("beside numpy 2"),))
    write_json(report, tmp_path / "r.json")
    assert msgspec.json.decode((tmp_path / "r.json").read_bytes(), type=Report) == report
    text = io.StringIO()
    show(report, Console(file=text, width=200))
    for expected in ("copying in", "1 GB/s", "2 memcpy", "0.50", "missed", "beside numpy 2", "not all promises kept"):
        assert expected in text.getvalue()


@pytest.mark.parametrize(
    ("count", "lowest", "confidence"),
    [
        (1, 0, 0.0),  # nothing is known of what one value came from
        (5, 0, 0.9375),  # all of them, and that is not quite 95 %
        (6, 0, 0.96875),
        (12, 2, 0.9614),
        (20, 5, 0.9586),
    ],
)
def test_the_median_lies_between_two_values_with_a_confidence(count: int, lowest: int, confidence: float) -> None:
    values = [float(number) for number in range(count)]
    assert interval_of_median(values[::-1]) == (lowest, count - 1 - lowest, pytest.approx(confidence, abs=1e-4))


def test_works_take_turns_and_the_first_round_is_a_rehearsal() -> None:
    order: list[str] = []

    def work(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    seconds = alternate(2, {"a": lambda number: work("a", number), "b": lambda number: work("b", 2.0 * number)})
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert seconds == {"a": [1.0, 2.0], "b": [2.0, 4.0]}


def test_the_collector_is_back_after_a_measurement_that_fails() -> None:
    def fail(number: int) -> float:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        alternate(1, {"a": fail})
    assert gc.isenabled()
