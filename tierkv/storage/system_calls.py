"""The border to the operating system: every call on a file goes through `call`, which names it when it fails.

An OSError is translated here, once. What the layers above see is a StorageError with a reason from the closed list,
the call's name and the errno's name (the two labels that failures are counted by), or its value form, a Failure.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from tierkv.core.reasons import Reason
from tierkv.errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")

# Python repeats interrupted calls by itself, except where a file system answers EINTR of its own accord (network and
# user-space ones do). Bounded, because a file system that answers nothing else must not hold a thread for ever.
MAX_INTERRUPTIONS = 100

_REASONS = {
    errno.ENOSPC: Reason.DISK_FULL,
    errno.EDQUOT: Reason.DISK_FULL,
    errno.EROFS: Reason.READ_ONLY,
    errno.ENOENT: Reason.NOT_FOUND,
    errno.EMFILE: Reason.TOO_MANY_FILES,
    errno.ENFILE: Reason.TOO_MANY_FILES,
    errno.EACCES: Reason.NO_ACCESS,
    errno.EPERM: Reason.NO_ACCESS,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """A file operation that did not happen. `problem` is for the log; the rest is for counting and deciding."""

    reason: Reason
    operation: str
    errno_name: str
    problem: str

    @classmethod
    def of(cls, error: StorageError) -> Failure:
        return cls(Reason(error.reason), error.operation, error.errno_name, error.problem)


def call(operation: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args, **kwargs)`, an interruption repeated, any other OSError raised as a StorageError."""
    interruptions = 0
    while True:
        try:
            return function(*args, **kwargs)
        except InterruptedError as error:
            interruptions += 1
            if interruptions >= MAX_INTERRUPTIONS:
                raise translate(operation, error) from error
        except OSError as error:
            raise translate(operation, error) from error


def translate(operation: str, error: OSError) -> StorageError:
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    problem = error.strerror or os.strerror(number)
    if error.filename is not None:
        problem = f"{problem}: {os.fsdecode(error.filename)}"
    return StorageError(operation, name, _REASONS.get(number, Reason.IO_ERROR), problem)
