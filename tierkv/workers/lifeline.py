"""A worker lives and dies whole: with its supervisor, and with each of its threads.

A worker that outlives its supervisor would write beside the next node; one whose threads have died in part would look
alive and do nothing. Both end at once, without cleaning up: whatever state the files are in, the next start can read.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable

from tierkv.core.loops import is_known
from tierkv.errors import BrokenInvariant

log = logging.getLogger(__name__)

EXIT_THREAD_DIED = 70
EXIT_SUPERVISOR_GONE = 71

OnDeath = Callable[[str], None]

_PR_SET_PDEATHSIG = 1


def end_process(thread_name: str) -> None:
    """End this process at once, for its thread has died; the supervisor starts another."""
    log.critical("thread %s died; this process ends", thread_name)
    logging.shutdown()
    os._exit(EXIT_THREAD_DIED)


def start_thread(name: str, target: Callable[[], None], *, on_death: OnDeath = end_process) -> threading.Thread:
    """A thread without which the process is of no use: when `target` raises, `on_death` is called. `name` is that of a
    loop in core/loops.py."""
    if not is_known(name):
        raise BrokenInvariant(f"thread {name!r} has no line in tierkv/core/loops.py")

    def live() -> None:
        try:
            target()
        except BaseException:  # whatever it was, the thread is gone: a half-dead worker must not go on
            log.exception("thread %s", name)
            on_death(name)

    thread = threading.Thread(target=live, name=name, daemon=True)  # none may hold up the end of the process
    thread.start()
    return thread


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; end it now if that has happened already.

    The kernel watches the thread that started this process: the supervisor must start it from its main thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        log.warning("no parent-death signal: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent_pid:
        os._exit(EXIT_SUPERVISOR_GONE)


def end_with_pipe(control_fd: int, *, end: Callable[[int], None] = os._exit) -> threading.Thread:
    """End this process at the end of file of a pipe whose other end only the supervisor holds."""

    def watch() -> None:
        while os.read(control_fd, 512):
            pass  # nothing is said on it
        end(EXIT_SUPERVISOR_GONE)

    return start_thread("supervisor-watch", watch)
