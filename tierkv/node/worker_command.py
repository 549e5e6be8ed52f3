"""How workers are started: what they inherit, and what they are told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tierkv.config import Settings
from tierkv.node.children import Child
from tierkv.node.clock import NodeClock
from tierkv.storage.codec_names import FileCodec
from tierkv.workers.device.config import DeviceWorkerConfig
from tierkv.workers.disk_config import DiskWorkerConfig
from tierkv.workers.worker_config import WorkerConfig

WORKER_MODULE = "tierkv.workers.storage"
DISK_WORKER_MODULE = "tierkv.workers.disk"
DEVICE_WORKER_MODULE = "tierkv.workers.device.process"
SECONDS_A_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """Descriptors that a worker inherits; ours stay open here. The lifeline ends when the supervisor does."""

    channel_fd: int
    arena_fd: int
    arena_bytes: int
    lifeline_fd: int

    @property
    def descriptors(self) -> list[int]:
        return [self.channel_fd, self.arena_fd, self.lifeline_fd]


def start_storage_worker(
    settings: Settings,
    resources: WorkerResources,
    clock: NodeClock,
    lock_fd: int,
    *,
    sends_rows: bool,
    discard_index: bool,
) -> Child:
    """With the lock's open file it also holds the lock, so that no second node starts while it still writes.
    `discard_index`: the last worker died before it could use the index, so it is set aside and rebuilt."""
    config = worker_config(settings, resources, clock, lock_fd, sends_rows=sends_rows, discard_index=discard_index)
    return Child(WORKER_MODULE, [config.encode()], [*resources.descriptors, lock_fd])


def worker_config(
    settings: Settings,
    resources: WorkerResources,
    clock: NodeClock,
    lock_fd: int,
    *,
    sends_rows: bool,
    discard_index: bool,
) -> WorkerConfig:
    return WorkerConfig(
        **_common(settings, resources, clock),
        lock_fd=lock_fd,
        io_threads=settings.io_threads,
        reserve_bytes=settings.nvme_reserve_bytes,
        codec=FileCodec(settings.nvme_codec),
        reconcile_seconds=settings.reconcile_seconds,
        journal_bytes=settings.journal_bytes,
        journal_seconds=settings.journal_days * SECONDS_A_DAY,
        sends_rows=sends_rows,
        discard_index=discard_index,
    )


def start_disk_worker(
    settings: Settings, resources: WorkerResources, clock: NodeClock, *, sends_rows: bool, discard_index: bool
) -> Child:
    """It holds no lock: one that a file server keeps from dying must not keep the node from starting anew."""
    config = disk_worker_config(settings, resources, clock, sends_rows=sends_rows, discard_index=discard_index)
    return Child(DISK_WORKER_MODULE, [config.encode()], resources.descriptors)


def disk_worker_config(
    settings: Settings, resources: WorkerResources, clock: NodeClock, *, sends_rows: bool, discard_index: bool
) -> DiskWorkerConfig:
    return DiskWorkerConfig(
        **_common(settings, resources, clock),
        disk_dir=str(settings.disk_dir),
        io_threads=2 * settings.disk_inflight,  # demotions and reads, each so many
        reserve_bytes=settings.disk_reserve_bytes,
        codec=FileCodec(settings.disk_codec),
        rescan_seconds=settings.disk_rescan_seconds,
        sends_rows=sends_rows,
        discard_index=discard_index,
    )


def start_device_worker(
    settings: Settings, resources: WorkerResources, device: int, *, epoch: int, export_fd: int
) -> Child:
    """It needs no data directory, and holds no lock: the memory of a device goes with the process that has it."""
    config = device_worker_config(settings, resources, device, epoch=epoch, export_fd=export_fd)
    return Child(DEVICE_WORKER_MODULE, [config.encode()], [*resources.descriptors, export_fd])


def device_worker_config(
    settings: Settings, resources: WorkerResources, device: int, *, epoch: int, export_fd: int
) -> DeviceWorkerConfig:
    return DeviceWorkerConfig(
        device=settings.device_names[device].partition(":")[0],
        index=device,
        num_bytes=settings.device_bytes[device],
        epoch=epoch,
        channel_fd=resources.channel_fd,
        export_fd=export_fd,
        arena_fd=resources.arena_fd,
        arena_bytes=resources.arena_bytes,
        lifeline_fd=resources.lifeline_fd,
        parent_pid=os.getpid(),
        log_level=settings.log_level,
    )


def _common(settings: Settings, resources: WorkerResources, clock: NodeClock) -> dict[str, Any]:
    """What every worker of a tier of files is told alike."""
    return {
        "data_dir": str(settings.data_dir),
        "channel_fd": resources.channel_fd,
        "arena_fd": resources.arena_fd,
        "arena_bytes": resources.arena_bytes,
        "lifeline_fd": resources.lifeline_fd,
        "parent_pid": os.getpid(),
        "wall_zero": clock.wall_zero,
        "monotonic_zero": clock.monotonic_zero,
        "direct_io": settings.direct_io == "auto",
        "quarantine_bytes": settings.quarantine_bytes,
        "quarantine_seconds": settings.quarantine_days * SECONDS_A_DAY,
        "index_map_bytes": settings.index_map_bytes,
        "stuck_seconds": settings.stuck_seconds,
        "read_only": settings.read_only,
        "log_level": settings.log_level,
    }
