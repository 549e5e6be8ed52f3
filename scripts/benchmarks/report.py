"""What a run of benchmarks says: figures, each beside its limit, and the machine they were taken on.

value    the median over the rounds, in `unit`; `low` and `high` hold eight rounds of ten between them
limit    the median of what it stands beside (`beside`): a plain copy, raw disk, a bare echo
ratio    value / limit, the median of the rounds' own ratios where both were measured in each round
bar      what the project promises: a least or most ratio, or a least or most value
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

FORMAT = 1


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    unit: str
    value: float
    low: float
    high: float
    rounds: int
    beside: str = ""
    limit: float | None = None
    ratio: float | None = None
    least_ratio: float | None = None
    most_ratio: float | None = None
    most: float | None = None
    least: float | None = None
    note: str = ""
    labels: dict[str, str] = {}  # what it is a figure of, for pages that put figures side by side

    @property
    def is_met(self) -> bool | None:
        """None: nothing is promised."""
        if self.least_ratio is not None:
            return self.ratio is not None and self.ratio >= self.least_ratio
        if self.most_ratio is not None:
            return self.ratio is not None and self.ratio <= self.most_ratio
        if self.most is not None:
            return self.value <= self.most
        if self.least is not None:
            return self.value >= self.least
        return None


class Remark(msgspec.Struct, frozen=True):
    """What has to be known beside the figures: versions, and what could not be measured."""

    text: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    processor: str
    cores: int
    l3_bytes: int
    memory_bytes: int
    kernel: str
    python: str
    directory: str
    file_system: str
    commit: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark. `busy_before` and `busy_after`: percent of all cores that others used just before and just after
    it, when it was not running itself: more than a few make its figures worse than they are. `problem`: why it ended
    early."""

    benchmark: str
    question: str
    seconds: float
    busy_before: float
    busy_after: float
    figures: tuple[Figure, ...]
    problem: str = ""
    remarks: tuple[Remark, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    started: str
    quick: bool
    answers: tuple[Answer, ...]
    format: int = FORMAT

    @property
    def is_good(self) -> bool:
        """Every benchmark came to its end, and every promise was kept."""
        figures = [figure for answer in self.answers for figure in answer.figures]
        return not any(answer.problem for answer in self.answers) and all(f.is_met is not False for f in figures)


def of_seconds(
    name: str,
    seconds: Sequence[float],
    *,
    unit: str,
    beside: str = "",
    limit: Sequence[float] | None = None,
    most_ratio: float | None = None,
    most: float | None = None,
    note: str = "",
    labels: dict[str, str] | None = None,
) -> Figure:
    """A duration, in `unit`, beside another one."""
    scale = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    return of_values(
        name,
        [second * scale for second in seconds],
        unit=unit,
        beside=beside,
        limit=[second * scale for second in limit] if limit is not None else None,
        most_ratio=most_ratio,
        most=most,
        note=note,
        labels=labels,
    )


def of_rates(
    name: str,
    num_bytes: int,
    seconds: Sequence[float],
    *,
    beside: str,
    limit: Sequence[float],
    least_ratio: float | None = None,
    note: str = "",
) -> Figure:
    """Bytes a second, beside the same bytes moved in another way."""
    return of_values(
        name,
        [num_bytes / second / 1e9 for second in seconds],
        unit="GB/s",
        beside=beside,
        limit=[num_bytes / second / 1e9 for second in limit],
        least_ratio=least_ratio,
        note=note,
    )


def of_values(
    name: str,
    values: Sequence[float],
    *,
    unit: str,
    beside: str = "",
    limit: Sequence[float] | None = None,
    least_ratio: float | None = None,
    most_ratio: float | None = None,
    most: float | None = None,
    least: float | None = None,
    note: str = "",
    labels: dict[str, str] | None = None,
) -> Figure:
    ratio = None
    if limit is not None and len(limit) == len(values):
        ratio = statistics.median(value / other for value, other in zip(values, limit, strict=True))
    elif limit is not None:
        ratio = statistics.median(values) / statistics.median(limit)
    return Figure(
        name=name,
        unit=unit,
        value=statistics.median(values),
        low=quantile(values, 0.1),
        high=quantile(values, 0.9),
        rounds=len(values),
        beside=beside,
        limit=statistics.median(limit) if limit is not None else None,
        ratio=ratio,
        least_ratio=least_ratio,
        most_ratio=most_ratio,
        most=most,
        least=least,
        note=note,
        labels=labels or {},
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie: one of the values themselves."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def interval_of_median(values: Sequence[float]) -> tuple[float, float, float]:
    """Two of the values, as many below the one as above the other, that have the median of what they were drawn from
    between them with 95 % confidence, as narrow as that allows; and the confidence, which few values make less."""
    ordered, count = sorted(values), len(values)
    for rank in range(max(1, count // 2), 0, -1):
        outside = 2 * sum(comb(count, below) for below in range(rank)) / 2**count
        if outside <= 0.05 or rank == 1:
            break
    return ordered[rank - 1], ordered[count - rank], 1 - outside


def write_json(report: Report, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def show(report: Report, console: Console) -> None:
    machine = report.machine
    console.print(
        f"{machine.processor}, {machine.cores} cores, L3 {machine.l3_bytes >> 20} MiB, "
        f"{machine.memory_bytes >> 30} GiB; Linux {machine.kernel}, Python {machine.python}; "
        f"{machine.directory} on {machine.file_system}; {machine.commit}, {report.started}"
    )
    for answer in report.answers:
        console.print(_table(answer))
        for remark in answer.remarks:
            console.print(remark.text, highlight=False, markup=False)
        if answer.problem:
            console.print(f"[red]ended early:[/red] {answer.problem}", highlight=False)
    console.print("all promises kept" if report.is_good else "[red]not all promises kept[/red]")


def _table(answer: Answer) -> Table:
    busy = f"others used {answer.busy_before:.0f} % of the cores before, {answer.busy_after:.0f} % after"
    table = Table(
        title=f"{answer.benchmark}: {answer.question}",
        title_justify="left",
        caption=f"{answer.seconds:.0f} s; {busy}",
        caption_justify="left",
    )
    table.add_column("figure", overflow="fold")
    for heading in ("median", "8 of 10", "beside", "ratio", "promised", ""):
        table.add_column(heading, justify="right", overflow="fold")
    for figure in answer.figures:
        table.add_row(*_row(figure))
    return table


def _row(figure: Figure) -> list[str]:
    limit = f"{_number(figure.limit)} {figure.beside}" if figure.limit is not None else figure.beside
    promised = ""
    if figure.least_ratio is not None:
        promised = f"ratio >= {figure.least_ratio:g}"
    elif figure.most_ratio is not None:
        promised = f"ratio <= {figure.most_ratio:g}"
    elif figure.most is not None:
        promised = f"<= {figure.most:g} {figure.unit}"
    elif figure.least is not None:
        promised = f">= {figure.least:g} {figure.unit}"
    verdict = {None: "", True: "[green]kept[/green]", False: "[red]missed[/red]"}[figure.is_met]
    return [
        figure.name + (f" ({figure.note})" if figure.note else ""),
        f"{_number(figure.value)} {figure.unit}",
        f"{_number(figure.low)} .. {_number(figure.high)}",
        limit,
        f"{figure.ratio:.2f}" if figure.ratio is not None else "",
        promised,
        verdict,
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
