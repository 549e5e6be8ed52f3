"""The worker of a device "cpu" whose copies are made by several threads, with a barrier before and behind each.

For DeviceWorkerConfig.copies ("tierkv.torture.device:copies"). Stages: before_device_copy, device_copy_made. Copies
overtake each other, so that what relies on an order that nobody promised fails.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tierkv.device.backends import Backend
from tierkv.device.cpu import CpuBackend, Job
from tierkv.torture.barriers import reach
from tierkv.workers.device.config import DeviceWorkerConfig

THREADS = 4
LONGEST_SECONDS = 0.005


class _Copy:
    def __init__(self, made: Future[float]) -> None:
        self._made = made

    @property
    def is_done(self) -> bool:
        return self._made.done() and self.seconds >= 0.0

    def wait(self, timeout_seconds: float) -> bool:
        wait([self._made], timeout_seconds)
        return self.is_done

    @property
    def seconds(self) -> float:
        return self._made.result() if self._made.done() else 0.0


class OvertakingCopies:
    """A Carry for as long as the process lives."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="device copy")
        self._chance = random.Random()

    def __call__(self, job: Job) -> _Copy:
        return _Copy(self._pool.submit(self._make, job))

    def _make(self, job: Job) -> float:
        begin = time.perf_counter()
        reach("before_device_copy")
        time.sleep(self._chance.uniform(0.0, LONGEST_SECONDS))  # so that the next one may be first
        job()
        reach("device_copy_made")
        return time.perf_counter() - begin


def copies(config: DeviceWorkerConfig) -> Backend:
    return CpuBackend(OvertakingCopies())
