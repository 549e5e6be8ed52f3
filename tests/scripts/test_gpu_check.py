"""scripts/gpu-check without a GPU: what it says then, and its measurements on host memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from gpu_check.__main__ import count, marked
from gpu_check.copies import Bench, Scale
from gpu_check.report import Check, Copy, Outcome, lines

from tierkv.device.backends import cpu_backend

ROOT = Path(__file__).resolve().parents[2]
SMALL = Scale(large_bytes=2**20, large_block_bytes=2**18, layers=2, heads=2, dim=8, blocks=4, rounds=1)
CHECK = Check(device="Fake GPU", uuid="GPU-1", cuda="12.8", torch="2.9", mover="torch", is_pinned=True)


def copy(name: str, ours: float, aim: float = 0.9) -> Copy:
    return Copy(name=name, num_bytes=2**30, ours=ours, torch=100e9, aim=aim)


def test_every_way_that_blocks_go_is_measured() -> None:
    bench = Bench(cpu_backend(), "cpu", SMALL)
    copies = list(bench.run())
    bench.close()
    assert len({copy.name for copy in copies}) == len(copies) == 10
    assert all(copy.ours > 0 and copy.torch > 0 for copy in copies)
    assert {copy.aim for copy in copies} == {0.9, 0.7}
    assert {copy.num_bytes for copy in copies} == {2**20, 4 * SMALL.block_bytes}


def test_what_is_slower_than_it_is_to_be_is_named() -> None:
    good = msgspec.structs.replace(CHECK, copies=(copy("large", 95e9),), tests=Outcome(passed=3, failed=0, skipped=1))
    assert good.has_held
    assert "all held, in 0 s" in list(lines(good))
    bad = msgspec.structs.replace(good, copies=(copy("large", 89e9),))
    assert not bad.has_held
    assert any(line.startswith("large") and line.endswith("missed") for line in lines(bad))
    assert "NOT all held, in 0 s" in list(lines(bad))


@pytest.mark.parametrize("tests", [Outcome(passed=3, failed=1, skipped=0), Outcome(passed=0, failed=0, skipped=3)])
def test_tests_that_failed_or_did_not_run_do_not_hold(tests: Outcome) -> None:
    assert not msgspec.structs.replace(CHECK, tests=tests).has_held


def test_tests_are_counted_and_an_end_before_the_end_is_a_failure(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    assert count(report) == Outcome(passed=0, failed=1, skipped=0)
    report.write_text('<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2"></testsuite></testsuites>')
    assert count(report) == Outcome(passed=3, failed=2, skipped=2)


def test_files_with_tests_for_a_gpu_are_found_and_no_others() -> None:
    found = set(marked())
    assert {"tests/device/test_on_gpu.py", "e2e/test_on_gpu.py"} <= found
    assert "tests/device/test_cuda.py" not in found
    assert str(Path(__file__).relative_to(ROOT)) not in found


def test_without_a_gpu_it_is_exit_2_and_says_why(tmp_path: Path) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a GPU here")
    command = [ROOT / "scripts/gpu-check", "--python", sys.executable, "--json", tmp_path / "x.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: no_driver: ")
    assert not (tmp_path / "x.json").exists()
