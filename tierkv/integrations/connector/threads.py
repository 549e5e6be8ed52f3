"""Threads that are all there from the start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def start_threads(count: int, name: str) -> ThreadPoolExecutor:
    """All `count` of them run when this returns. A process that has no thread left says so here (RuntimeError), at its
    start, and not in the middle of a step, when what was submitted would already be queued for nobody."""
    threads = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_there = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            threads.submit(all_there.wait)
    except BaseException:
        all_there.abort()
        threads.shutdown(wait=True, cancel_futures=True)
        raise
    all_there.wait()
    return threads
