"""scripts/benchmarks/performance_page.py: what was measured of vLLM, side by side."""

from __future__ import annotations

import msgspec
from benchmarks.performance_page import LOSSLESS, lossless, page
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


def test_the_lossless_codec_has_a_table_for_each_part_with_a_column_for_each_variant() -> None:
    figures = tuple(
        of_values(
            f"{element}, {system}: {part}",
            [value],
            unit="x",
            labels={"what": "lossless", "element": element, "system": system, "part": part},
        )
        for part, value in (("ratio", 1.45), ("encode", 0.8), ("decode", 1.5))
        for element, systems in (("bfloat16", ("ours", "level 1")), ("fp8", ("ours",)))
        for system in systems
    )
    answer = Answer(
        benchmark="lossless", question="q?", seconds=1, busy_before=3, busy_after=4, figures=figures,
        remarks=(Remark("a model"),),
    )  # fmt: skip
    report = Report(machine=MACHINE, started="2026-11-30 12:00:00+0000", quick=False, answers=(answer,))
    lines = "\n".join(lossless(report)).splitlines()
    assert "* a model" in lines
    assert "| times smaller | ours | level 1 |" in lines
    assert "| bfloat16 | 1.45 | 1.45 |" in lines
    assert "| fp8 | 1.45 |  |" in lines
    assert "| encoded, GB/s | ours | level 1 |" in lines
    assert "| decoded, GB/s | ours | level 1 |" in lines


def test_what_was_measured_of_the_lossless_codec_is_whole() -> None:
    """Ours is no larger than by any level of the same planes, but for what is too small to be told."""
    measured = msgspec.json.decode(LOSSLESS.read_bytes(), type=Report)
    assert measured.is_good
    assert not measured.quick
    ratios = {
        (figure.labels["element"], figure.labels["system"]): figure.value
        for figure in measured.answers[0].figures
        if figure.labels["part"] == "ratio"
    }
    assert {element for element, _ in ratios} == {"bfloat16", "float32", "bfloat16 as fp8"}
    for (element, system), ratio in ratios.items():
        assert ratios[element, "ours"] > 0.99 * ratio, (element, system)
