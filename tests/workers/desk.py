"""A front's side of a worker of either tier of files: real directories, arena, socket, and the worker on a thread."""

from __future__ import annotations

import gc
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from tests.storage.samples import Sample
from tierkv.core.instructions import (
    AnyInstruction,
    AnyReport,
    Demote,
    ExtentRow,
    OpenNamespace,
    Read,
    ReadDone,
    Recovered,
    Remove,
    Report,
    Rows,
    Stop,
    Stopped,
    TierHealth,
    Write,
    WriteDone,
)
from tierkv.node.lock import lock_data_directory
from tierkv.storage.directory import DataDirectory
from tierkv.workers.channel import BlockingChannel, Channel, front_end, worker_end
from tierkv.workers.disk import DiskWorker
from tierkv.workers.disk_config import DiskWorkerConfig
from tierkv.workers.files import Files
from tierkv.workers.lifeline import OnDeath
from tierkv.workers.storage import StorageWorker
from tierkv.workers.worker_config import WorkerConfig

SECONDS = 20.0
ARENA_BYTES = 4 * 2**20

R = TypeVar("R")


class FrontSide:
    """Sends instructions and waits for reports, each wait with a deadline. Every report is kept in `reports`."""

    def __init__(self, channel: Channel[AnyInstruction, AnyReport]) -> None:
        self.channel = channel
        self.reports: list[AnyReport] = []

    def send(self, *instructions: AnyInstruction) -> None:
        for instruction in instructions:
            self.channel.send(instruction)
        self.channel.flush()

    def wait(self, is_it: Callable[[AnyReport], bool], *, seen: int = 0) -> AnyReport:
        """The first report that `is_it`, from the `seen`-th on."""
        deadline = time.monotonic() + SECONDS
        while True:
            for report in self.reports[seen:]:
                if is_it(report):
                    return report
            seen = len(self.reports)
            assert not self.channel.ended, f"the worker has ended after {self.reports[-3:]}"
            left = deadline - time.monotonic()
            assert left > 0, f"no such report; the last ones: {self.reports[-5:]}"
            select.select([self.channel], [self.channel] if self.channel.wants_write else [], [], left)
            self.channel.flush()
            self.reports += self.channel.receive()

    def wait_type(self, kind: type[R]) -> R:
        found = self.wait(lambda report: isinstance(report, kind))
        assert isinstance(found, kind)
        return found

    def answer(self, op: int) -> AnyReport:
        """The report of an operation."""
        return self.wait(lambda report: getattr(report, "op", None) == op)

    def health(self, is_it: Callable[[TierHealth], bool]) -> TierHealth:
        """A health report of now or later."""
        found = self.wait(lambda r: isinstance(r, TierHealth) and is_it(r), seen=len(self.reports))
        assert isinstance(found, TierHealth)
        return found

    @property
    def rows(self) -> dict[bytes, ExtentRow]:
        return {row.key: row for report in self.reports if isinstance(report, Rows) for row in report.rows}


class Arena:
    """A memfd, mapped, into which samples are placed."""

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("test arena")
        os.ftruncate(self.fd, num_bytes)
        self._mapped = mmap.mmap(self.fd, num_bytes)
        self.view = memoryview(self._mapped)
        self._used = 0
        self._places: dict[bytes, int] = {}

    def place(self, sample: Sample) -> int:
        """Where the sample's own arena lies in this one."""
        base = self._places.get(sample.keys)
        if base is None:
            base = self._places[sample.keys] = self._used
            self._used += len(sample.arena)
            assert self._used <= self.num_bytes
            self.view[base : self._used] = sample.arena
        return base

    def close(self) -> None:
        gc.collect()  # an exception of a worker's thread may hold views of it in a cycle
        self.view.release()
        self._mapped.close()
        os.close(self.fd)

    def write_order(self, sample: Sample, op: int, **changes: Any) -> Write:
        base = self.place(sample)
        slots = [base + slot for slot in sample.write_order().slots]
        return sample.write_order(**({"op": op, "slots": slots} | changes))

    def read_order(self, sample: Sample, op: int, first: int = 0, count: int | None = None, **changes: Any) -> Read:
        base = self.place(sample)
        slots = [base + slot for slot in sample.read_order(first, count).slots]
        return sample.read_order(first, count, **({"op": op, "slots": slots} | changes))

    def read_back(self, sample: Sample, index: int) -> bytes:
        start = self.place(sample) + (sample.num_blocks + index) * sample.slot_bytes
        return bytes(self.view[start : start + sample.block_bytes])

    def poison(self, sample: Sample) -> None:
        start = self.place(sample) + sample.num_blocks * sample.slot_bytes
        self.view[start : start + sample.num_blocks * sample.slot_bytes] = (
            b"\xee" * sample.num_blocks * sample.slot_bytes
        )


def hold_lock(root: Path) -> int:
    """LOCK of a data directory, held, as the supervisor does it. Close it."""
    return lock_data_directory(root, 0.0).fd


def make_config(root: Path, lock_fd: int, **changes: Any) -> WorkerConfig:
    fields: dict[str, Any] = {
        "data_dir": str(root),
        "channel_fd": -1,
        "arena_fd": -1,
        "arena_bytes": ARENA_BYTES,
        "lifeline_fd": -1,
        "lock_fd": lock_fd,
        "parent_pid": os.getpid(),
        "wall_zero": time.time(),
        "monotonic_zero": time.monotonic(),
        "io_threads": 3,
        "quarantine_bytes": 2**20,
        "index_map_bytes": 2**20,
    }
    return WorkerConfig(**(fields | changes))


