"""What the supervisor tells the worker of a device when it starts it.

python -m tierkv.workers.device.process CONFIG     one argument: a DeviceWorkerConfig as JSON; descriptors are inherited

Exit codes: 0 stopped when told to, or the front is gone; 2 the device can't be used; 70 a thread died; 71 the
supervisor is gone.
"""

from __future__ import annotations

from typing import Self

import msgspec


class DeviceWorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors are numbers of open files that the worker inherits and owns from then on.

    `device` is "cpu" (a pool in a memfd) or a CUDA device's index. `num_bytes` of it are wanted; fewer do.
    `epoch` is this pool's. `channel_fd` leads to the front, `export_fd` to the supervisor: a PoolOffer with the pool's
    descriptor, or a PoolFailed, goes there once. `lifeline_fd` is the reading end of a pipe whose other end only the
    supervisor holds. `copies` names, as "module:attribute", a callable that makes what carries copies out; empty is the
    real one, and anything else is for tests.
    """

    device: str
    index: int
    num_bytes: int
    epoch: int
    channel_fd: int
    export_fd: int
    arena_fd: int
    arena_bytes: int
    lifeline_fd: int
    parent_pid: int
    log_level: str = "info"
    copies: str = ""

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        return msgspec.json.decode(text, type=cls, strict=True)
