from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from tierkv.core.instructions import OpFailed, RemoveDone, Report
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.names import Parts
from tierkv.storage.system_calls import Failure
from tierkv.workers.flusher import Flusher

SECONDS = 20.0


class Disk:
    """Counts the flushes, holds them at a gate, and fails those that it is told to."""

    def __init__(self) -> None:
        self.flushed: list[Parts] = []
        self.reports: list[Report] = []
        self.failing: dict[Parts, str] = {}
        self.may_go = threading.Event()
        self.may_go.set()
        self.entered = threading.Event()

    def flush(self, folder: Parts) -> None:
        self.entered.set()
        assert self.may_go.wait(SECONDS)
        self.flushed.append(folder)
        if folder in self.failing:
            raise StorageError("fsync", self.failing[folder], Reason.IO_ERROR, "injected")

    def report(self, reports: Sequence[Report]) -> None:
        self.reports += reports


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def flusher(disk: Disk) -> Iterator[Flusher]:
    made = Flusher(disk.flush, disk.report)
    yield made
    assert made.close(SECONDS)


def done(op: int) -> Callable[[Failure | None], Report]:
    return partial(answer, op)


def answer(op: int, failure: Failure | None) -> Report:
    return RemoveDone(op) if failure is None else OpFailed(op, failure.reason, failure.errno_name)


def test_a_report_leaves_only_when_every_folder_was_flushed(flusher: Flusher, disk: Disk) -> None:
    disk.may_go.clear()
    flusher.add([("a",), ("b",)], done(1))
    assert disk.entered.wait(SECONDS)
    assert disk.reports == []
    disk.may_go.set()
    assert flusher.wait_idle(SECONDS)
    assert disk.flushed == [("a",), ("b",)]
    assert disk.reports == [RemoveDone(1)]


def test_what_waits_meanwhile_shares_one_flush(flusher: Flusher, disk: Disk) -> None:
    disk.may_go.clear()
    flusher.add([("a",)], done(0))
    assert disk.entered.wait(SECONDS)
    for op in range(1, 50):
        flusher.add([("a",)], done(op))
    disk.may_go.set()
    assert flusher.wait_idle(SECONDS)
    assert disk.flushed == [("a",), ("a",)]
    assert disk.reports == [RemoveDone(op) for op in range(50)]


def test_a_failed_flush_fails_whoever_waited_for_that_folder_and_nobody_else(flusher: Flusher, disk: Disk) -> None:
    disk.failing[("bad",)] = "EIO"
    disk.may_go.clear()
    flusher.add([("first",)], done(0))
    assert disk.entered.wait(SECONDS)
    flusher.add([("good",), ("bad",)], done(1))
    flusher.add([("good",)], done(2))
    disk.may_go.set()
    assert flusher.wait_idle(SECONDS)
    assert disk.reports == [RemoveDone(0), OpFailed(1, Reason.IO_ERROR, "EIO"), RemoveDone(2)]


def test_a_folder_that_is_gone_is_made_durable_by_its_parent(flusher: Flusher, disk: Disk) -> None:
    disk.failing[("a", "b", "c")] = disk.failing[("a", "b")] = "ENOENT"
    flusher.add([("a", "b", "c")], done(1))
    assert flusher.wait_idle(SECONDS)
    assert disk.flushed == [("a", "b", "c"), ("a", "b"), ("a",)]
    assert disk.reports == [RemoveDone(1)]


def test_waiting_for_it_has_a_deadline(flusher: Flusher, disk: Disk) -> None:
    disk.may_go.clear()
    flusher.add([("a",)], done(1))
    assert not flusher.wait_idle(0.01)
    disk.may_go.set()
    assert flusher.wait_idle(SECONDS)
