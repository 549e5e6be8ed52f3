"""A disk that fails now and then, as a storage worker meets it: before it has done something, after, or half-way."""

from __future__ import annotations

import os
import random
from typing import Any

from e2e.chaos_barriers import HeldFiles
from e2e.chaos_bytes import GARBAGE
from tierkv.core.identity import Identity
from tierkv.core.instructions import Read, Write
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome, WrittenFile
from tierkv.storage.names import ExtentName, Parts
from tierkv.storage.system_calls import Failure

FAULT_PART = 0.02


class FaultyFiles(HeldFiles):
    """One operation in so many fails, wherever it is. What fails once works the next time."""

    def __init__(self) -> None:
        self._random = random.Random(os.getpid())

    def write(
        self, directory: DataDirectory, arena: memoryview, write: Write, identity: Identity
    ) -> WrittenFile | Failure:
        if self._fails():
            return _failure("pwritev")
        written = super().write(directory, arena, write, identity)
        return _failure("rename") if self._fails() else written

    def read(self, directory: DataDirectory, arena: memoryview, read: Read, identity: Any) -> ReadOutcome:
        outcome = super().read(directory, arena, read, identity)
        if not self._fails():
            return outcome
        valid = self._random.randint(0, outcome.valid)
        for slot in read.slots[valid:]:
            arena[slot : slot + len(GARBAGE)] = GARBAGE
        return ReadOutcome(valid, Reason.IO_ERROR, "made up", failure=_failure("preadv"))

    def remove(self, directory: DataDirectory, name: ExtentName) -> bool:
        self._fail("open")
        was_there = super().remove(directory, name)
        self._fail("unlink")
        return was_there

    def status(self, directory: DataDirectory, name: ExtentName) -> os.stat_result:
        self._fail("stat")
        return super().status(directory, name)

    def set_mtime(self, directory: DataDirectory, name: ExtentName, seconds: float) -> None:
        self._fail("utime")
        super().set_mtime(directory, name, seconds)

    def flush(self, directory: DataDirectory, folder: Parts) -> None:
        self._fail("fsync")
        super().flush(directory, folder)

    def _fails(self) -> bool:
        return self._random.random() < FAULT_PART

    def _fail(self, operation: str) -> None:
        if self._fails():
            raise StorageError(operation, "EIO", Reason.IO_ERROR, "made up")


def _failure(operation: str) -> Failure:
    return Failure(Reason.IO_ERROR, operation, "EIO", "made up")
