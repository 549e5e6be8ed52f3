"""Files of a storage worker that are wrong on purpose, so that a torture can be shown to find it."""

from __future__ import annotations

import itertools
import os

from tierkv.core.identity import Identity
from tierkv.core.instructions import Read, Write
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome, WrittenFile
from tierkv.storage.names import TEMP, ExtentName
from tierkv.storage.system_calls import Failure
from tierkv.torture.files import TorturedFiles


class FlippingFiles(TorturedFiles):
    """A bit changes in memory between the check of a block and its use."""

    def read(self, directory: DataDirectory, arena: memoryview, read: Read, identity: Identity | None) -> ReadOutcome:
        outcome = super().read(directory, arena, read, identity)
        arena[read.slots[0] + 5_000] ^= 16
        return outcome


class _WritesWith(TorturedFiles):
    def __init__(self) -> None:
        super().__init__()
        self._writes = itertools.count(1)

    def write(
        self, directory: DataDirectory, arena: memoryview, write: Write, identity: Identity
    ) -> WrittenFile | Failure:
        written = super().write(directory, arena, write, identity)
        self.spoil(directory, ExtentName.of(write), next(self._writes))
        return written

    def spoil(self, directory: DataDirectory, name: ExtentName, number: int) -> None:
        raise NotImplementedError


class ForgetfulFiles(_WritesWith):
    """Every fifth file is gone as soon as it is written."""

    def spoil(self, directory: DataDirectory, name: ExtentName, number: int) -> None:
        if number % 5 == 0:
            self.remove(directory, name)


class LeakyFiles(_WritesWith):
    """Every third write leaves a descriptor open."""

    def spoil(self, directory: DataDirectory, name: ExtentName, number: int) -> None:
        if number % 3 == 0:
            os.open("/dev/null", os.O_RDONLY)


class LitteringFiles(_WritesWith):
    """The tenth write leaves a file in tmp/."""

    def spoil(self, directory: DataDirectory, name: ExtentName, number: int) -> None:
        if number == 10:
            (directory.path / TEMP / "1-0badf00d-1.tmp").touch()
