"""The storage worker as a process of its own: what it inherits, and how it ends."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.storage.samples import Sample, temp_files
from tests.workers.desk import SECONDS, Arena, Desk, FrontSide, hold_lock, make_config
from tierkv.core.instructions import OpenNamespace, Recovered, Stop, Stopped, Write, WriteDone
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import verify_file
from tierkv.workers.channel import front_end
from tierkv.workers.files import Files
from tierkv.workers.lifeline import EXIT_SUPERVISOR_GONE, EXIT_THREAD_DIED

REPOSITORY = Path(__file__).resolve().parents[2]


class Process(FrontSide):
    """A worker started as a supervisor starts it."""

    def __init__(self, root: Path, arena: Arena, **config: Any) -> None:
        self.lock_fd = hold_lock(root)
        front_socket, worker_socket = socket.socketpair()
        lifeline, self.lifeline_end = os.pipe()
        made = make_config(
            root,
            self.lock_fd,
            channel_fd=worker_socket.fileno(),
            arena_fd=arena.fd,
            arena_bytes=arena.num_bytes,
            lifeline_fd=lifeline,
            **config,
        )
        with worker_socket:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierkv.workers.storage", made.encode()],
                pass_fds=[worker_socket.fileno(), arena.fd, lifeline, self.lock_fd],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        os.close(lifeline)
        super().__init__(front_end(front_socket))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()
        self.close_lifeline()
        self.close_lock()
        self.process.kill()
        self.process.wait(SECONDS)

    def close_lifeline(self) -> None:
        if self.lifeline_end >= 0:
            os.close(self.lifeline_end)
            self.lifeline_end = -1

    def close_lock(self) -> None:
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1

    def open(self, sample: Sample) -> None:
        self.send(OpenNamespace(group=sample.group, identity=sample.identity))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def test_it_writes_and_reads_and_stops_when_told(root: Path, arena: Arena) -> None:
    sample = Sample()
    with Process(root, arena) as process:
        process.open(sample)
        process.send(arena.write_order(sample, 1), arena.read_order(sample, 2))
        assert isinstance(process.answer(1), WriteDone)
        process.answer(2)
        assert [arena.read_back(sample, index) for index in range(3)] == sample.blocks
        process.send(Stop(SECONDS))
        process.wait_type(Stopped)
        assert process.process.wait(SECONDS) == 0
    with Desk(root) as desk:
        assert desk.recovered().index_rows == 1


def test_a_data_directory_that_cannot_be_used_is_exit_2(root: Path, arena: Arena) -> None:
    root.mkdir()
    (root / "FORMAT").write_text('{"format": 99, "store": "of tomorrow"}')
    with Process(root, arena) as process:
        assert process.process.wait(SECONDS) == 2
    assert sorted(os.listdir(root)) == ["FORMAT", "LOCK"]


def test_it_ends_when_the_supervisor_is_gone(root: Path, arena: Arena) -> None:
    with Process(root, arena) as process:
        process.wait_type(Recovered)
        process.close_lifeline()
        assert process.process.wait(SECONDS) == EXIT_SUPERVISOR_GONE


def test_it_ends_when_the_front_is_gone(root: Path, arena: Arena) -> None:
    with Process(root, arena) as process:
        process.wait_type(Recovered)
        process.channel.close()
        assert process.process.wait(SECONDS) == 0


def test_signals_to_all_do_not_end_it(root: Path, arena: Arena) -> None:
    with Process(root, arena) as process:
        process.wait_type(Recovered)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.process.send_signal(number)
        process.send(Stop(SECONDS))
        process.wait_type(Stopped)
        assert process.process.wait(SECONDS) == 0


def test_nonsense_on_the_channel_ends_it(root: Path, arena: Arena) -> None:
    with Process(root, arena) as process:
        process.wait_type(Recovered)
        os.write(process.channel.fileno(), b"\x01\x00\x00\x00\xc1")
        assert process.process.wait(SECONDS) == EXIT_THREAD_DIED


def test_the_lock_is_held_for_as_long_as_a_worker_lives(root: Path, arena: Arena) -> None:
    with Process(root, arena) as process:
        process.wait_type(Recovered)
        process.close_lock()  # as if the supervisor were killed
        other = os.open(root / "LOCK", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.process.kill()
        process.process.wait(SECONDS)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


class Holding(Files):
    """Says on standard output that a write has come to a stage, and waits there to be killed."""

    stage = ""

    def reached(self, stage: str, write: Write) -> None:
        if stage == self.stage and write.op == 99:
            os.write(1, stage.encode() + b"\n")
            select.select([], [], [], SECONDS)


class HoldingTemp(Holding):
    stage = "temp_written"


class HoldingRename(Holding):
    stage = "before_rename"


class HoldingRow(Holding):
    stage = "renamed"


@pytest.mark.scenario(
    "B118",
    then="what a killed writer had in tmp/ is gone after the next start, which says how many files and bytes that were",
)
@pytest.mark.parametrize(("holding", "published"), [(HoldingTemp, False), (HoldingRename, False), (HoldingRow, True)])
def test_a_kill_at_any_stage_of_a_write_leaves_it_whole_or_absent(
    root: Path, arena: Arena, holding: type[Holding], published: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    flushed, victim = Sample(), Sample(seed=60)
    with Process(root, arena, files=f"{holding.__module__}:{holding.__name__}") as process:
        process.open(flushed)
        process.send(arena.write_order(flushed, 1))
        assert isinstance(process.answer(1), WriteDone)
        process.send(arena.write_order(victim, 99))
        wait_for_output(capfd, holding.stage)
        process.process.kill()
        process.process.wait(SECONDS)
    with Desk(root) as desk:
        recovered = desk.recovered()
        assert recovered.extents == 1 + published
        assert recovered.temp_removed == 1 - published
        assert (recovered.temp_bytes > 0) == (not published)
        assert recovered.quarantined == 0
        assert desk.load(flushed, 1).valid == 3
        assert desk.load(victim, 2).valid == (3 if published else 0)
        desk.store(victim, 3)
        assert desk.load(victim, 4).valid == 3


def wait_for_output(capfd: pytest.CaptureFixture[str], word: str) -> None:
    deadline = time.monotonic() + SECONDS
    seen = ""
    while word not in seen:
        assert time.monotonic() < deadline
        seen += capfd.readouterr().out
        select.select([], [], [], 0.01)  # between two looks at what another process writes


@pytest.mark.parametrize("after", [1, 7, 20])
def test_a_kill_under_load_loses_nothing_that_was_reported(root: Path, arena: Arena, after: int) -> None:
    samples = [Sample(seed=40 * number + 1, num_blocks=2) for number in range(60)]
    with Process(root, arena) as process:
        process.open(samples[0])
        process.send(*(arena.write_order(sample, op) for op, sample in enumerate(samples)))
        process.wait(lambda report: len([r for r in process.reports if isinstance(r, WriteDone)]) >= after)
        process.process.kill()
        process.process.wait(SECONDS)
        while not process.channel.ended:  # what it said before it was killed counts as well
            process.reports += process.channel.receive()
        reported = {report.op for report in process.reports if isinstance(report, WriteDone)}
    with Desk(root) as desk:
        assert desk.recovered().quarantined == 0
        assert {samples[op].name.key for op in reported} <= set(desk.rows)
    with DataDirectory.open(root) as directory:
        assert temp_files(directory) == []
        for sample in samples:
            if sample.name.key in desk.rows:
                assert verify_file(directory, sample.name).valid == 2
