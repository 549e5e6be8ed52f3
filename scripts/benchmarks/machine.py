"""The machine that figures were taken on, and how much of it others were using."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import psutil

from benchmarks.report import Machine

SAMPLE_SECONDS = 1.0


def describe(directory: Path) -> Machine:
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        l3_bytes=l3_bytes(),
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        python=platform.python_version(),
        directory=str(directory),
        file_system=_file_system(directory),
        commit=_commit(),
    )


def busy_percent() -> float:
    """Of all cores, over a second in which this process sleeps."""
    return psutil.cpu_percent(interval=SAMPLE_SECONDS)


def l3_bytes() -> int:
    """The last cache before memory; 0 where the machine doesn't say."""
    sizes = [0]
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        text = (index / "size").read_text().strip()
        sizes.append(int(text.removesuffix("K")) * 1024)
    return max(sizes)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """Type of the mount that holds `directory`: the longest mount point that is a parent of it."""
    resolved = directory.resolve()
    best = max(
        (part for part in psutil.disk_partitions(all=True) if resolved.is_relative_to(part.mountpoint)),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    return f"{best.fstype} ({best.device})" if best is not None else "unknown"


def _commit() -> str:
    here = Path(__file__).parent
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False, timeout=30
    )
    return f"commit {answer.stdout.strip()}" if answer.returncode == 0 else "no commit known"
