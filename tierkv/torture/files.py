"""The real files of a storage worker, with a barrier before and after everything that a crash could tear apart, and
faults now and then where the disk is in the mood for them: before it has done something, after, or half-way."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from tierkv.core.identity import Identity
from tierkv.core.instructions import Read, Write
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome, Verified, WrittenFile
from tierkv.storage.names import ExtentName, Parts
from tierkv.storage.system_calls import Failure
from tierkv.torture.barriers import is_armed, reach
from tierkv.torture.disk import MoodReader
from tierkv.torture.oracle import UNFINISHED, unfinished
from tierkv.workers.files import Files


class TorturedFiles(Files):
    def __init__(self) -> None:
        self._random = random.Random(os.getpid())
        self._moods = MoodReader()

    def reached(self, stage: str, write: Write) -> None:
        reach(stage)

    def write(
        self, directory: DataDirectory, arena: memoryview, write: Write, identity: Identity
    ) -> WrittenFile | Failure:
        if self._fails():
            return _failure("pwritev")
        written = super().write(directory, arena, write, identity)
        return _failure("rename") if self._fails() else written

    def read(self, directory: DataDirectory, arena: memoryview, read: Read, identity: Identity | None) -> ReadOutcome:
        if is_armed("read_half"):
            _spoil(arena, read.slots)  # as far as a read got that was cut short
            reach("read_half")
        outcome = super().read(directory, arena, read, identity)
        reach("read_done")
        if not self._fails():
            return outcome
        valid = self._random.randint(0, outcome.valid)
        _spoil(arena, read.slots[valid:])
        return ReadOutcome(valid, Reason.IO_ERROR, "made up", failure=_failure("preadv"))

    def verify(self, directory: DataDirectory, name: ExtentName, pause: Callable[[int], None]) -> Verified:
        reach("scrubbing")
        return super().verify(directory, name, pause)

    def remove(self, directory: DataDirectory, name: ExtentName) -> bool:
        reach("before_remove")
        self._fail("open")
        was_there = super().remove(directory, name)
        reach("removed")
        self._fail("unlink")
        return was_there

    def status(self, directory: DataDirectory, name: ExtentName) -> os.stat_result:
        self._fail("stat")
        return super().status(directory, name)

    def set_mtime(self, directory: DataDirectory, name: ExtentName, seconds: float) -> None:
        self._fail("utime")
        super().set_mtime(directory, name, seconds)

    def flush(self, directory: DataDirectory, folder: Parts) -> None:
        reach("before_flush")
        self._fail("fsync")
        super().flush(directory, folder)
        reach("flushed")

    def _fails(self) -> bool:
        part = self._moods.now().error_part
        return part > 0 and self._random.random() < part

    def _fail(self, operation: str) -> None:
        if self._fails():
            raise StorageError(operation, "EIO", Reason.IO_ERROR, "made up")


def _spoil(arena: memoryview, slots: tuple[int, ...] | list[int]) -> None:
    garbage = unfinished(2 * len(UNFINISHED), os.getpid()).tobytes()
    for slot in slots:
        arena[slot : slot + len(garbage)] = garbage


def _failure(operation: str) -> Failure:
    return Failure(Reason.IO_ERROR, operation, "EIO", "made up")
