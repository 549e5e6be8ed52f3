"""A front or a storage worker, one of whose threads meets an exception when a test says so.

For tierkv.torture.node_with. The file that DYING_LOOPS names holds "PROCESS THREAD NUMBER": a thread of that name (io
stands for io-0) raises, once for each number. An exception reaches a thread when it next runs; the test sees to it that
it does.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "DYING_LOOPS"
POLL_SECONDS = 0.02

AT_THEIR_START = ("scrub", "purge")
"""Live shortly: they raise when they begin."""

IN_THE_SYSTEM = ("supervisor-watch",)
"""Sit in a call that nothing ends: what raises in their place is who waits for them."""


class LoopBroken(Exception):
    """What nobody foresaw."""


class Order:
    def __init__(self, process: str) -> None:
        self._process = process
        self._file = Path(os.environ[VARIABLE])
        self._last = self._read()

    def _read(self) -> list[str]:
        try:
            return self._file.read_text().split()
        except OSError:
            return []

    def take(self, thread: str | None = None) -> str | None:
        """The thread that is to raise, if there is a new order for this process (and that thread)."""
        found = self._read()
        if len(found) != 3 or found == self._last or found[0] != self._process:
            return None
        if thread is not None and found[1] != thread:
            return None
        self._last = found
        return found[1]

    def done(self) -> None:
        """Who comes next, in the place of this process, is not to do it again."""
        self._file.write_text("")


def raise_in(name: str) -> None:
    """In a thread that runs operations, until the loop itself has met it: what an operation meets fails only that."""
    threads = [one for one in threading.enumerate() if one.name in (name, f"{name}-0")]
    while True:
        for thread in threads:
            if thread.ident is not None and thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(LoopBroken))
        if name != "io" or not any(thread.is_alive() for thread in threads):
            return
        time.sleep(10 * POLL_SECONDS)  # as below


def watch(order: Order) -> None:
    while True:
        time.sleep(POLL_SECONDS)  # between two looks, for as long as the process lives
        name = order.take()
        if name is not None and name not in AT_THEIR_START + IN_THE_SYSTEM:
            raise_in(name)


def breaking(start: Callable[..., Any], process: str) -> Callable[..., Any]:
    """Of lifeline.start_thread."""

    def start_thread(name: str, target: Callable[[], None], **options: Any) -> Any:
        kind = name.partition("-")[0]
        if kind in AT_THEIR_START:
            order = Order(process)
            order._last = []

            def begin() -> None:
                if order.take(kind):
                    order.done()
                    raise LoopBroken
                target()

            return start(name, begin, **options)
        if name in IN_THE_SYSTEM:
            order = Order(process)

            def wait() -> None:
                threading.Thread(target=target, daemon=True).start()
                while not order.take(name):
                    time.sleep(POLL_SECONDS)  # as above
                raise LoopBroken

            return start(name, wait, **options)
        return start(name, target, **options)

    return start_thread


def main() -> int:
    process = "front" if sys.argv[1].isdigit() else "storage"
    threading.Thread(target=watch, args=(Order(process),), daemon=True).start()
    if process == "front":
        from tierkv.node import front

        return front.main(sys.argv[1:])
    from tierkv.workers import (
        bookkeeper,
        flusher,
        index_writer,
        key_queue,
        lifeline,
        pulse,
        scrubber,
        storage,
        sweeper,
        tier_health,
    )

    start = breaking(lifeline.start_thread, process)
    for module in (bookkeeper, flusher, index_writer, key_queue, lifeline, pulse, scrubber, sweeper, tier_health):
        module.start_thread = start  # type: ignore[attr-defined]
    return storage.main(sys.argv[1:])


if __name__ == "__main__":
    try:
        status = main()
    except LoopBroken:
        status = 70
    os._exit(status)
