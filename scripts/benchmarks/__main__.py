"""Runs benchmarks and reports. `scripts/bench --help`."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
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

BENCHMARKS = ("core", "codec", "cli", "match_latency", "copies", "inline", "nvme", "warmup", "start", "replay")
"""Modules with a QUESTION and a `measure(plan)` that yields figures; the quickest come first."""

ON_DEMAND = ("vllm", "lossless")
"""Those that take an environment of their own, and much longer."""

REPOSITORY = Path(__file__).resolve().parents[2]


class Stopped(Exception):
    """By SIGTERM. What was measured until then is reported, and nothing that was started is left."""

    def __str__(self) -> str:
        return "stopped by SIGTERM"


def main() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _stop)
    os.environ["OMP_NUM_THREADS"] = "1"  # ours and our children's: what is compared has one thread each
    chosen = options.only or list(BENCHMARKS)
    console = Console(width=None if sys.stdout.isatty() else 160)
    started = time.strftime("%Y-%m-%d %H:%M:%S%z")
    with _own_directory(options.dir) as directory:
        described = machine.describe(directory)
        plan = Plan(quick=options.quick, directory=directory, model=options.model, traces=options.traces)
        answers = []
        for name in chosen:
            answers.append(_answer(name, plan))
            print(f"{name}: {answers[-1].seconds:.0f} s", file=sys.stderr)
            if answers[-1].problem == str(Stopped()):
                break
    full = report.Report(machine=described, started=started, quick=options.quick, answers=tuple(answers))
    report.show(full, console)
    if options.json is not None:
        report.write_json(full, options.json)
    return 0 if full.is_good else 1


def _stop(_number: int, _frame: object) -> None:
    raise Stopped


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures tierkv on this machine, each figure beside its limit in the same run.",
        epilog="exit: 0 all promises kept, 1 one was missed or a benchmark ended early, 2 usage",
    )
    names = BENCHMARKS + ON_DEMAND
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller stores: minutes become seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument(
        "--dir",
        type=Path,
        default=REPOSITORY / ".cache" / "bench",
        help="directory on the disk to measure; what is made in it is removed at the end (default: .cache/bench)",
    )
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="traces to replay (or TIERKV_TRACES)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="what vLLM loads (scripts/fetch_model)")
    return parser


def _answer(name: str, plan: Plan) -> report.Answer:
    module = importlib.import_module(f"benchmarks.{name}")
    busy_before = machine.busy_percent()
    figures: list[report.Figure] = []
    remarks: list[report.Remark] = []
    problem = ""
    start = time.perf_counter()
    try:
        for found in module.measure(plan):
            if isinstance(found, report.Remark):
                remarks.append(found)
            else:
                figures.append(found)
    except Exception as error:  # noqa: BLE001  the others are still worth having; this one is reported as it ended
        traceback.print_exc()
        problem = str(error) if isinstance(error, Stopped) else f"{type(error).__name__}: {error}"
    return report.Answer(
        benchmark=name,
        question=module.QUESTION,
        seconds=time.perf_counter() - start,
        busy_before=busy_before,
        busy_after=machine.busy_percent(),
        figures=tuple(figures),
        problem=problem,
        remarks=tuple(remarks),
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
