"""What the node says about gpu_devices: rows of Status, and what is wrong or perhaps not as it was meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.config.sizes import human_size
from tierkv.core.usage import TierBytes
from tierkv.node.mover import WorkerState
from tierkv.node.tier_worker import DeviceWorker
from tierkv.wire.messages import DeviceStatus, WorkerStatus
from tierkv.wire.pools import PoolKind


class DeviceSurvey:
    """`asked_bytes` of each of the devices that `workers` are the front's side of."""

    def __init__(self, workers: Sequence[DeviceWorker], asked_bytes: int) -> None:
        self._workers = workers
        self._asked_bytes = asked_bytes

    def statuses(self, tiers: Sequence[TierBytes], now: float) -> tuple[DeviceStatus, ...]:
        """`tiers` of the core, one for each device."""
        return tuple(self._status(worker, tier, now) for worker, tier in zip(self._workers, tiers, strict=True))

    def _status(self, worker: DeviceWorker, tier: TierBytes, now: float) -> DeviceStatus:
        state, pool, health = worker.mover.worker, worker.pool, worker.health
        return DeviceStatus(
            device=worker.device,
            name=worker.name,
            state=self._state(worker, now),
            asked_bytes=self._asked_bytes,
            capacity_bytes=tier.capacity_bytes,
            used_bytes=tier.used_bytes,
            reserved_bytes=tier.reserved_bytes + tier.overhead_bytes,
            device_name=health.device_name if health else "",
            kind=health.kind if health else "",
            is_pinned=health.is_pinned if health else False,
            why_not_pinned=health.why_not_pinned if health else "",
            device_numa=health.device_numa if health else -1,
            arena_numa=health.arena_numa if health else -1,
            upload_bytes_per_second=round(health.upload_bytes_per_second) if health else 0,
            download_bytes_per_second=round(health.download_bytes_per_second) if health else 0,
            queued_copies=health.queued_copies if health else 0,
            mapped_sessions=len(worker.mapped),
            restarts=state.restarts,
            problem=(health.problem if health else "") or pool.problem if pool else _why_away(state),
        )

    def _state(self, worker: DeviceWorker, now: float) -> str:
        state = worker.mover.worker
        if worker.pool is None or not state.is_up:
            return "away" if state.problem or worker.pool is not None else "starting"
        return "silent" if state.is_silent(now) else "ok"

    def processes(self, now: float) -> Iterator[WorkerStatus]:
        for worker in self._workers:
            state = worker.mover.worker
            said = {"recovering": "starting"}.get(state.describe(now), state.describe(now))
            heard = max(0.0, now - state.heard)
            yield WorkerStatus(worker.mover.label, state.pid, said, state.restarts, heard, state.problem)

    def restarts(self) -> dict[str, int]:
        return {worker.mover.label: worker.mover.worker.restarts for worker in self._workers}

    def problems(self, now: float) -> Iterator[str]:
        for worker in self._workers:
            match self._state(worker, now):
                case "away":
                    left = worker.mover.worker.due - now
                    when = f" in {left:.0f} s" if left >= 1 and not worker.mover.worker.is_up else ""
                    yield f"{_called(worker)} has no pool, and is tried again{when}: {_why_away(worker.mover.worker)}"
                case "silent":
                    silence = now - worker.mover.worker.heard
                    yield f"the worker of {_called(worker)} has said nothing for {silence:.0f} s"
            if worker.health is not None and worker.health.problem:
                yield f"{_called(worker)}: {worker.health.problem}"

    def why_away(self) -> str:
        """Of the tier, which is away when no device has a pool; empty while one has."""
        if any(worker.pool is not None for worker in self._workers):
            return ""
        return "; ".join(f"{_called(worker)}: {_why_away(worker.mover.worker)}" for worker in self._workers)

    def warnings(self) -> Iterator[str]:
        for worker in self._workers:
            pool, health = worker.pool, worker.health
            if pool is not None and pool.num_bytes < self._asked_bytes:
                there = f"{human_size(pool.num_bytes)} of {human_size(self._asked_bytes)} (gpu_bytes)"
                yield f"the pool of {_called(worker)} has {there}: {pool.problem or 'no more could be had'}"
            if health is None:
                continue
            if health.kind != PoolKind.MEMFD and not health.is_pinned and health.why_not_pinned:
                yield f"copies to and from {_called(worker)} are slow, memory is not pinned: {health.why_not_pinned}"
            if min(health.device_numa, health.arena_numa) >= 0 and health.device_numa != health.arena_numa:
                yield (
                    f"{_called(worker)} is at NUMA node {health.device_numa} and host memory at {health.arena_numa}: "
                    f"copies cross between them; start the node with numactl --membind={health.device_numa}"
                )


def _called(worker: DeviceWorker) -> str:
    return f"{worker.mover.label} ({worker.name})"


def _why_away(state: WorkerState) -> str:
    if state.problem:
        return state.problem
    return "its worker is starting"
