"""The worker of the disk tier as a process of its own: how it ends, and what is found after a kill; two of them at once
in one directory."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.storage.samples import Sample
from tests.workers.desk import SECONDS, Arena, DiskDesk, FrontSide, demote_order, make_disk_config, put_on_nvme
from tests.workers.test_process import REPOSITORY, wait_for_output
from tierkv.core.instructions import (
    Demote,
    OpenNamespace,
    OpFailed,
    ReadDone,
    Recovered,
    Stop,
    Stopped,
    TierHealth,
    WriteDone,
)
from tierkv.core.reasons import Reason
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.extent_file import verify_file
from tierkv.workers.channel import front_end
from tierkv.workers.files import Files
from tierkv.workers.lifeline import EXIT_SUPERVISOR_GONE


class DiskProcess(FrontSide):
    """A worker started as a supervisor starts it."""

    def __init__(self, data: Path, disk: Path, arena: Arena, **config: Any) -> None:
        self.data = data
        DataDirectory.open(data).close()
        front_socket, worker_socket = socket.socketpair()
        lifeline, self.lifeline_end = os.pipe()
        made = make_disk_config(
            data,
            disk,
            channel_fd=worker_socket.fileno(),
            arena_fd=arena.fd,
            arena_bytes=arena.num_bytes,
            lifeline_fd=lifeline,
            **config,
        )
        with worker_socket:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tierkv.workers.disk", made.encode()],
                pass_fds=[worker_socket.fileno(), arena.fd, lifeline],
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
        if self.lifeline_end >= 0:
            os.close(self.lifeline_end)
        self.process.kill()
        self.process.wait(SECONDS)

    def kill(self) -> None:
        """What it said before it was killed counts as well."""
        self.process.kill()
        self.process.wait(SECONDS)
        while not self.channel.ended:
            self.reports += self.channel.receive()

    def demote(self, sample: Sample, op: int) -> None:
        put_on_nvme(self.data, sample)
        self.send(OpenNamespace(group=sample.group, identity=sample.identity), demote_order(sample, op))


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


def test_it_copies_and_reads_and_stops_when_told(tmp_path: Path, disk: Path, arena: Arena) -> None:
    sample = Sample()
    with DiskProcess(tmp_path / "a", disk, arena) as process:
        process.demote(sample, 1)
        assert isinstance(process.answer(1), WriteDone)
        process.send(arena.read_order(sample, 2))
        done = process.answer(2)
        assert isinstance(done, ReadDone)
        assert [arena.read_back(sample, index) for index in range(3)] == sample.blocks
        process.send(Stop(SECONDS))
        process.wait_type(Stopped)
        assert process.process.wait(SECONDS) == 0


def test_a_directory_that_cannot_be_used_is_told_and_exit_2(tmp_path: Path, disk: Path, arena: Arena) -> None:
    disk.mkdir()
    (disk / "notes.txt").write_text("mine")
    with DiskProcess(tmp_path / "a", disk, arena) as process:
        told = process.wait_type(TierHealth)
        assert (told.writable, told.readable) == (False, False)
        assert "notes.txt" in told.problem
        assert process.process.wait(SECONDS) == 2
    assert os.listdir(disk) == ["notes.txt"]


def test_it_ends_when_the_supervisor_is_gone(tmp_path: Path, disk: Path, arena: Arena) -> None:
    with DiskProcess(tmp_path / "a", disk, arena) as process:
        process.wait_type(Recovered)
        os.close(process.lifeline_end)
        process.lifeline_end = -1
        assert process.process.wait(SECONDS) == EXIT_SUPERVISOR_GONE


def test_it_ends_when_the_directory_is_gone(tmp_path: Path, disk: Path, arena: Arena) -> None:
    with DiskProcess(tmp_path / "a", disk, arena) as process:
        process.wait_type(Recovered)
        os.rename(disk, tmp_path / "away")
        told = process.wait(lambda report: isinstance(report, TierHealth) and not report.writable)
        assert isinstance(told, TierHealth)
        assert told.reason == Reason.DATA_DIR_GONE
        assert process.process.wait(SECONDS) == 2
    assert not disk.exists()


class Holding(Files):
    """Says on standard output that a copy has come to a stage, and waits there to be killed."""

    stage = ""

    def copy_reached(self, stage: str, demote: Demote) -> None:
        if stage == self.stage and demote.op == 99:
            os.write(1, stage.encode() + b"\n")
            select.select([], [], [], SECONDS)


class HoldingTemp(Holding):
    stage = "temp_written"


class HoldingRow(Holding):
    stage = "renamed"


@pytest.mark.parametrize(("holding", "published"), [(HoldingTemp, False), (HoldingRow, True)])
def test_a_kill_at_any_stage_of_a_copy_leaves_it_whole_or_absent(
    tmp_path: Path, disk: Path, arena: Arena, holding: type[Holding], published: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    flushed, victim = Sample(), Sample(seed=60)
    files = f"{holding.__module__}:{holding.__name__}"
    with DiskProcess(tmp_path / "a", disk, arena, files=files) as process:
        process.demote(flushed, 1)
        assert isinstance(process.answer(1), WriteDone)
        process.demote(victim, 99)
        wait_for_output(capfd, holding.stage)
        process.kill()
    with DiskDesk(disk, data=tmp_path / "b") as other:  # it may be another's copy, still: that is left in tmp/
        assert (other.recovered().extents, other.recovered().temp_removed) == (1 + published, 0)
        assert other.load(victim, 1).valid == (3 if published else 0)
    with DiskDesk(disk, data=tmp_path / "a") as desk:
        recovered = desk.recovered()
        assert (recovered.extents, recovered.quarantined) == (1 + published, 0)
        assert recovered.temp_removed == 1  # where it has its name, a second one is left
        assert desk.load(flushed, 1).valid == 3
        assert desk.load(victim, 2).valid == (3 if published else 0)
        desk.store(victim, 3)
        assert desk.load(victim, 4).valid == 3


@pytest.mark.parametrize("after", [1, 12])
def test_of_two_nodes_that_copy_the_same_extents_one_is_killed_and_nothing_that_was_reported_is_lost(
    tmp_path: Path, disk: Path, arena: Arena, after: int
) -> None:
    samples = [Sample(seed=40 * number + 1, num_blocks=2) for number in range(30)]
    with (
        DiskProcess(tmp_path / "a", disk, arena, rescan_seconds=0.0) as a,
        DiskProcess(tmp_path / "b", disk, arena, rescan_seconds=0.0) as b,
    ):
        for process in (a, b):
            process.wait_type(Recovered)
            for op, sample in enumerate(samples, 1):
                process.demote(sample, op)
        a.wait(lambda _: len([report for report in a.reports if isinstance(report, WriteDone)]) >= after)
        a.kill()
        reported = {report.op for report in a.reports if isinstance(report, WriteDone)}
        for op in range(1, len(samples) + 1):
            answer = b.answer(op)
            assert isinstance(answer, WriteDone), answer
            assert not isinstance(answer, OpFailed)
        b.send(Stop(SECONDS))
        b.wait_type(Stopped)
    assert len(reported) >= after
    with DataDirectory.open(disk, kind=Kind.DISK, owner="0" * 8, create=False) as directory:
        for sample in samples:
            assert verify_file(directory, sample.name).valid == 2
    with DiskDesk(disk, data=tmp_path / "a") as desk:
        assert (desk.recovered().extents, desk.recovered().quarantined) == (len(samples), 0)
