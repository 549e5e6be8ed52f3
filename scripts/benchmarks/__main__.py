"""Runs benchmarks and reports. `scripts/bench --help`."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks import machine, report
from benchmarks.measure import Plan

BENCHMARKS = ("core", "cli", "match_latency", "copies", "inline", "nvme", "start")
"""Modules with a QUESTION and a `measure(plan)` that yields figures; the quickest come first."""

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> int:
    options = _parser().parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # ours and our children's: what is compared has one thread each
    chosen = options.only or list(BENCHMARKS)
    console = Console(width=None if sys.stdout.isatty() else 160)
    started = time.strftime("%Y-%m-%d %H:%M:%S%z")
    with _own_directory(options.dir) as directory:
        described = machine.describe(directory)
        plan = Plan(quick=options.quick, directory=directory)
        answers = []
        for name in chosen:
            answers.append(_answer(name, plan))
            print(f"{name}: {answers[-1].seconds:.0f} s", file=sys.stderr)
    full = report.Report(machine=described, started=started, quick=options.quick, answers=tuple(answers))
    report.show(full, console)
    if options.json is not None:
        report.write_json(full, options.json)
    return 0 if full.is_good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures tierkv on this machine, each figure beside its limit in the same run.",
        epilog="exit: 0 all promises kept, 1 one was missed or a benchmark ended early, 2 usage",
    )
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller stores: minutes become seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument(
        "--dir",
        type=Path,
        default=REPOSITORY / ".cache" / "bench",
        help="directory on the disk to measure; what is made in it is removed at the end (default: .cache/bench)",
    )
    return parser


def _answer(name: str, plan: Plan) -> report.Answer:
    module = importlib.import_module(f"benchmarks.{name}")
    busy_before = machine.busy_percent()
    figures: list[report.Figure] = []
    problem = ""
    start = time.perf_counter()
    try:
        for figure in module.measure(plan):
            figures.append(figure)
    except Exception as error:  # noqa: BLE001  the others are still worth having; this one is reported as it ended
        traceback.print_exc()
        problem = f"{type(error).__name__}: {error}"
    return report.Answer(
        benchmark=name,
        question=module.QUESTION,
        seconds=time.perf_counter() - start,
        busy_before=busy_before,
        busy_after=machine.busy_percent(),
        figures=tuple(figures),
        problem=problem,
    )


@contextmanager
def _own_directory(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
