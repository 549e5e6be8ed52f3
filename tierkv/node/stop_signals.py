"""Signals as bytes on a socket, so that one loop waits for them beside everything else."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def caught_signals() -> Iterator[socket.socket]:
    """A socket on which each stop signal is one byte, its number; they do nothing else within the block. Only in the
    main thread."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
    previous = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        reading.close()
        writing.close()


def stop_signals_in(received: bytes) -> list[str]:
    """Names of the stop signals among the bytes; the interpreter writes those of other handlers there too."""
    return [signal.Signals(number).name for number in received if number in STOP_SIGNALS]
