"""scripts/benchmarks/performance_page.py: what was measured of vLLM, side by side."""

from __future__ import annotations

from benchmarks.performance_page import page
from benchmarks.report import Answer, Figure, Machine, Remark, Report, of_seconds, of_values

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


def lines_of(*figures: Figure) -> list[str]:
    answer = Answer(
        benchmark="vllm",
        question="q?",
        seconds=120,
        busy_before=1,
        busy_after=2,
        figures=figures,
        remarks=(Remark("a peer, version 7"),),
    )
    report = Report(machine=MACHINE, started="2026-11-30 12:00:00+0000", quick=False, answers=(answer,))
    return "\n".join(page(report)).splitlines()


def waited(system: str, situation: str, seconds: float, cold: float | None = None) -> Figure:
    return of_seconds(
        f"{situation}: {system}",
        [seconds],
        unit="s",
        limit=None if cold is None else [cold],
        most_ratio=None if cold is None else 1 / 8,
        note="3,968 tokens from the cache",
        labels={"what": "first token", "system": system, "situation": situation, "tokens": "4000"},
    )


def test_a_row_has_a_cell_for_every_system_and_none_where_nothing_was_measured() -> None:
    lines = lines_of(
        waited("one", "cold", 4.0), waited("one", "warm", 0.25, cold=4.0), waited("vLLM alone", "cold", 4.0)
    )
    assert "| first token | vLLM alone | one |" in lines
    assert "| 4,000 tokens, cold | 4.00 s | 4.00 s |" in lines
    assert "| 4,000 tokens, warm |  | 0.25 s, 16.0 x (3,968) |" in lines


def test_the_page_names_the_peers_and_what_was_not_kept() -> None:
    kept = lines_of(waited("one", "warm", 0.25, cold=4.0))
    assert "* a peer, version 7" in kept
    assert kept[-1] == "What is promised was kept."
    assert lines_of(waited("one", "warm", 1.0, cold=4.0))[-1] == "Not kept: warm: one."


def test_an_overhead_comes_with_the_interval_of_its_median() -> None:
    figure = of_values(
        "f",
        [2.0],
        unit="%",
        labels={
            "what": "overhead",
            "system": "one",
            "part": "first token",
            "tokens": "2000",
            "least": "-1.5",
            "most": "3.25",
            "confidence": "0.96",
        },
    )
    assert "| 2,000 tokens, first token | +2.0 % (-1.5 .. +3.2, 96 %) |" in lines_of(figure)
