"""Each error x each system call of each operation of storage x {once, at each of its calls; always}.

The calls are those of a clean run, so that a new one joins by itself. A whole start makes so many that each
of its calls meets one or two of the errors in turn, and all of them with TIERKV_ERRNO_MATRIX=full.

What must hold in each cell: the operation is done in full or fails by name; once the fault has ended no temp file is
left (at the latest when the next start has cleared them), nothing wrong can be read, no good file is gone, and the next
attempt works.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.system_calls import ALL_ERRNOS, ALWAYS, inject, record_calls
from tests.storage.samples import Sample, path_of, temp_files
from tierkv.core.instructions import OpenNamespace, Report, Rows
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError, TierkvError
from tierkv.storage.catalog import Applied, Catalog, DropRow, IndexFailed, PutRow
from tierkv.storage.digests import DigestMemory
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome, Verified, WrittenFile, read_blocks, remove_extent, verify_file
from tierkv.storage.extent_file import write_extent as write_extent_file
from tierkv.storage.header_reader import HeaderJob, Usable, read_headers
from tierkv.storage.index_row import Namespace
from tierkv.storage.namespace import read_identity, read_model, write_namespace
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.recovery import clear_temp, recover
from tierkv.storage.system_calls import Failure
from tierkv.storage.weight_files import FileStat
from tierkv.workers.files import Files

REASONS = {
    errno.ENOSPC: Reason.DISK_FULL,
    errno.EDQUOT: Reason.DISK_FULL,
    errno.EROFS: Reason.READ_ONLY,
    errno.ENOENT: Reason.NOT_FOUND,
    errno.EMFILE: Reason.TOO_MANY_FILES,
    errno.ENFILE: Reason.TOO_MANY_FILES,
    errno.EACCES: Reason.NO_ACCESS,
}
TOLD_AS = {"scandir": "listdir", "makedirs": "mkdir", "chmod": "mkdir"}
"""Calls that go by the name of another one."""


@dataclass(frozen=True)
class Done:
    """In full, as far as the operation says; `check` looks whether that is so."""

    value: Any = None


@dataclass(frozen=True)
class Failed:
    reason: str
    operation: str
    errno_name: str

    @classmethod
    def of(cls, failure: Failure | StorageError) -> Failed:
        return cls(failure.reason, failure.operation, failure.errno_name)


Outcome = Done | Failed


@dataclass(frozen=True)
class Cell:
    number: int
    call: str
    nth: int
    times: int

    def __str__(self) -> str:
        when = "always" if self.times == ALWAYS else f"once, at call {self.nth}"
        return f"{errno.errorcode[self.number]} of {self.call}, {when}"


class Subject:
    """An operation, on a data directory with two good extents. Tests of one subject share the directory: whatever a
    fault leaves has to be harmless for the next one."""

    one_in = 1  # of the single errors, where there are so many that each takes its turn

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stack = ExitStack()
        self.directory = self.stack.enter_context(DataDirectory.open(root / "data"))
        self.good = [Sample(seed=500), Sample(seed=600)]
        for sample in self.good:
            open_group(self.directory, sample)
            sample.write(self.directory)

    def prepare(self) -> None:
        """Before each run, without a fault."""

    def act(self) -> Outcome:
        raise NotImplementedError

    def check(self, outcome: Outcome) -> None:
        """After the fault has ended: what this operation should have come to, and that it works now."""
        raise NotImplementedError

    def check_all(self, outcome: Outcome) -> None:
        self.check(outcome)
        for sample in self.good:
            assert sample.read(self.directory).valid == sample.num_blocks, "a good file was harmed"
        clear_temp(self.directory)
        assert temp_files(self.directory) == []

    def end(self) -> None:
        self.stack.close()


def open_group(directory: DataDirectory, sample: Sample) -> None:
    write_namespace(directory, OpenNamespace(group=sample.group, identity=sample.identity, model_name="small"))


def told(answer: WrittenFile | Failure) -> Outcome:
    return Failed.of(answer) if isinstance(answer, Failure) else Done(answer)


def attempt(work: Callable[[], Any]) -> Outcome:
    try:
        return Done(work())
    except StorageError as error:
        return Failed.of(error)
    except DataDirectoryError as error:
        cause = error.__cause__
        if not isinstance(cause, StorageError):
            raise
        return Failed.of(cause)


class WritingNew(Subject):
    def prepare(self) -> None:
        self.sample = Sample(seed=1)
        remove_extent(self.directory, self.sample.name)

    def write(self) -> WrittenFile | Failure:
        sample = self.sample
        return write_extent_file(self.directory, sample.arena, sample.write_order(), identity=sample.identity)

    def act(self) -> Outcome:
        return told(self.write())

    def check(self, outcome: Outcome) -> None:
        assert temp_files(self.directory) == [] or isinstance(outcome, Failed)
        there = self.sample.read(self.directory)
        assert there.valid == (3 if isinstance(outcome, Done) else 0)
        assert isinstance(self.write(), WrittenFile)
        assert self.sample.read(self.directory).valid == 3


class WritingOver(WritingNew):
    """A file of that name is there: it is replaced, or stays as it was."""

    def prepare(self) -> None:
        self.sample = Sample(seed=1)
        self.sample.write(self.directory)
        self.inode = path_of(self.directory, self.sample.name).stat().st_ino

    def check(self, outcome: Outcome) -> None:
        is_same = path_of(self.directory, self.sample.name).stat().st_ino == self.inode
        assert is_same == isinstance(outcome, Failed)
        assert self.sample.read(self.directory).valid == 3
        assert isinstance(self.write(), WrittenFile)


class Reading(Subject):
    def prepare(self) -> None:
        self.sample = self.good[0]
        self.sample.arena[3 * 4096 :] = b"\xee" * (3 * 4096)

    def act(self) -> Outcome:
        return self.outcome(read_blocks(self.directory, self.sample.arena, self.sample.read_order()))

    def outcome(self, found: ReadOutcome | Verified) -> Outcome:
        assert not found.damaged, "an error that may pass was taken for damage"
        if found.failure is None:
            assert found.valid == 3
            return Done(found)
        return Failed.of(found.failure)

    def check(self, outcome: Outcome) -> None:
        if isinstance(outcome, Done):
            assert [self.sample.read_back(index) for index in range(3)] == self.sample.blocks


class Verifying(Reading):
    def act(self) -> Outcome:
        return self.outcome(verify_file(self.directory, self.sample.name))

    def check(self, outcome: Outcome) -> None:
        assert verify_file(self.directory, self.sample.name).valid == 3


class Removing(Subject):
    def prepare(self) -> None:
        self.sample = Sample(seed=1)
        self.sample.write(self.directory)

    def act(self) -> Outcome:
        return attempt(lambda: remove_extent(self.directory, self.sample.name))

    def check(self, outcome: Outcome) -> None:
        """ "Not there" may be what the system said; that the file went is what may not be said when it didn't."""
        is_there = path_of(self.directory, self.sample.name).exists()
        if outcome == Done(True):
            assert not is_there
        assert self.sample.read(self.directory).valid == (3 if is_there else 0)
        assert remove_extent(self.directory, self.sample.name) == is_there
        assert not path_of(self.directory, self.sample.name).exists()


