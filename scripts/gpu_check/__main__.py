"""See scripts/gpu-check --help."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec

from gpu_check.report import Check, Outcome, lines
from tierkv.device.cuda import open_cuda_backend
from tierkv.device.cuda_driver import Driver
from tierkv.device.numa import node_of_memory
from tierkv.device.probe import find_gpu
from tierkv.errors import DeviceError

ROOT = Path(__file__).resolve().parents[2]
TESTS_SECONDS = 300
NO_GPU = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu-check")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--json", type=Path)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--tests-only", action="store_true")
    only.add_argument("--copies-only", action="store_true")
    options = parser.parse_args()
    begin = time.monotonic()

    try:
        # In processes of their own: nothing that a test leaves on the GPU is there while copies are measured.
        tests = None if options.copies_only else run_tests(options.gpu)
        check = look(options.gpu, measure=not options.tests_only)
    except DeviceError as error:
        print(f"gpu-check: {error.reason}: {error}", file=sys.stderr)
        return NO_GPU
    check = msgspec.structs.replace(check, tests=tests, seconds=time.monotonic() - begin)
    print("\n".join(lines(check)))
    if options.json is not None:
        made = msgspec.to_builtins(check) | {"has_held": check.has_held}
        for copy, row in zip(check.copies, made["copies"], strict=True):
            row["ratio"] = copy.ratio
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    return 0 if check.has_held else 1


def run_tests(gpu: int) -> Outcome:
    """All tests marked gpu, whose output goes to the terminal. DeviceError where there is no GPU to run them on."""
    find_gpu(Driver(), gpu)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "--timeout=120", f"--junit-xml={report}", *marked()]
        environment = os.environ | {"TIERKV_TEST_GPU": str(gpu)}
        try:
            subprocess.run(command, cwd=ROOT, env=environment, timeout=TESTS_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            print(f"gpu-check: the tests took more than {TESTS_SECONDS} s", file=sys.stderr)
        return count(report)


def marked() -> list[str]:
    """The files that have tests for a GPU. Others aren't even imported: what they need may not be here."""
    files = [path for folder in ("tests", "e2e") for path in (ROOT / folder).rglob("test_*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in files if re.search(r"pytest\.mark\.gpu\b", path.read_text()))


def count(report: Path) -> Outcome:
    """Of a junit file; one failure where there is none, for then pytest did not come to its end."""
    if not report.exists():
        return Outcome(passed=0, failed=1, skipped=0)
    suites = ET.parse(report).getroot().iter("testsuite")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in totals:
            totals[name] += int(suite.get(name, "0"))
    failed = totals["failures"] + totals["errors"]
    return Outcome(passed=totals["tests"] - failed - totals["skipped"], failed=failed, skipped=totals["skipped"])


def look(gpu: int, *, measure: bool) -> Check:
    import torch  # noqa: PLC0415 - heavy, and not to be had where there is no GPU to check

    from gpu_check.copies import Bench, Scale, describe_pool  # noqa: PLC0415 - as above

    backend = open_cuda_backend(gpu)
    bench = Bench(backend, f"cuda:{gpu}", Scale())
    try:
        arena_node = node_of_memory(bench.host.address, bench.host.num_bytes)
        return Check(
            device=backend.name,
            uuid=backend.uuid,
            cuda=f"{backend.cuda_version // 1000}.{backend.cuda_version % 1000 // 10}",
            torch=torch.__version__,
            mover=mover_name(),
            is_pinned=bench.pinning.is_pinned,
            why_not_pinned=bench.pinning.why_not,
            pool_kind=describe_pool(bench.pool),
            numa=f"NUMA nodes: GPU {backend.numa_node}, memory {arena_node}",
            commit=commit(),
            copies=tuple(bench.run()) if measure else (),
        )
    finally:
        bench.close()
        backend.close()


def mover_name() -> str:
    try:
        import cupy  # noqa: PLC0415 - where there is none, torch is used
    except ImportError:
        return "torch"
    return f"cupy {cupy.__version__}"


def commit() -> str:
    """ "" where this is no repository."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return ""
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
