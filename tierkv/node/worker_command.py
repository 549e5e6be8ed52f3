"""How a storage worker is started: what it inherits, and what it is told."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tierkv.config import Settings
from tierkv.node.children import Child
from tierkv.node.clock import NodeClock
from tierkv.workers.worker_config import WorkerConfig

WORKER_MODULE = "tierkv.workers.storage"
SECONDS_A_DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """Descriptors that it inherits; ours stay open here. With the lock's open file it also holds the lock, so that no
    second node starts while it still writes. The lifeline ends when the supervisor does."""

    channel_fd: int
    arena_fd: int
    arena_bytes: int
    lifeline_fd: int
    lock_fd: int


def start_worker(
    settings: Settings, resources: WorkerResources, clock: NodeClock, *, sends_rows: bool, discard_index: bool
) -> Child:
    """`discard_index`: the last worker died before it could use the index, so it is set aside and rebuilt."""
    config = worker_config(settings, resources, clock, sends_rows=sends_rows, discard_index=discard_index)
    inherited = [resources.channel_fd, resources.arena_fd, resources.lifeline_fd, resources.lock_fd]
    return Child(WORKER_MODULE, [config.encode()], inherited)


def worker_config(
    settings: Settings, resources: WorkerResources, clock: NodeClock, *, sends_rows: bool, discard_index: bool
) -> WorkerConfig:
    return WorkerConfig(
        data_dir=str(settings.data_dir),
        channel_fd=resources.channel_fd,
        arena_fd=resources.arena_fd,
        arena_bytes=resources.arena_bytes,
        lifeline_fd=resources.lifeline_fd,
        lock_fd=resources.lock_fd,
        parent_pid=os.getpid(),
        wall_zero=clock.wall_zero,
        monotonic_zero=clock.monotonic_zero,
        io_threads=settings.io_threads,
        direct_io=settings.direct_io == "auto",
        quarantine_bytes=settings.quarantine_bytes,
        quarantine_seconds=settings.quarantine_days * SECONDS_A_DAY,
        reserve_bytes=settings.nvme_reserve_bytes,
        index_map_bytes=settings.index_map_bytes,
        stuck_seconds=settings.stuck_seconds,
        reconcile_seconds=settings.reconcile_seconds,
        journal_bytes=settings.journal_bytes,
        journal_seconds=settings.journal_days * SECONDS_A_DAY,
        read_only=settings.read_only,
        sends_rows=sends_rows,
        discard_index=discard_index,
        log_level=settings.log_level,
    )