class Worker(Protocol):
    """Of either tier."""

    def run(self) -> None: ...
    def close(self) -> None: ...


class TierDesk(FrontSide):
    """A worker of a tier of files, on a thread of this process. `root` is the directory of its tier."""

    def __init__(
        self,
        root: Path,
        arena: Arena | None,
        begin: Callable[[BlockingChannel[Report, AnyInstruction], memoryview, OnDeath], Worker],
    ) -> None:
        self.root = root
        self.dead_threads: list[str] = []
        self._owns_arena = arena is None
        self.arena = arena or Arena()
        front_socket, worker_socket = socket.socketpair()
        super().__init__(front_end(front_socket))
        self._worker_channel = worker_end(worker_socket)
        self._begun = begin(self._worker_channel, self.arena.view, self.dead_threads.append)
        self._thread = threading.Thread(target=self._begun.run, name="worker")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.channel.close()
        self._thread.join(SECONDS)
        self._begun.close()
        self._worker_channel.close()
        if self._owns_arena:
            self.arena.close()
        if kind is None:
            assert self.dead_threads == []

    def open(self, sample: Sample) -> None:
        self.send(OpenNamespace(group=sample.group, identity=sample.identity, model_name="small"))

    def put_order(self, sample: Sample, op: int) -> AnyInstruction:
        """What brings the sample's file into the tier."""
        return self.arena.write_order(sample, op)

    def store(self, sample: Sample, op: int) -> WriteDone:
        """Open the sample's group and put it into the tier."""
        self.open(sample)
        self.send(self.put_order(sample, op))
        report = self.answer(op)
        assert isinstance(report, WriteDone), report
        return report

    def load(self, sample: Sample, op: int, first: int = 0, count: int | None = None) -> ReadDone:
        self.arena.poison(sample)
        self.send(self.arena.read_order(sample, op, first, count))
        report = self.answer(op)
        assert isinstance(report, ReadDone), report
        return report

    def stop(self, budget_seconds: float = SECONDS) -> None:
        self.send(Stop(budget_seconds))
        self.wait_type(Stopped)

    def recovered(self) -> Recovered:
        return self.wait_type(Recovered)


class Desk(TierDesk):
    """The storage worker."""

    def __init__(
        self,
        root: Path,
        *,
        files: Files | None = None,
        arena: Arena | None = None,
        health_seconds: float = 0.01,
        **config: Any,
    ) -> None:
        self._lock_fd = hold_lock(root)
        self.worker: StorageWorker

        def begin(
            channel: BlockingChannel[Report, AnyInstruction], view: memoryview, on_death: OnDeath
        ) -> StorageWorker:
            made = make_config(root, self._lock_fd, **config)
            self.worker = StorageWorker(
                made, channel, view, files=files, health_seconds=health_seconds, on_death=on_death
            )
            return self.worker

        super().__init__(root, arena, begin)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        os.close(self._lock_fd)


def make_disk_config(data: Path, disk: Path, **changes: Any) -> DiskWorkerConfig:
    fields: dict[str, Any] = {
        "data_dir": str(data),
        "disk_dir": str(disk),
        "channel_fd": -1,
        "arena_fd": -1,
        "arena_bytes": ARENA_BYTES,
        "lifeline_fd": -1,
        "parent_pid": os.getpid(),
        "wall_zero": time.time(),
        "monotonic_zero": time.monotonic(),
        "io_threads": 3,
        "quarantine_bytes": 2**20,
        "index_map_bytes": 2**20,
    }
    return DiskWorkerConfig(**(fields | changes))


class DiskDesk(TierDesk):
    """The worker of the disk tier, of a node whose data directory is beside the disk directory unless it is named."""

    def __init__(
        self,
        root: Path,
        *,
        data: Path | None = None,
        files: Files | None = None,
        arena: Arena | None = None,
        health_seconds: float = 0.01,
        **config: Any,
    ) -> None:
        self.data = data or root.parent / "of the node"
        DataDirectory.open(self.data).close()
        self.worker: DiskWorker

        def begin(channel: BlockingChannel[Report, AnyInstruction], view: memoryview, on_death: OnDeath) -> DiskWorker:
            made = make_disk_config(self.data, root, **config)
            self.worker = DiskWorker(made, channel, view, files=files, health_seconds=health_seconds, on_death=on_death)
            return self.worker

        super().__init__(root, arena, begin)

    def put_order(self, sample: Sample, op: int) -> AnyInstruction:
        """Its file is on NVMe, as the storage worker has left it there."""
        put_on_nvme(self.data, sample)
        return demote_order(sample, op)


def put_on_nvme(data: Path, sample: Sample) -> None:
    with DataDirectory.open(data, create=False, writable=False) as directory:
        sample.write(directory)


def demote_order(sample: Sample, op: int, **changes: Any) -> Demote:
    write = sample.write_order()
    fields: dict[str, Any] = {name: getattr(write, name) for name in Demote.__struct_fields__ if name != "op"}
    return Demote(**({"op": op} | fields | changes))


def remove_order(sample: Sample, op: int) -> Remove:
    name = sample.name
    return Remove(op=op, fingerprint=name.fingerprint, group=name.group, rank=name.rank, key=name.key)
