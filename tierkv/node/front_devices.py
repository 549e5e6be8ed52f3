"""The front's side of gpu_devices: what their workers say becomes events of the core, in the order that makes it safe.

PoolReady    the core opens the tier, and only then is the supervisor told: sessions may map that pool from now on
mapped       told by the supervisor before the session learns how: the core knows before it grants anything there
death        by waitpid: what the worker had said still counts, then the pool is gone, with every mapping of it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.core.instructions import Alive, AnyReport, PoolReady, Stopped
from tierkv.node.service import Service
from tierkv.node.tier_worker import DeviceWorker


class FrontDevices:
    """`opened(worker)` is told of each pool that the core knows now."""

    def __init__(
        self, workers: Sequence[DeviceWorker], service: Service, opened: Callable[[DeviceWorker], None]
    ) -> None:
        self._workers = workers
        self._service = service
        self._opened = opened

    def on_report(self, worker: DeviceWorker, report: AnyReport, now: float) -> None:
        worker.note(report)
        match report:
            case PoolReady():
                self._service.device_started(worker.device, report.num_bytes, now)
                self._opened(worker)
            case Alive() | Stopped():
                pass  # for the watch, and for who drains
            case _:
                self._service.on_device_report(worker.device, report, now)

    def died(self, worker: DeviceWorker, now: float) -> None:
        """By proof, and its last words were taken. One that never had a pool leaves nothing to be given up."""
        if worker.pool is not None:
            self._service.device_died(worker.device, now)
        worker.gone()

    def mapped(self, token: bytes, device: int) -> None:
        if self._service.map_device(token, device):
            self._workers[device].mapped.add(token)

    def session_ended(self, token: bytes) -> None:
        for worker in self._workers:
            worker.mapped.discard(token)