class SettingAside(Subject):
    """With so little room in quarantine that something older has to go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.quarantine = Quarantine(self.directory, max_bytes=20_000, max_age_seconds=1e9)

    def prepare(self) -> None:
        self.sample = Sample(seed=1)
        self.sample.write(self.directory)
        self.before = len(os.listdir(self.directory.path / "quarantine"))

    def act(self) -> Outcome:
        return attempt(lambda: self.quarantine.set_aside(self.sample.name, Reason.CHECKSUM, time.time()))

    def check(self, outcome: Outcome) -> None:
        is_there = path_of(self.directory, self.sample.name).exists()
        if outcome == Done(True):
            assert not is_there
        assert self.sample.read(self.directory).valid == (3 if is_there else 0)
        if is_there:
            assert self.quarantine.set_aside(self.sample.name, Reason.CHECKSUM, time.time())
        usage = self.quarantine.prune(time.time())
        assert usage.num_bytes <= 20_000
        assert usage.files == len(os.listdir(self.directory.path / "quarantine"))


class OpeningQuarantine(Subject):
    def act(self) -> Outcome:
        return attempt(lambda: Quarantine(self.directory, max_bytes=1, max_age_seconds=1))

    def check(self, outcome: Outcome) -> None:
        Quarantine(self.directory, max_bytes=1, max_age_seconds=1)


class MakingDirectory(Subject):
    """A data directory that is not there yet, FORMAT and all."""

    one_in = 3

    def prepare(self) -> None:
        self.path = Path(tempfile.mkdtemp(dir=self.root)) / "new"

    def act(self) -> Outcome:
        return attempt(lambda: DataDirectory.open(self.path).close())

    def check(self, outcome: Outcome) -> None:
        with DataDirectory.open(self.path) as opened:
            clear_temp(opened)
            assert temp_files(opened) == []
            self.good[0].write(opened)
            assert self.good[0].read(opened).valid == 3
        shutil.rmtree(self.path.parent)


class OpeningDirectory(Subject):
    def act(self) -> Outcome:
        return attempt(lambda: DataDirectory.open(self.directory.path).close())

    def check(self, outcome: Outcome) -> None:
        with DataDirectory.open(self.directory.path) as opened:
            assert opened.store_id == self.directory.store_id


class MakingGroup(Subject):
    """With the model's folder, which is not there yet either."""

    def prepare(self) -> None:
        self.sample = Sample(block_bytes=8192)
        for path in (self.directory.path / "models").glob(f"*/{self.sample.group.hex()}"):
            shutil.rmtree(path)
        for path in (self.directory.path / "models").glob("*/model.json"):
            path.unlink()

    def act(self) -> Outcome:
        return attempt(lambda: open_group(self.directory, self.sample))

    def check(self, outcome: Outcome) -> None:
        if isinstance(outcome, Done):
            assert read_identity(self.directory, self.sample.name.fingerprint, self.sample.group) is not None
        open_group(self.directory, self.sample)
        assert read_identity(self.directory, self.sample.name.fingerprint, self.sample.group) is not None
        assert read_model(self.directory, self.sample.name.fingerprint) is not None


