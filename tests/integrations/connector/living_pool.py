"""The worker of the living node's device, on threads of this process: the real one, on the CPU device, whose copies
overtake each other. It ends as by kill -9: its channel is cut, whatever is under way."""

from __future__ import annotations

import mmap
import random
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tierkv.device.cpu import CpuBackend, Job
from tierkv.device.memory import HostMemory, MemfdPool
from tierkv.wire.session import DeviceGrant
from tierkv.workers.channel import worker_end
from tierkv.workers.device.worker import DeviceWorker

LONGEST_SECONDS = 0.003


class _Copy:
    def __init__(self, made: Future[None]) -> None:
        self._made = made
        self.seconds = 0.0

    @property
    def is_done(self) -> bool:
        return self._made.done()

    def wait(self, timeout_seconds: float) -> bool:
        wait([self._made], timeout_seconds)
        return self._made.done()


class OvertakingCopies:
    """A Carry, with threads of its own until `close`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="device copy")
        self._chance = random.Random(1)

    def __call__(self, job: Job) -> _Copy:
        return _Copy(self._threads.submit(self._make, job))

    def _make(self, job: Job) -> None:
        time.sleep(self._chance.uniform(0.0, LONGEST_SECONDS))  # so that the next one may be first
        job()

    def close(self) -> None:
        self._threads.shutdown()


class LivingPool:
    """One epoch. `front_end` is the front's end of the channel, to be handed over and closed."""

    def __init__(self, arena_fd: int, arena_bytes: int, num_bytes: int, *, epoch: int, base: int) -> None:
        self.epoch = epoch
        self.base = base
        self.memory = MemfdPool.make(num_bytes)
        self._arena = mmap.mmap(arena_fd, arena_bytes)
        self.front_end, self._end = socket.socketpair()
        self._copies = OvertakingCopies()
        self._channel = worker_end(self._end)
        self._deaths: list[str] = []
        self._worker = DeviceWorker(
            self._channel,
            HostMemory.of(self._arena),
            CpuBackend(self._copies),
            self.memory,
            epoch,
            on_death=self._deaths.append,
        )
        self._thread = threading.Thread(target=self._worker.run, name="device")
        self._thread.start()

    @property
    def grant(self) -> DeviceGrant:
        return DeviceGrant(
            device=0,
            epoch=self.epoch,
            uuid="cpu",
            base=self.base,
            num_bytes=self.memory.num_bytes,
            kind=self.memory.kind,
        )

    def kill(self) -> None:
        """Nothing of it touches any memory when this returns. Those who have mapped the pool keep it."""
        self._end.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._copies.close()
        self._worker.close()
        self._channel.close()
        self._end.close()
        self.memory.close()
