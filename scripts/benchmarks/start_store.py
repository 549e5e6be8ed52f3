"""How long a storage worker takes from its start to Recovered, its rows received by a front.

    python scripts/benchmarks/make_store.py DATA_DIR --extents 100000 --index
    python scripts/benchmarks/start_store.py DATA_DIR --rounds 5
    python scripts/benchmarks/start_store.py DATA_DIR --without-index [--cold]

`--cold` asks the kernel to forget what it has cached of the files (posix_fadvise); directories and inodes stay cached.
Processor time is that of the worker and of the processes that it starts: on a busy machine, look at that.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

from tierkv.core.instructions import Recovered, Rows, Stop, Stopped
from tierkv.workers.channel import front_end
from tierkv.workers.worker_config import WorkerConfig

ARENA_BYTES = 2**20


def forget_cached(path: Path) -> None:
    for file in path.glob("models/*/*/*/*/*.kv"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def start_once(path: Path) -> tuple[float, float, Recovered]:
    """Seconds to Recovered, processor seconds, and what was recovered."""
    lock_fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    arena_fd = os.memfd_create("arena")
    os.ftruncate(arena_fd, ARENA_BYTES)
    lifeline, lifeline_end = os.pipe()
    ours, theirs = socket.socketpair()
    config = WorkerConfig(
        data_dir=str(path),
        channel_fd=theirs.fileno(),
        arena_fd=arena_fd,
        arena_bytes=ARENA_BYTES,
        lifeline_fd=lifeline,
        lock_fd=lock_fd,
        parent_pid=os.getpid(),
        wall_zero=time.time(),
        monotonic_zero=time.monotonic(),
        log_level="warning",
    )
    used = processor_seconds()
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv.workers.storage", config.encode()],
        pass_fds=[theirs.fileno(), arena_fd, lifeline, lock_fd],
    )
    theirs.close()
    channel = front_end(ours)
    recovered: Recovered | None = None
    rows, seconds = 0, 0.0
    while not channel.ended:
        select.select([channel], [], [], 60.0)
        for report in channel.receive():
            match report:
                case Rows():
                    rows += len(report.rows)
                case Recovered():
                    recovered, seconds = report, time.perf_counter() - started
                    channel.send(Stop(10.0))
                    channel.flush()
                case Stopped():
                    process.wait(10.0)
    for fd in (arena_fd, lifeline, lifeline_end, lock_fd):
        os.close(fd)
    ours.close()
    if recovered is None or recovered.extents != rows:
        raise click.ClickException(f"{rows} rows came with {recovered}")
    return seconds, processor_seconds() - used, recovered


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=5, show_default=True)
@click.option("--without-index", is_flag=True, help="Delete the index before each round.")
@click.option("--cold", is_flag=True, help="Have the kernel forget the files before each round.")
def main(path: Path, rounds: int, without_index: bool, cold: bool) -> None:
    found = []
    for _ in range(rounds):
        if without_index:
            shutil.rmtree(path / "index")
        if cold:
            forget_cached(path)
        seconds, processor, recovered = start_once(path)
        found.append(seconds)
        click.echo(
            f"{seconds:.2f} s, {processor:.2f} s of {os.cpu_count()} processors: {recovered.extents} extents,"
            f" {recovered.index_rows} from the index, {recovered.headers_read} headers read"
        )
    click.echo(f"median {statistics.median(found):.2f} s")


if __name__ == "__main__":
    main()