class FindingGroup(Subject):
    def act(self) -> Outcome:
        name = self.good[0].name
        return attempt(lambda: read_identity(self.directory, name.fingerprint, name.group))

    def check(self, outcome: Outcome) -> None:
        name = self.good[0].name
        assert read_identity(self.directory, name.fingerprint, name.group) is not None


class FlushingFolder(Subject):
    def act(self) -> Outcome:
        return attempt(lambda: self.directory.flush(self.good[0].name.folder))

    def check(self, outcome: Outcome) -> None:
        self.directory.flush(self.good[0].name.folder)


class ClearingTemp(Subject):
    def prepare(self) -> None:
        (self.directory.path / "tmp" / "7-0123abcd-7.tmp").write_bytes(b"half")

    def act(self) -> Outcome:
        return attempt(self.directory.clear_temp)

    def check(self, outcome: Outcome) -> None:
        if isinstance(outcome, Done):
            assert temp_files(self.directory) == []


class Touching(Subject):
    def act(self) -> Outcome:
        return attempt(lambda: Files().set_mtime(self.directory, self.good[0].name, 1_700_000_000.0))

    def check(self, outcome: Outcome) -> None:
        Files().set_mtime(self.directory, self.good[0].name, 1_700_000_000.0)


class ReadingHeaders(Subject):
    def act(self) -> Outcome:
        name = self.good[0].name
        job = HeaderJob(name.fingerprint, name.group, name.rank, name.key, time.time())
        (found,) = read_headers(self.directory, job)
        if isinstance(found, Usable):
            return Done(found)
        assert found.outcome in ("unreadable", "gone"), found
        operation, name_of_error = found.problem.split(" failed with ")
        return Failed(found.reason, operation, name_of_error.split(":")[0])

    def check(self, outcome: Outcome) -> None:
        assert isinstance(self.act(), Done)


