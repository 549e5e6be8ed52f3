"""The watch over the worker of a device, and over the pool that it exports for engines.

    worker starts, PoolOffer on its export socket with the pool's descriptor     offered
    front hears PoolReady on the worker's channel, and says so                   open: sessions may map it
    worker dies, or the incarnation ends                                         descriptor closed, sessions told

The descriptor is the only hold that we have on the pool. It is closed as soon as the worker is dead, so that the memory
lives on only where an engine still maps it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from tierkv.config import Settings
from tierkv.errors import WireError
from tierkv.node.children import Backoff, Child
from tierkv.node.control import MAX_DESCRIPTORS, MAX_PACKET_BYTES, WorkerName, descriptor_room, descriptors_in
from tierkv.node.worker_command import WorkerResources, start_device_worker
from tierkv.node.worker_watch import Died, WorkerWatch
from tierkv.wire.pools import PoolFailed, PoolKind, PoolOffer, decode_pool_message

LAST_DELAY_SECONDS = 30.0
"""So long at most a device that can't be used is left alone: whoever has its memory may let go of it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pool:
    """`fd` -1: its kind has no descriptor. It is the watch's, and good until the pool has ended."""

    offer: PoolOffer
    fd: int


class DeviceWatch(WorkerWatch):
    """Of the device at place `device` of gpu_devices. `on_end(device, epoch)` is called when a pool is gone that
    sessions may have mapped."""

    def __init__(self, settings: Settings, device: int, on_end: Callable[[int, int], None]) -> None:
        super().__init__(WorkerName.DEVICE, self._launch_device, Backoff(LAST_DELAY_SECONDS), device=device)
        self._settings = settings
        self._on_end = on_end
        self._epoch = 0
        self._export: socket.socket | None = None
        self._offered: Pool | None = None
        self._said = ""
        name = settings.device_names[device]
        self.uuid = name if name.startswith("cpu") else ""
        """What engines call the device; empty until a worker of it has said so once."""

    def pool(self) -> Pool | None:
        """What sessions may map now."""
        return self._offered if self.is_recovered else None

    @property
    def why_away(self) -> str:
        """In words, while there is no pool."""
        return self._last_how or "its worker is starting"

    def filenos(self) -> list[int]:
        """Readable when `hear` has something to do."""
        return [self._export.fileno()] if self._export is not None else []

    def hear(self) -> None:
        """What the worker has said of its pool. One that can't be understood is ended."""
        while self._export is not None:
            try:
                packet, ancillary, _, _ = self._export.recvmsg(
                    MAX_PACKET_BYTES, descriptor_room(MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                continue
            descriptors = descriptors_in(ancillary)
            if not packet:
                self._close_export()
                return
            self._take(packet, descriptors)

    def _take(self, packet: bytes, descriptors: list[int]) -> None:
        try:
            message = decode_pool_message(packet)
            if isinstance(message, PoolFailed):
                self._said = message.problem
            elif message.epoch == self._epoch and self._offered is None:
                self._offered = self._checked(message, descriptors)
        except WireError as error:
            log.error("the %s worker can't be understood; ending it: %s", self.label, error)
            self.kill()
        for fd in descriptors:
            if self._offered is None or fd != self._offered.fd:
                os.close(fd)

    def _checked(self, offer: PoolOffer, descriptors: list[int]) -> Pool:
        if offer.num_bytes > self._settings.device_bytes[self.device]:
            raise WireError("malformed", f"a pool of {offer.num_bytes} bytes, which is more than was asked for")
        if (len(descriptors) == 1) == (offer.kind is PoolKind.IPC):
            raise WireError("malformed", f"a pool of kind {offer.kind} with {len(descriptors)} descriptors")
        self.uuid = self.uuid if self.uuid.startswith("cpu") else offer.uuid
        return Pool(offer, descriptors[0] if descriptors else -1)

    def _launch_device(self, resources: WorkerResources, *, sends_rows: bool, discard_index: bool) -> Child:
        self._epoch += 1
        self._said = ""
        self._export, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._export.setblocking(False)
        self.is_recovered = False
        with theirs:
            return start_device_worker(
                self._settings, resources, self.device, epoch=self._epoch, export_fd=theirs.fileno()
            )

    def recovered(self, pid: int) -> None:
        """The front knows the pool, so that sessions may map it; unless that one is gone already."""
        if self._child is not None and self._child.pid == pid:
            super().recovered(pid)

    # ---- the end

    def reap(self, now: float, *, is_stopping: bool) -> Died | None:
        died = super().reap(now, is_stopping=is_stopping)
        if died is not None:
            self._end_pool()
        return died

    def _why_dead(self) -> str:
        self.hear()  # its last words
        return self._said

    def _had_begun(self) -> bool:
        return not self._said  # a PoolFailed is all that one without a pool says

    def incarnation_ended(self) -> None:
        """What the pool held was of that incarnation; nobody is given its slots any more."""
        super().incarnation_ended()
        self._end_pool()

    def wait(self) -> None:
        super().wait()
        self._end_pool()

    def _end_pool(self) -> None:
        self.is_recovered = False
        self._close_export()
        if (offered := self._offered) is None:
            return
        self._offered = None
        if offered.fd >= 0:
            os.close(offered.fd)
        self._on_end(self.device, offered.offer.epoch)

    def _close_export(self) -> None:
        if self._export is not None:
            self._export.close()
            self._export = None
