"""Faults at the border to the system: calls of `os` that fail, are cut short, lie, or wait until somebody lets them go.

    with inject(errno.EIO, "pwritev", nth=2):            the third call fails, the ones after it do not
    with inject(errno.ENOSPC, "open", times=ALWAYS):     every call fails until the end of the block
    with hold("fdatasync") as barrier:                   the first call waits, until barrier.release()

The code under test is the real one: `os.<operation>` is replaced for as long as the block lasts, in this process. Calls
are counted from 0, those of all threads together.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

ALWAYS = 10**9
WAIT_SECONDS = 20.0

ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.EACCES,
    errno.ESTALE,
    errno.ETIMEDOUT,
)

ALL_ERRNOS = (*ERRNOS, errno.ENOENT, errno.EINTR)
"""Those of `ERRNOS`, and two that mean something else to a caller: there is no such file, and try again."""

Condition = Callable[[tuple[Any, ...], dict[str, Any]], bool]


def _module(operation: str) -> ModuleType:
    """Where a function lies that is replaced."""
    return fcntl if operation in ("fcntl", "flock") else os


def _any_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


class Fault:
    """Replaces `os.<operation>`: calls `first` .. `first + times - 1`, counted from 0, fail with `number`.

    Only calls for which `when(args, kwargs)` holds are counted and may fail.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        operation: str,
        number: int,
        *,
        first: int = 0,
        times: int = ALWAYS,
        when: Condition = _any_call,
    ) -> None:
        self.calls = 0
        self.failed = 0
        lock = threading.Lock()
        real: Callable[..., Any] = getattr(_module(operation), operation)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not when(args, kwargs):
                return real(*args, **kwargs)
            with lock:
                index, self.calls = self.calls, self.calls + 1
                fails = first <= index < first + times
                self.failed += fails
            if fails:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        patch.setattr(_module(operation), operation, call)


@contextmanager
def inject(
    number: int, operation: str, nth: int = 0, times: int = 1, *, when: Condition = _any_call
) -> Iterator[Fault]:
    """`times` calls of `os.<operation>` from the `nth` on fail with `number`."""
    with pytest.MonkeyPatch.context() as patch:
        yield Fault(patch, operation, number, first=nth, times=times, when=when)


class ShortTransfers:
    """Replaces `os.preadv`, `os.pwritev` or `os.write`: each call moves at most `limit` bytes; 0 moves none."""

    def __init__(self, patch: pytest.MonkeyPatch, operation: str, limit: int) -> None:
        self.calls = 0
        real: Callable[..., int] = getattr(os, operation)

        def vectored(fd: int, views: list[memoryview], offset: int) -> int:
            self.calls += 1
            left, some = limit, []
            for view in views:
                if left:
                    some.append(view[:left])
                    left -= len(some[-1])
            return real(fd, some, offset) if limit else 0

        def plain(fd: int, content: bytes | memoryview) -> int:
            self.calls += 1
            return real(fd, content[:limit]) if limit else 0

        patch.setattr(os, operation, plain if operation == "write" else vectored)


class FlippedBit:
    """Replaces `os.preadv` or `os.pread`: what was read from file offset `at` comes back with a bit of it flipped, as
    from a disk that lies. `times` reads of that byte do, counted from the first."""

    def __init__(
        self, patch: pytest.MonkeyPatch, operation: str, *, at: int, bit: int = 0, times: int = ALWAYS
    ) -> None:
        self.flipped = 0
        real: Callable[..., Any] = getattr(os, operation)

        def preadv(fd: int, views: list[memoryview], offset: int) -> int:
            count: int = real(fd, views, offset)
            where = at - offset
            if 0 <= where < count and self.flipped < times:
                for view in views:
                    if where < len(view):
                        view[where] ^= 1 << bit
                        self.flipped += 1
                        break
                    where -= len(view)
            return count

        def pread(fd: int, size: int, offset: int) -> bytes:
            found = bytearray(real(fd, size, offset))
            if 0 <= at - offset < len(found) and self.flipped < times:
                found[at - offset] ^= 1 << bit
                self.flipped += 1
            return bytes(found)

        patch.setattr(os, operation, preadv if operation == "preadv" else pread)


class Barrier:
    """Where one call waits. The test waits until it got there, and lets it go."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._released = threading.Event()

    def wait_reached(self, timeout_seconds: float = WAIT_SECONDS) -> None:
        assert self._reached.wait(timeout_seconds), "no call came to the barrier"

    @property
    def is_reached(self) -> bool:
        return self._reached.is_set()

    def release(self) -> None:
        self._released.set()

    def arrive(self) -> None:
        """Called at the place that is held."""
        self._reached.set()
        assert self._released.wait(WAIT_SECONDS), "nobody released the barrier"


@contextmanager
def hold(operation: str, nth: int = 0, *, when: Condition = _any_call, after: bool = False) -> Iterator[Barrier]:
    """The `nth` call of `os.<operation>` waits before it does anything (`after`: when it has done it). Leaving the
    block lets it go."""
    barrier = Barrier()
    real: Callable[..., Any] = getattr(os, operation)
    lock = threading.Lock()
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        is_it = False
        if when(args, kwargs):
            with lock:
                is_it, calls = calls == nth, calls + 1
        if is_it and not after:
            barrier.arrive()
        answer = real(*args, **kwargs)
        if is_it and after:
            barrier.arrive()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, operation, call)
        try:
            yield barrier
        finally:
            barrier.release()


class Calls:
    """Every call of `os` that the code made, in order, by name: what a matrix of faults is made of.

    `FUNCTIONS` are the calls through which storage touches the system; tests/faults/test_system_calls.py compares them
    with those that its source names."""

    FUNCTIONS = (
        "open",
        "read",
        "write",
        "pread",
        "preadv",
        "pwrite",
        "pwritev",
        "stat",
        "fstat",
        "fstatvfs",
        "listdir",
        "scandir",
        "mkdir",
        "makedirs",
        "rmdir",
        "unlink",
        "rename",
        "link",
        "symlink",
        "fchmod",
        "chmod",
        "fsync",
        "fdatasync",
        "ftruncate",
        "truncate",
        "posix_fadvise",
        "posix_fallocate",
        "utime",
        "fcntl",
        "flock",
        "dup",
        "dup2",
        "readlink",
    )

    def __init__(self) -> None:
        self.made: list[str] = []

    def count(self) -> dict[str, int]:
        return {name: self.made.count(name) for name in dict.fromkeys(self.made)}


@contextmanager
def record_calls() -> Iterator[Calls]:
    calls = Calls()

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.made.append(name)
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in Calls.FUNCTIONS:
            patch.setattr(_module(name), name, noting(name, getattr(_module(name), name)))
        yield calls
