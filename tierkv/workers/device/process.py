"""The worker of a device as a process.

    python -m tierkv.workers.device.process CONFIG        started by the supervisor; see config.py

It makes the pool, hands it to the supervisor (PoolOffer with the descriptor, or PoolFailed), and then does what the
front says. What it holds on the device goes with it, in whatever way it ends: the driver frees a process's memory, and
the pool's with the last process that has it mapped.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial

from tierkv.device.backends import CPU_UUID, Backend, OwnPool, cpu_backend, cuda_backend
from tierkv.device.memory import HostMemory
from tierkv.errors import ConfigError, DeviceError
from tierkv.wire.pools import AnyPoolMessage, PoolFailed, PoolOffer, encode_pool_message
from tierkv.workers.device.config import DeviceWorkerConfig
from tierkv.workers.device.worker import DeviceWorker
from tierkv.workers.lifeline import EXIT_SUPERVISOR_GONE
from tierkv.workers.process import begin_process, run_process

log = logging.getLogger(__name__)

UNUSABLE = 2


def make_backend(config: DeviceWorkerConfig) -> Backend:
    """The device's, or what `copies` names: called with the config. Raises DeviceError, or ConfigError."""
    if config.copies:
        module, _, attribute = config.copies.partition(":")
        try:
            made: Backend = getattr(importlib.import_module(module), attribute)(config)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError("copies", str(error)) from error
        return made
    if config.device == CPU_UUID:
        return cpu_backend()
    # As nvidia-smi counts, and not the fastest first: so a number means the same GPU to whoever reads either.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return cuda_backend(int(config.device))


def main(arguments: Sequence[str]) -> int:
    """See config.py for its argument, and for what it returns."""
    config = DeviceWorkerConfig.decode(arguments[0])
    channel, arena = begin_process(config, f"device {config.index}")
    with socket.socket(fileno=config.export_fd) as export:
        try:
            backend = make_backend(config)
            pool = backend.make_pool(config.num_bytes)
        except (DeviceError, ConfigError) as error:
            log.debug("no pool on device %s: %s", config.device, error)  # the supervisor says it, and not at each try
            _send(export, PoolFailed(epoch=config.epoch, problem=str(error)))
            return UNUSABLE
        if not _send(export, _offer(config, backend, pool), pool.fd):
            return EXIT_SUPERVISOR_GONE
    log.info("a pool of %d bytes on %s (%s), %s", pool.num_bytes, backend.name, backend.uuid, pool.kind)
    if pool.problem:
        log.warning("%s", pool.problem)
    worker = DeviceWorker(channel, HostMemory.of(arena), backend, pool, config.epoch)
    worker.run()
    return 0 if worker.failure is None else UNUSABLE


def _offer(config: DeviceWorkerConfig, backend: Backend, pool: OwnPool) -> PoolOffer:
    return PoolOffer(
        epoch=config.epoch,
        kind=pool.kind,
        uuid=backend.uuid,
        num_bytes=pool.num_bytes,
        cuda_version=backend.cuda_version,
        handle=pool.handle,
        device_name=backend.name,
    )


def _send(export: socket.socket, message: AnyPoolMessage, fd: int = -1) -> bool:
    """False when nobody is there any more."""
    try:
        socket.send_fds(export, [encode_pool_message(message)], [fd] if fd >= 0 else [])
    except OSError as error:
        log.error("the supervisor does not take the pool: %s", error)
        return False
    return True


if __name__ == "__main__":
    run_process(partial(main, sys.argv[1:]), "device")