class OpeningIndex(Subject):
    """Opening, reading, writing and closing the index: it never fails, for the files hold the truth."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.folder_fd = self.stack.enter_context(self.directory.folder(("index",)))
        name = self.good[0].name
        (found,) = read_headers(
            self.directory, HeaderJob(name.fingerprint, name.group, name.rank, name.key, time.time())
        )
        assert isinstance(found, Usable)
        self.row = PutRow(Namespace.of(name).row_name(name.key), found.file)

    def act(self) -> Outcome:
        with Catalog(self.folder_fd, store_id=self.directory.store_id, map_bytes=2**20) as catalog:
            found = catalog.read(b"")
            assert isinstance(found, IndexFailed) or found in ({}, {self.row.name: self.row.value})
            catalog.count()
            catalog.namespaces()
            catalog.apply([self.row])
            catalog.finish_opening()
        return Done()

    def check(self, outcome: Outcome) -> None:
        with Catalog(self.folder_fd, store_id=self.directory.store_id, map_bytes=2**20) as catalog:
            assert isinstance(catalog.apply([self.row]), Applied)
            assert catalog.read(b"") == {self.row.name: self.row.value}
            assert isinstance(catalog.apply([DropRow(self.row.name)]), Applied)
            assert catalog.count() == 0


class Recovering(Subject):
    """A whole start, with something damaged and a temp file in the way: it never fails either."""

    one_in = 8

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.folder_fd = self.stack.enter_context(self.directory.folder(("index",)))
        self.quarantine = Quarantine(self.directory, max_bytes=2**20, max_age_seconds=1e9)

    def prepare(self) -> None:
        self.damaged = Sample(seed=1)
        self.damaged.write(self.directory)
        os.truncate(path_of(self.directory, self.damaged.name), 5000)
        (self.directory.path / "tmp" / "7-0123abcd-7.tmp").write_bytes(b"half")
        (self.directory.path / "index" / "data.mdb").unlink(missing_ok=True)

    def act(self) -> Outcome:
        return Done(self.start())

    def start(self) -> set[bytes]:
        reports: list[Report] = []
        with Catalog(self.folder_fd, store_id=self.directory.store_id, map_bytes=2**20) as catalog:
            recovered = recover(self.directory, catalog, self.quarantine, emit=reports.append, now=time.time())
        found = {row.key for report in reports if isinstance(report, Rows) for row in report.rows}
        self.unreadable = recovered.unreadable
        assert recovered.extents == len(found)
        return found

    def check(self, outcome: Outcome) -> None:
        assert isinstance(outcome, Done)
        good = {sample.name.key for sample in self.good}
        assert outcome.value <= good | {self.damaged.name.key}
        assert self.start() == good
        assert self.unreadable == 0


class RememberingDigest(Subject):
    def prepare(self) -> None:
        self.stat = FileStat(1, 2, 3, 4, 5)
        self.memory = DigestMemory(self.directory)
        for path in (self.directory.path / "digests").iterdir():
            path.unlink()

    def act(self) -> Outcome:
        return Done(self.memory.remember(self.stat, b"d" * 32, started_ns=2**60))

    def check(self, outcome: Outcome) -> None:
        assert isinstance(outcome, Done)
        if outcome.value:
            assert self.memory.recall(self.stat) == b"d" * 32
        assert self.memory.recall(self.stat) in (None, b"d" * 32)
        assert self.memory.remember(self.stat, b"e" * 32, started_ns=2**60)
        assert self.memory.recall(self.stat) == b"e" * 32


class RecallingDigest(Subject):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.stat = FileStat(1, 2, 3, 4, 5)
        self.memory = DigestMemory(self.directory)
        assert self.memory.remember(self.stat, b"d" * 32, started_ns=2**60)

    def act(self) -> Outcome:
        return Done(self.memory.recall(self.stat))

    def check(self, outcome: Outcome) -> None:
        assert outcome in (Done(None), Done(b"d" * 32))
        assert self.memory.recall(self.stat) == b"d" * 32


MIN_CELLS: dict[type[Subject], int] = {
    WritingNew: 330,
    WritingOver: 330,
    Reading: 190,
    Verifying: 210,
    Removing: 210,
    SettingAside: 170,
    OpeningQuarantine: 50,
    MakingDirectory: 400,
    OpeningDirectory: 480,
    MakingGroup: 550,
    FindingGroup: 100,
    FlushingFolder: 90,
    ClearingTemp: 90,
    Touching: 90,
    ReadingHeaders: 150,
    OpeningIndex: 190,
    Recovering: 300,
    RememberingDigest: 240,
    RecallingDigest: 80,
}
"""Each operation, and a floor under the size of its matrix: it may not shrink unnoticed."""

IS_FULL = os.environ.get("TIERKV_ERRNO_MATRIX") == "full"


@pytest.fixture
def fast_root(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: there are thousands of cells."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="tkv"))
    yield path
    shutil.rmtree(path)


def cells_of(subject: Subject) -> list[Cell]:
    """From the calls of a run in which nothing fails, the second one: the first may have flushed more folders."""
    subject.prepare()
    subject.check_all(subject.act())
    subject.prepare()
    with record_calls() as calls:
        outcome = subject.act()
    assert isinstance(outcome, Done)
    subject.check_all(outcome)
    return [
        Cell(number, name, nth, times)
        for name, count in calls.count().items()
        for turn, number in enumerate(ALL_ERRNOS)
        for nth, times in [(0, ALWAYS), *((nth, 1) for nth in range(count))]
        if times == ALWAYS or IS_FULL or (turn + nth) % subject.one_in == 0
    ]


def run_cell(subject: Subject, cell: Cell) -> None:
    subject.prepare()
    with inject(cell.number, cell.call, cell.nth, cell.times) as fault:
        outcome = subject.act()
    assert fault.failed, "the call was not made"
    if isinstance(outcome, Failed):
        name = errno.errorcode[cell.number]
        expected = REASONS.get(cell.number, Reason.IO_ERROR)
        assert (outcome.errno_name, outcome.reason) == (name, expected)
        assert outcome.operation in (cell.call, TOLD_AS.get(cell.call))
    if cell.number == errno.EINTR and cell.times == 1:
        assert isinstance(outcome, Done), "an interrupted call was not repeated"
    subject.check_all(outcome)


@pytest.mark.parametrize("kind", MIN_CELLS)
def test_each_error_at_each_call_is_told_and_harms_nothing(
    kind: type[Subject], fast_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = kind(fast_root)
    problems: list[str] = []
    try:
        cells = cells_of(subject)
        for cell in cells:
            try:
                run_cell(subject, cell)
            except (AssertionError, TierkvError, OSError) as error:
                problems.append(f"{cell}: {type(error).__name__}: {error}")
    finally:
        subject.end()
    with capsys.disabled():
        print(f" {kind.__name__} {len(cells)} cells", end="")
    assert problems == []
    assert len(cells) >= MIN_CELLS[kind]
