"""`scripts/mutate`: one mutation of the tables at a time, in a copy of the code, and the named test has to fail."""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from tests.kinds.tables import ROOT, Mutation, read_kinds

PROCESSES = 4  # on two processors: some only wait for what never comes in broken code
TIMEOUT_SECONDS = 600.0  # for a test, however busy the machine is; pytest ends one that hangs long before
TIMED_OUT = 124
_numbers = itertools.count(1)
_COPIED = ("tierkv", "tierkv_cli", "tests", "e2e", "scripts", "conf", "docs", "setup.cfg", "pyproject.toml")


class Outcome(StrEnum):
    KILLED = "killed"
    SURVIVED = "survived"
    BROKEN = "broken"
    """It says nothing: the text is not there, the test does not start with it, or fails without it too."""


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    seconds: float
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate",
        description="Breaks a copy of the code, one mutation of the tables in tests/kinds/ at a time, and runs "
        "the test that must notice.",
        epilog="exit: 0 all were caught, 1 one survived or could not be tried, 2 unknown name",
    )
    parser.add_argument("wanted", nargs="*", metavar="KIND|NAME", help="a kind (F04) or a mutation; none: all")
    parser.add_argument("--list", action="store_true", help="show them and stop")
    options = parser.parse_args(arguments)
    everything = [(kind.kind, mutation) for kind in read_kinds() for mutation in kind.mutation]
    known = {kind for kind, _ in everything} | {mutation.name for _, mutation in everything}
    if unknown := [name for name in options.wanted if name not in known]:
        parser.error(f"no kind or mutation is called {', '.join(unknown)}; see --list")
    chosen = [row for row in everything if not options.wanted or {row[0], row[1].name} & set(options.wanted)]
    if options.list:
        for kind, mutation in chosen:
            print(f"{kind}  {mutation.name}  ({mutation.file}; {mutation.test})")
        return 0
    verdicts = try_all([mutation for _, mutation in chosen])
    show(chosen, verdicts)
    return 0 if all(verdict.outcome is Outcome.KILLED for verdict in verdicts) else 1


def try_all(mutations: Sequence[Mutation], root: Path = ROOT) -> list[Verdict]:
    """One verdict a mutation, in their order. Nothing under `root` is changed."""
    with tempfile.TemporaryDirectory(prefix="tkvm") as folder:
        clean = Path(folder) / "clean"
        _copy(root, clean)
        bad = _failing_already(clean, {mutation.test for mutation in mutations})
        workshops: SimpleQueue[Path] = SimpleQueue()
        for number in range(min(PROCESSES, len(mutations))):
            _copy(clean, Path(folder) / f"{number}")
            workshops.put(Path(folder) / f"{number}")

        def judge(mutation: Mutation) -> Verdict:
            if mutation.test in bad:
                return Verdict(Outcome.BROKEN, 0, "the test fails, or is not there, without the mutation too")
            workshop = workshops.get()
            try:
                return _try(mutation, clean, workshop)
            finally:
                shutil.copy2(clean / mutation.file, workshop / mutation.file)
                workshops.put(workshop)

        with ThreadPoolExecutor(PROCESSES) as pool:
            return list(pool.map(judge, mutations))


def show(chosen: Iterable[tuple[str, Mutation]], verdicts: Iterable[Verdict]) -> None:
    table = Table("kind", "mutation", "test", "outcome", "seconds", box=None)
    count = 0
    for (kind, mutation), verdict in zip(chosen, verdicts, strict=True):
        outcome = verdict.outcome if not verdict.reason else f"{verdict.outcome}: {verdict.reason}"
        table.add_row(kind, mutation.name, mutation.test, outcome, f"{verdict.seconds:.1f}")
        count += verdict.outcome is Outcome.KILLED
    console = Console(width=None if sys.stdout.isatty() else 240)
    console.print(table, markup=False)
    console.print(f"{count} of {table.row_count} mutations killed")


def _copy(source: Path, target: Path) -> None:
    """With times and compiled files, so that only what is mutated is compiled again."""
    target.mkdir()
    for name in _COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, symlinks=True)
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)


def _failing_already(clean: Path, tests: set[str]) -> set[str]:
    """Those of `tests` that fail in unchanged code: that they fail says nothing about a mutation."""
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = [sorted(tests)[number::PROCESSES] for number in range(PROCESSES)]
        suspects = [suspect for found in pool.map(lambda part: _suspects(clean, part), parts) for suspect in found]
    return {test for test in suspects if _pytest(clean, [test])[0] != 0}


def _suspects(clean: Path, tests: Sequence[str]) -> list[str]:
    code, report = _pytest(clean, tests) if tests else (0, "")
    if code == 0:
        return []
    return [test for test in tests if code != 1 or _name_in_report(test) in _failed_names(report)]


def _try(mutation: Mutation, clean: Path, folder: Path) -> Verdict:
    started = time.monotonic()
    text = (clean / mutation.file).read_text()
    if text.count(mutation.find) != 1:
        return Verdict(Outcome.BROKEN, 0, f"its text is in {mutation.file} {text.count(mutation.find)} times")
    (folder / mutation.file).write_text(text.replace(mutation.find, mutation.replace))
    # Times of files are whole seconds to the compiler: what it made of one mutation must not be taken for the next.
    code, report = _pytest(folder, [mutation.test], PYTHONDONTWRITEBYTECODE="1")
    seconds = time.monotonic() - started
    if code == 0:
        return Verdict(Outcome.SURVIVED, seconds)
    if code == 1 and _has_failed_test(report):
        return Verdict(Outcome.KILLED, seconds)
    return Verdict(Outcome.BROKEN, seconds, f"pytest ended with {code}, and no test failed")


def _pytest(folder: Path, tests: Sequence[str], **env: str) -> tuple[int, str]:
    """Exit code and report (JUnit XML) of the tests, with the code of `folder`, which comes first on the path."""
    report = folder / f"report {next(_numbers)}.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    try:
        ended = subprocess.run(
            [*command, *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_SECONDS * max(1, len(tests) // 10),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TIMED_OUT, ""
    return ended.returncode, report.read_text() if report.exists() else ""


def _name_in_report(test: str) -> str:
    path, _, name = test.partition("::")
    return f"{path.removesuffix('.py').replace('/', '.')}.{name.partition('[')[0].replace('::', '.')}"


def _failed_names(report: str) -> set[str]:
    cases = ElementTree.fromstring(report).iter("testcase")
    return {
        f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    }


def _has_failed_test(report: str) -> bool:
    """A test that failed, or that left something behind; not one that could not be set up or imported."""
    root = ElementTree.fromstring(report)
    torn_down = [one for one in root.iter("error") if one.get("message", "").startswith("failed on teardown")]
    return bool(torn_down) or root.find(".//failure") is not None


if __name__ == "__main__":
    sys.exit(main())
