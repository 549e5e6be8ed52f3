"""Everything of a device worker but its process: tests run it on a thread.

    channel -> main thread -> the backend's streams
    copies         waits for what is in flight, and reports it
    pinning        registers the arena with the driver, which takes a second for some ten gigabytes; copies go meanwhile
    device-pulse   health each second

Instructions are submitted in the order in which they come and may complete in any other: the core never has two in
flight that touch the same slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tierkv.core.instructions import (
    AnyInstruction,
    CopyDone,
    Download,
    OpFailed,
    PoolReady,
    Report,
    Stop,
    Stopped,
    Upload,
    Zero,
    Zeroed,
)
from tierkv.core.reasons import Reason
from tierkv.device.backends import Backend, OwnPool
from tierkv.device.memory import HostMemory
from tierkv.device.numa import node_of_memory
from tierkv.errors import DeviceError, DeviceLost
from tierkv.workers.channel import BlockingChannel
from tierkv.workers.device.in_flight import InFlight
from tierkv.workers.device.vital_signs import PERIOD_SECONDS, DeviceFacts, VitalSigns
from tierkv.workers.lifeline import OnDeath, end_process, start_thread
from tierkv.workers.roll import Roll

log = logging.getLogger(__name__)

RECEIVE_SECONDS = 0.5
SEND_SECONDS = 60.0
"""A front that reads nothing for so long is gone or to be replaced: this process ends, and another is started."""
CLOSE_SECONDS = 10.0

Channel = BlockingChannel[Report, AnyInstruction]


class DeviceWorker:
    """`run` returns when it was stopped, when the front is gone, or with a `failure`: the device can't be used any
    more. Then `close` it, unless the process ends anyway: pool and backend stay the caller's."""

    def __init__(
        self,
        channel: Channel,
        arena: HostMemory,
        backend: Backend,
        pool: OwnPool,
        epoch: int,
        *,
        health_seconds: float = PERIOD_SECONDS,
        on_death: OnDeath = end_process,
    ) -> None:
        self.failure: DeviceError | None = None
        self._channel = channel
        self._arena = arena
        self._backend = backend
        self._pool = pool
        roll = Roll()
        self._receiver = roll.post("MainThread")
        self._report([PoolReady(epoch, pool.num_bytes, pool.problem)])
        self._in_flight = InFlight(self._report, self._lose, on_death=on_death)
        facts = DeviceFacts(
            name=backend.name,
            kind=pool.kind,
            numa_node=backend.numa_node,
            arena_numa_node=node_of_memory(arena.address, arena.num_bytes),
        )
        self._signs = VitalSigns(
            facts, self._in_flight, roll, self._report, period_seconds=health_seconds, on_death=on_death
        )
        self._report([self._signs.health()])
        self._pinning = start_thread("pinning", self._pin, on_death=on_death)
        self._signs.start()

    def run(self) -> None:
        while not self._channel.ended and self.failure is None:
            for instruction in self._channel.receive(RECEIVE_SECONDS):
                with self._receiver.at(type(instruction).__name__):
                    if isinstance(instruction, Stop):
                        self._stop(instruction)
                        return
                    self._take(instruction)
        if self.failure is None:
            log.info("the front is gone")

    def close(self) -> None:
        """End the threads. Nothing is reported any more."""
        self._in_flight.close(CLOSE_SECONDS)
        self._signs.close(CLOSE_SECONDS)
        self._pinning.join(CLOSE_SECONDS)

    # ---------------------------------------------------------------- instructions

    def _take(self, instruction: AnyInstruction) -> None:
        if self.failure is not None:  # nothing is answered any more: the end of this process is the answer
            return
        try:
            match instruction:
                case Upload():
                    self._upload(instruction)
                case Download():
                    self._download(instruction)
                case Zero():
                    pending = self._backend.zero(self._pool, instruction.ranges)
                    self._in_flight.add(instruction.op, pending, lambda _seconds: Zeroed(instruction.op))
                case _:
                    log.error("%s is not for the worker of a device", type(instruction).__name__)
        except DeviceLost as lost:
            self._lose(lost)
        except (DeviceError, ValueError) as refused:  # nothing of it runs: a backend sees to that before it raises
            op = getattr(instruction, "op", -1)
            log.error("operation %d: %s", op, str(refused))
            self._report([OpFailed(op, Reason.DEVICE_DOWN, str(refused))])

    def _upload(self, order: Upload) -> None:
        pending = self._backend.upload(self._arena, order.host, self._pool, order.slots, order.block_bytes)
        self._in_flight.add(order.op, pending, lambda seconds: self._copied("upload", order, seconds))

    def _download(self, order: Download) -> None:
        pending = self._backend.download(self._pool, order.slots, self._arena, order.host, order.block_bytes)
        self._in_flight.add(order.op, pending, lambda seconds: self._copied("download", order, seconds))

    def _copied(self, way: str, order: Upload | Download, seconds: float) -> CopyDone:
        self._signs.note_copy(way, len(order.slots) * order.block_bytes, seconds)
        return CopyDone(order.op, seconds)

    def _stop(self, stop: Stop) -> None:
        deadline = time.monotonic() + stop.budget_seconds
        if not self._in_flight.wait_empty(stop.budget_seconds):
            log.warning("stopped with %d copies in flight", len(self._in_flight))
        self._signs.close(max(0.0, deadline - time.monotonic()))
        self._report([Stopped()])

    # ---------------------------------------------------------------- the rest

    def _pin(self) -> None:
        begin = time.monotonic()
        pinning = self._backend.register_host(self._arena)
        self._signs.pinning = pinning
        if pinning.is_pinned:
            log.info("pinned %d bytes of the arena in %.2f s", self._arena.num_bytes, time.monotonic() - begin)
        elif self._backend.cuda_version:
            log.warning("the arena is not pinned, copies to and from the GPU are slower: %s", pinning.why_not)

    def _lose(self, lost: DeviceLost) -> None:
        if self.failure is None:
            log.critical("the device is lost: %s", str(lost))
            self.failure = lost

    def _report(self, reports: Sequence[Report]) -> None:
        self._channel.send(reports, timeout_seconds=SEND_SECONDS)
