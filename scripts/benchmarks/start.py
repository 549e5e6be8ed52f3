"""From the exec of `tierkv serve` until it has said that it is ready and answered a first question, with many small
extents on disk.

    index intact           rows come from the index, beside a walk of the folders
    index deleted, warm    every header is read; the kernel has the files in its page cache
    index deleted, cold    the same after posix_fadvise(DONTNEED) on every file. Directories and inodes stay cached:
                           only root can have the kernel forget them, for the whole machine, so that is not done here
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measure import Plan
from benchmarks.node import NodeFailed, started_node
from benchmarks.report import Figure, of_seconds
from tierkv.client import connect_operator

QUESTION = "how soon does a node serve again?"

EXTENTS = 100_000
QUICK_EXTENTS = 10_000
BLOCKS = 8
HOST_BYTES = 64 * 2**20


def measure(plan: Plan) -> Iterator[Figure]:
    extents = plan.rounds(EXTENTS, QUICK_EXTENTS)
    data = plan.directory / "store"
    _make_store(data, extents)
    rounds = plan.rounds(5, 2)
    cases: tuple[tuple[str, tuple[Callable[[Path], None], ...], float], ...] = (
        ("index intact", (), 2.0),
        ("index deleted, headers in the page cache", (_forget_index,), 4.0),
        ("index deleted, headers on the disk only", (_forget_index, _forget_pages), 12.0),
    )
    for name, preparations, most in cases:
        seconds = [_start(data, extents, preparations) for _ in range(rounds + 1)][1:]
        yield of_seconds(
            f"start with {extents:,} extents, {name}", seconds, unit="s", most=None if plan.quick else most
        )
    shutil.rmtree(data)


def _make_store(data: Path, extents: int) -> None:
    command = [sys.executable, "-m", "benchmarks.make_store", str(data), f"--extents={extents}", f"--blocks={BLOCKS}"]
    subprocess.run([*command, "--index"], check=True, stdout=subprocess.DEVNULL)


def _start(data: Path, extents: int, preparations: tuple[Callable[[Path], None], ...]) -> float:
    for prepare in preparations:
        prepare(data)
    start = time.perf_counter()
    with (
        started_node(data_dir=data, host_bytes=HOST_BYTES) as node,
        connect_operator(node.endpoint, timeout_seconds=10.0) as operator,
    ):
        found = operator.status().extents
        seconds = time.perf_counter() - start
    if found != extents:
        raise NodeFailed(f"ready with {found} of {extents} extents")
    return seconds


def _forget_index(data: Path) -> None:
    shutil.rmtree(data / "index")


def _forget_pages(data: Path) -> None:
    os.sync()  # pages that are still to be written can't be dropped
    for path in data.glob("models/*/*/*/*/*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
