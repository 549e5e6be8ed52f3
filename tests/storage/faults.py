"""Faults at the border: a call of `os` that fails, is cut short, or does something first."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

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


class Fault:
    """Replaces `os.<operation>`: calls `first` .. `first + times - 1`, counted from 0, fail with `number`."""

    def __init__(
        self, patch: pytest.MonkeyPatch, operation: str, number: int, *, first: int = 0, times: int = 10**9
    ) -> None:
        self.calls = 0
        real: Callable[..., Any] = getattr(os, operation)

        def call(*args: Any, **kwargs: Any) -> Any:
            index, self.calls = self.calls, self.calls + 1
            if first <= index < first + times:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        patch.setattr(os, operation, call)


class ShortTransfers:
    """Replaces `os.preadv` or `os.pwritev`: each call moves at most `limit` bytes."""

    def __init__(self, patch: pytest.MonkeyPatch, operation: str, limit: int) -> None:
        self.calls = 0
        real: Callable[..., int] = getattr(os, operation)

        def call(fd: int, views: list[memoryview], offset: int) -> int:
            self.calls += 1
            left, some = limit, []
            for view in views:
                if left:
                    some.append(view[:left])
                    left -= len(some[-1])
            return real(fd, some, offset)

        patch.setattr(os, operation, call)
