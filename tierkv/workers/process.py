"""A worker as a process: what it inherits, how it ends.

It ends when it is told to, when the front or the supervisor is gone, or as a whole when one of its threads dies.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
from collections.abc import Callable
from typing import NoReturn

from tierkv.core.instructions import AnyInstruction, Report
from tierkv.workers.channel import BlockingChannel, worker_end
from tierkv.workers.device.config import DeviceWorkerConfig
from tierkv.workers.lifeline import EXIT_THREAD_DIED, end_with_parent, end_with_pipe
from tierkv.workers.tier_config import TierWorkerConfig

log = logging.getLogger(__name__)


def begin_process(
    config: TierWorkerConfig | DeviceWorkerConfig, name: str
) -> tuple[BlockingChannel[Report, AnyInstruction], memoryview]:
    """Its channel, and the arena, which is mapped until the process ends. From here on it lives as long as its
    supervisor at the most."""
    end_with_parent(config.parent_pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what a terminal sends to all: the supervisor says when to stop
    logging.basicConfig(level=config.log_level.upper(), format=f"%(asctime)s %(levelname)s {name}: %(message)s")
    end_with_pipe(config.lifeline_fd)
    channel = worker_end(socket.socket(fileno=config.channel_fd))
    arena = memoryview(mmap.mmap(config.arena_fd, config.arena_bytes))
    os.close(config.arena_fd)
    return channel, arena


def run_process(main: Callable[[], int], name: str) -> NoReturn:
    """End this process with what `main` returns."""
    try:
        status = main()
    except Exception:  # the main thread died, and the process with it, like for any other of its threads
        log.exception("the %s worker", name)
        status = EXIT_THREAD_DIED
    logging.shutdown()
    os._exit(status)  # a thread may sit in a system call of a sick disk; nothing of this process is waited for
