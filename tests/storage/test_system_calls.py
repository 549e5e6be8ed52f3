from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.system_calls import MAX_INTERRUPTIONS, Failure, call


class Failing:
    """Fails with an errno a number of times, then answers."""

    def __init__(self, number: int, times: int) -> None:
        self.number = number
        self.times = times
        self.calls = 0

    def __call__(self, value: int) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self.number, os.strerror(self.number))
        return value


def test_an_interrupted_call_is_repeated() -> None:
    interrupted = Failing(errno.EINTR, 3)
    assert call("read", interrupted, 7) == 7
    assert interrupted.calls == 4


def test_a_call_that_is_always_interrupted_fails_in_the_end() -> None:
    interrupted = Failing(errno.EINTR, 10**6)
    with pytest.raises(StorageError, match="EINTR"):
        call("read", interrupted, 7)
    assert interrupted.calls == MAX_INTERRUPTIONS


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, Reason.DISK_FULL),
        (errno.EDQUOT, Reason.DISK_FULL),
        (errno.EROFS, Reason.READ_ONLY),
        (errno.ENOENT, Reason.NOT_FOUND),
        (errno.EIO, Reason.IO_ERROR),
        (errno.EMFILE, Reason.TOO_MANY_FILES),
        (errno.ENFILE, Reason.TOO_MANY_FILES),
        (errno.EACCES, Reason.NO_ACCESS),
        (errno.ESTALE, Reason.IO_ERROR),
        (errno.ETIMEDOUT, Reason.IO_ERROR),
    ],
)
def test_an_error_is_named_once_with_call_errno_and_reason(number: int, reason: Reason) -> None:
    with pytest.raises(StorageError) as caught:
        call("pwritev", Failing(number, 1), 7)
    failure = Failure.of(caught.value)
    assert failure == Failure(reason, "pwritev", errno.errorcode[number], os.strerror(number))
    assert isinstance(caught.value.__cause__, OSError)


def test_the_problem_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"absent"):
        call("open", os.open, tmp_path / "absent", os.O_RDONLY)


def test_an_error_number_without_a_name_is_still_told() -> None:
    with pytest.raises(StorageError, match="failed with 9999"):
        call("open", Failing(9999, 1), 7)
