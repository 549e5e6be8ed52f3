from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import pytest

from tests.faults.system_calls import Fault, inject
from tests.storage.samples import FINGERPRINT, Sample, path_of
from tierkv.core.instructions import (
    ExtentRow,
    GroupFound,
    OpenNamespace,
    Recovered,
    RecoveryProgress,
    Report,
    Rows,
)
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage import header_pool, recovery
from tierkv.storage.catalog import Catalog, DropRow, PutRow, TouchedRow
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import read_header
from tierkv.storage.format import frame_header
from tierkv.storage.header_reader import HeaderJob
from tierkv.storage.index_row import IndexedFile, Namespace
from tierkv.storage.namespace import write_namespace
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.recovery import clear_temp, recover
from tierkv.storage.walk import Strays, list_extents

IS_ROOT = os.geteuid() == 0


@dataclass
class Start:
    """What one start told."""

    recovered: Recovered
    reports: list[Report] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)

    @property
    def rows(self) -> dict[bytes, ExtentRow]:
        return {row.key: row for report in self.reports if isinstance(report, Rows) for row in report.rows}

    @property
    def groups(self) -> list[bytes]:
        return [report.group for report in self.reports if isinstance(report, GroupFound)]


@contextmanager
def index_of(directory: DataDirectory) -> Iterator[Catalog]:
    with (
        directory.folder(("index",)) as index_fd,
        Catalog(index_fd, store_id=directory.store_id, map_bytes=2**20) as catalog,
    ):
        yield catalog


def start(
    directory: DataDirectory,
    *,
    now: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    quarantine_bytes: int = 2**20,
) -> Start:
    reports: list[Report] = []
    quarantine = Quarantine(directory, max_bytes=quarantine_bytes, max_age_seconds=1e9)
    with index_of(directory) as catalog:
        moment = time.time() if now is None else now
        recovered = recover(directory, catalog, quarantine, emit=reports.append, now=moment, clock=clock)
    return Start(recovered, reports, quarantine.files())


def fill(directory: DataDirectory, count: int) -> list[Sample]:
    samples = [Sample(seed=100 * number + 1) for number in range(count)]
    for sample in samples:
        write_namespace(directory, OpenNamespace(group=sample.group, identity=sample.identity, model_name="small"))
        sample.write(directory)
    return samples


def keys_of(samples: list[Sample]) -> set[bytes]:
    return {sample.name.key for sample in samples}


def test_without_an_index_every_header_is_read_and_with_it_none(directory: DataDirectory) -> None:
    samples = fill(directory, 5)
    first = start(directory)
    assert (first.recovered.headers_read, first.recovered.index_rows) == (5, 0)
    assert first.recovered.index_rebuilt
    second = start(directory)
    assert (second.recovered.headers_read, second.recovered.index_rows) == (0, 5)
    assert not second.recovered.index_rebuilt
    assert second.rows == first.rows
    assert set(first.rows) == keys_of(samples)


def test_a_row_says_what_the_file_is(directory: DataDirectory) -> None:
    (sample,) = fill(directory, 1)
    row = start(directory).rows[sample.name.key]
    found = read_header(directory, sample.name)
    assert row == ExtentRow(
        key=sample.name.key,
        parent=sample.parent,
        first_token=0,
        keys=sample.keys,
        block_bytes=sample.block_bytes,
        file_bytes=found.file_bytes,
        created=found.header.created,
        last_used=found.modified,
        hits=0,
    )


def test_a_group_is_told_before_its_rows(directory: DataDirectory) -> None:
    (sample,) = fill(directory, 1)
    reports = [report for report in start(directory).reports if not isinstance(report, RecoveryProgress)]
    assert reports[0] == GroupFound(sample.group, sample.identity, "small")
    assert isinstance(reports[1], Rows)


def test_rows_come_in_batches(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "ROWS_OF_A_REPORT", 2)
    samples = fill(directory, 5)
    for _ in ("from headers", "from the index"):
        told = start(directory)
        batches = [len(report.rows) for report in told.reports if isinstance(report, Rows)]
        assert sorted(batches) == [1, 2, 2]
        assert set(told.rows) == keys_of(samples)


def test_long_extents_make_smaller_batches(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "KEY_BYTES_OF_A_REPORT", 1)
    fill(directory, 3)
    batches = [len(report.rows) for report in start(directory).reports if isinstance(report, Rows)]
    assert batches == [1, 1, 1]


def test_a_row_without_a_file_is_dropped(directory: DataDirectory) -> None:
    samples = fill(directory, 3)
    start(directory)
    path_of(directory, samples[0].name).unlink()
    shutil.rmtree(path_of(directory, samples[1].name).parent)  # its whole shelf
    assert set(start(directory).rows) == keys_of(samples[2:])
    with index_of(directory) as catalog:
        assert catalog.count() == 1


def test_rows_of_a_folder_that_is_gone_are_dropped(directory: DataDirectory) -> None:
    fill(directory, 3)
    start(directory)
    shutil.rmtree(directory.path / "models" / FINGERPRINT)
    assert start(directory).recovered.extents == 0
    with index_of(directory) as catalog:
        assert catalog.count() == 0


def test_folders_that_a_killed_writer_has_not_flushed_are_flushed_before_their_files_count(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recovered is told to engines as flushed: a power loss must not take it back."""
    samples = fill(directory, 3)
    flushed: set[Path] = set()
    fsync = os.fsync

    def noting(fd: int) -> None:
        fsync(fd)
        flushed.add(Path(os.readlink(f"/proc/self/fd/{fd}")))

    monkeypatch.setattr(os, "fsync", noting)
    for _ in range(2):
        with DataDirectory.open(directory.path) as opened:  # of another process, for all it knows
            flushed.clear()
            start(opened)
        for sample in samples:
            above = path_of(directory, sample.name).parents
            assert set(above[: above.index(directory.path) + 1]) <= flushed


def test_a_folder_that_can_not_be_flushed_is_told_and_its_files_are_served(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = fill(directory, 3)
    with monkeypatch.context() as patch:
        Fault(patch, "fsync", errno.EIO)
        recovered = start(directory).recovered
    assert recovered.extents == len(samples)
    assert recovered.unreadable > 0


def test_a_row_of_an_earlier_file_of_that_name_is_corrected(directory: DataDirectory) -> None:
    """The index may have missed that a file was removed and another one, of equal size, written under its name."""
    (old,) = fill(directory, 1)
    start(directory)
    with index_of(directory) as catalog:
        known = catalog.read(b"")
        assert isinstance(known, dict)
        (indexed,) = known.values()
        assert indexed is not None
        name = Namespace.of(old.name).row_name(old.name.key)
        wrong = ExtentRow(old.name.key, b"p" * 32, 64, old.name.key * 3, 4096, indexed.row.file_bytes, 1.0, 2.0, 9)
        catalog.apply([PutRow(name, IndexedFile(wrong, indexed.inode, indexed.changed_ns - 1))])
    again = start(directory)
    assert again.recovered.headers_read == 1
    assert again.rows[old.name.key].keys == old.keys
    assert start(directory).recovered.index_rows == 1


@pytest.mark.parametrize(
    "change",
    [{"key": b"x" * 32}, {"keys": b"x" * 96}, {"keys": b"short"}, {"keys": b""}, {"block_bytes": 0}],
)
def test_a_row_that_contradicts_itself_is_corrected(directory: DataDirectory, change: dict[str, object]) -> None:
    (sample,) = fill(directory, 1)
    right = start(directory).rows[sample.name.key]
    fields = {name: getattr(right, name) for name in right.__struct_fields__}
    status = path_of(directory, sample.name).stat()
    with index_of(directory) as catalog:
        wrong = ExtentRow(**(fields | change))
        name = Namespace.of(sample.name).row_name(sample.name.key)
        catalog.apply([PutRow(name, IndexedFile(wrong, status.st_ino, status.st_ctime_ns))])
    again = start(directory)
    assert again.recovered.headers_read == 1
    assert again.rows == {sample.name.key: right}


def test_a_row_that_has_rotted_is_corrected_from_the_file(directory: DataDirectory) -> None:
    """Wherever it did: of another length, of another parent, with other keys, it would be believed against the file."""
    (sample,) = fill(directory, 1)
    right = start(directory).rows
    name = Namespace.of(sample.name).row_name(sample.name.key)
    path = str(directory.path / "index")
    with lmdb.open(path, lock=False, max_dbs=2) as env, env.begin(db=env.open_db(b"rows")) as transaction:
        size = len(transaction.get(name))
    for at in range(0, size, 7):
        with lmdb.open(path, lock=False, max_dbs=2) as env, env.begin(db=env.open_db(b"rows"), write=True) as writing:
            value = bytearray(writing.get(name))
            value[at] ^= 1
            writing.put(name, bytes(value))
        again = start(directory)
        assert (again.rows, again.recovered.headers_read) == (right, 1), f"byte {at}"


@pytest.mark.parametrize("spoil", ["delete", "truncate", "garbage", "stale", "empty"])
def test_whatever_became_of_the_index_the_rows_are_the_same(directory: DataDirectory, spoil: str) -> None:
    samples = fill(directory, 6)
    before = start(directory).rows
    data = directory.path / "index" / "data.mdb"
    match spoil:
        case "delete":
            shutil.rmtree(directory.path / "index")
            (directory.path / "index").mkdir()
        case "truncate":
            os.truncate(data, data.stat().st_size // 2)
        case "garbage":
            data.write_bytes(os.urandom(50_000))
        case "empty":
            data.write_bytes(b"")
        case "stale":
            with index_of(directory) as catalog:
                catalog.apply([DropRow(Namespace.of(s.name).row_name(s.name.key)) for s in samples[:3]])
    again = start(directory)
    assert again.rows == before
    assert again.recovered.headers_read == (3 if spoil == "stale" else 6)


def test_what_is_used_and_hit_survives_with_the_index(directory: DataDirectory) -> None:
    (sample,) = fill(directory, 1)
    start(directory)
    with index_of(directory) as catalog:
        catalog.apply([TouchedRow(Namespace.of(sample.name).row_name(sample.name.key), 1_700_000_123.0, 17)])
    row = start(directory).rows[sample.name.key]
    assert (row.last_used, row.hits) == (1_700_000_123.0, 17)


@pytest.mark.parametrize("touched", [4e9, 1.0])
def test_what_is_used_and_hit_is_known_from_the_index_whatever_becomes_of_the_file_s_times(
    directory: DataDirectory, touched: float
) -> None:
    used, unused = fill(directory, 2)
    start(directory, now=1_700_000_050.0)
    with index_of(directory) as catalog:
        catalog.apply([TouchedRow(Namespace.of(used.name).row_name(used.name.key), 1_700_000_123.0, 17)])
    for sample in (used, unused):
        os.utime(path_of(directory, sample.name), (touched, touched))
    for _ in ("the rows are corrected", "and believed"):
        rows = start(directory, now=1_750_000_000.0).rows
        assert (rows[used.name.key].last_used, rows[used.name.key].hits) == (1_700_000_123.0, 17)
        assert rows[unused.name.key].last_used < 1_700_000_123.0


@pytest.mark.scenario("B247", then="times in the future are taken for now when a directory is read")
def test_times_in_the_future_are_taken_for_now(directory: DataDirectory) -> None:
    (sample,) = fill(directory, 1)
    os.utime(path_of(directory, sample.name), (4e9, 4e9))
    for now, source in ((1_800_000_000.0, "header"), (1_750_000_000.0, "index"), (1_600_000_000.0, "both times")):
        row = start(directory, now=now).rows[sample.name.key]
        assert row.last_used == now, source
        assert row.created == min(now, 1_700_000_000.25), source


class Zoo:
    """A data directory with good extents and everything that may stand between them."""

    def __init__(self, directory: DataDirectory) -> None:
        self.directory = directory
        self.good = fill(directory, 4)
        *others, self.unreadable = [Sample(seed=1_000 + number) for number in range(8)]
        empty, one_byte, folder, link, pipe, foreign_version, truncated = others
        for sample in others:
            path_of(directory, sample.name).parent.mkdir(exist_ok=True)
        path_of(directory, empty.name).touch()
        path_of(directory, one_byte.name).write_bytes(b"x")
        path_of(directory, folder.name).mkdir()
        path_of(directory, link.name).symlink_to("/nowhere/at/all")
        os.mkfifo(path_of(directory, pipe.name))
        path_of(directory, foreign_version.name).write_bytes(frame_header(b"of tomorrow", 9))
        truncated.write(directory)
        os.truncate(path_of(directory, truncated.name), 8192)
        self.unreadable.write(directory)
        path_of(directory, self.unreadable.name).chmod(0)
        shelf = path_of(directory, self.good[0].name).parent
        (shelf / "notes.txt").write_text("mine")
        (shelf / ("A" * 64 + ".kv")).write_text("not a name of ours")
        (shelf.parent / "zz").mkdir()
        (shelf.parent.parent / "70000").mkdir()
        (directory.path / "models" / "stray").write_text("mine")
        (directory.path / "README").write_text("mine")
        (directory.path / "tmp" / "notes.txt").write_text("mine")
        (directory.path / "tmp" / "123-0123abcd-4.tmp").write_bytes(b"half written")
        self.damaged = [empty, one_byte, truncated]
        self.foreign = [link, folder, pipe]


@pytest.mark.scenario(
    "B111",
    then="the start comes to its end between files of every bad kind: the good ones are found, temp files of dead"
    " writers go, what is not ours stays and is counted as foreign",
)
def test_a_zoo_of_files_disturbs_nothing(directory: DataDirectory) -> None:
    zoo = Zoo(directory)
    told = start(directory)
    readable = [zoo.unreadable] if IS_ROOT else []
    assert set(told.rows) == keys_of(zoo.good + readable)
    recovered = told.recovered
    assert recovered.quarantined == 3
    assert sorted(name.rsplit("-", 1)[1] for name in told.quarantined) == sorted(s.name.file for s in zoo.damaged)
    assert recovered.unknown_format == 1
    assert recovered.temp_removed == 1
    assert recovered.unreadable == (0 if IS_ROOT else 1)
    # link, folder and FIFO; notes.txt, A*64.kv, zz, 70000, stray, README, tmp/notes.txt
    assert recovered.foreign == 10
    for sample in zoo.foreign:
        assert os.path.lexists(path_of(directory, sample.name))
    assert (directory.path / "tmp" / "notes.txt").read_text() == "mine"
    assert not (directory.path / "tmp" / "123-0123abcd-4.tmp").exists()
    again = start(directory)
    assert again.rows == told.rows
    assert (again.recovered.quarantined, again.recovered.foreign) == (0, 10)


def test_a_folder_that_cannot_be_listed_costs_its_files_for_now_and_not_their_rows(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = fill(directory, 3)
    before = start(directory)
    victim = samples[0].name.folder[-1]

    def refuse(folder_fd: int, shelf: str, strays: Strays) -> list[os.DirEntry[str]]:
        if shelf == victim:
            raise StorageError("listdir", "EIO", Reason.IO_ERROR, "Input/output error")
        return list_extents(folder_fd, shelf, strays)

    monkeypatch.setattr("tierkv.storage.recovery.list_extents", refuse)
    told = start(directory)
    assert told.recovered.unreadable == 1
    assert set(told.rows) == keys_of(samples[1:])
    monkeypatch.undo()
    again = start(directory)
    assert again.rows == before.rows
    assert again.recovered.headers_read == 0


@pytest.mark.parametrize("nth", range(8))
def test_no_row_is_dropped_for_want_of_a_listing(directory: DataDirectory, nth: int) -> None:
    samples = fill(directory, 3)
    before = start(directory)
    with inject(errno.EIO, "scandir", nth=nth):
        start(directory)
    again = start(directory)
    assert again.rows == before.rows
    assert (again.recovered.index_rows, again.recovered.headers_read) == (len(samples), 0)


def test_a_file_that_cannot_be_read_for_now_is_skipped_and_comes_back(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = fill(directory, 3)
    victim = samples[1].name.file
    real_open = os.open

    def failing_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == victim:
            raise OSError(5, "Input/output error")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", failing_open)
    told = start(directory)
    assert set(told.rows) == keys_of([samples[0], samples[2]])
    assert (told.recovered.unreadable, told.recovered.quarantined) == (1, 0)
    monkeypatch.undo()
    assert set(start(directory).rows) == keys_of(samples)


@pytest.mark.scenario(
    "B059",
    then="the start succeeds with what is there, and the one that is gone counts neither as damage nor as foreign",
)
def test_a_file_that_vanishes_between_listing_and_reading_is_no_error(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = fill(directory, 3)

    def listing_then_loss(folder_fd: int, shelf: str, strays: Strays) -> list[os.DirEntry[str]]:
        found = list_extents(folder_fd, shelf, strays)
        path_of(directory, samples[1].name).unlink(missing_ok=True)
        return found

    monkeypatch.setattr("tierkv.storage.recovery.list_extents", listing_then_loss)
    told = start(directory)
    assert set(told.rows) == keys_of([samples[0], samples[2]])
    assert (told.recovered.unreadable, told.recovered.quarantined, told.recovered.foreign) == (0, 0, 0)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff", "another"])
def test_a_group_without_its_identity_is_left_alone(directory: DataDirectory, content: bytes | str | None) -> None:
    (sample,) = fill(directory, 1)
    start(directory)
    words = directory.path / "models" / FINGERPRINT / sample.group.hex() / "identity.json"
    original = words.read_bytes()
    if content is None:
        words.unlink()
    elif isinstance(content, bytes):
        words.write_bytes(content)
    else:
        words.write_bytes(original.replace(b"bfloat16", b"float16"))
    told = start(directory)
    assert told.groups == []
    assert told.rows == {}
    assert told.recovered.foreign == 1
    assert path_of(directory, sample.name).exists()
    words.write_bytes(original)
    assert set(start(directory).rows) == {sample.name.key}


def test_a_group_in_the_folder_of_another_model_is_left_alone(directory: DataDirectory) -> None:
    fill(directory, 1)
    models = directory.path / "models"
    (models / FINGERPRINT).rename(models / ("cd" * 32))
    told = start(directory)
    assert told.rows == {}
    assert told.groups == []


def test_a_file_moved_to_another_rank_is_not_taken_for_it(directory: DataDirectory) -> None:
    (sample,) = fill(directory, 1)
    path = path_of(directory, sample.name)
    elsewhere = path.parents[2] / "1" / path.parent.name
    elsewhere.mkdir(parents=True)
    path.rename(elsewhere / path.name)
    told = start(directory)
    assert told.rows == {}
    assert told.recovered.quarantined == 1
    assert Reason.IDENTITY_MISMATCH in told.quarantined[0]


@pytest.mark.scenario(
    "B110",
    then="a rebuild of the index rewrites no file and no checksum; the first read of the damaged block is checksum",
)
def test_payload_damage_is_left_for_the_first_read(directory: DataDirectory) -> None:
    (sample,) = fill(directory, 1)
    path = path_of(directory, sample.name)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert set(start(directory).rows) == {sample.name.key}
    assert path.read_bytes() == raw
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason) == (2, Reason.CHECKSUM)


def test_progress_is_told_a_few_times_a_second(directory: DataDirectory) -> None:
    ticks = iter(range(100_000))
    fill(directory, 3)
    progress = [r for r in start(directory, clock=lambda: next(ticks) * 0.1).reports if isinstance(r, RecoveryProgress)]
    assert progress
    assert all(0 <= report.done <= report.total for report in progress)


def test_an_empty_data_directory_is_recovered_too(directory: DataDirectory) -> None:
    told = start(directory)
    assert told.reports == []
    assert told.recovered.extents == 0


def test_a_lost_index_folder_costs_the_index_only(directory: DataDirectory) -> None:
    samples = fill(directory, 2)
    reports: list[Report] = []
    quarantine = Quarantine(directory, max_bytes=2**20, max_age_seconds=1e9)
    with directory.folder(("index",)) as index_fd:
        shutil.rmtree(directory.path / "index")
        with Catalog(index_fd, store_id=directory.store_id, map_bytes=2**20) as catalog:
            recovered = recover(directory, catalog, quarantine, emit=reports.append, now=time.time())
    assert recovered.extents == len(samples)
    (directory.path / "index").mkdir()


def test_a_restart_within_an_incarnation_only_clears_the_temp_files(directory: DataDirectory) -> None:
    zoo = Zoo(directory)
    recovered = clear_temp(directory)
    assert (recovered.temp_removed, recovered.extents, recovered.quarantined) == (1, 0, 0)
    assert path_of(directory, zoo.damaged[0].name).exists()


class TestSeveralProcesses:
    """With thresholds so low that a handful of files is worth several of them."""

    @pytest.fixture(autouse=True)
    def low_thresholds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(header_pool, "FILES_WORTH_A_PROCESS", 2)

    def test_they_find_what_one_finds(self, directory: DataDirectory) -> None:
        zoo = Zoo(directory)
        told = start(directory)
        assert keys_of(zoo.good) <= set(told.rows)
        assert told.recovered.quarantined == 3
        assert told.recovered.unknown_format == 1
        assert told.recovered.foreign == 10

    def test_one_that_dies_is_done_without(self, directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        samples = fill(directory, 6)
        real_submit = header_pool.HeaderPool.submit

        def submit_and_kill(pool: header_pool.HeaderPool, job: HeaderJob) -> None:
            real_submit(pool, job)
            for reader in pool._readers:
                reader.process.kill()

        monkeypatch.setattr(header_pool.HeaderPool, "submit", submit_and_kill)
        assert set(start(directory).rows) == keys_of(samples)

    def test_one_that_can_not_be_started_is_done_without(
        self, directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        samples = fill(directory, 6)

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(subprocess, "Popen", refuse)
        assert set(start(directory).rows) == keys_of(samples)

    def test_one_that_falls_silent_costs_its_files_for_now(
        self, directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        samples = fill(directory, 6)
        monkeypatch.setattr(header_pool, "STALL_SECONDS", 0.0)
        monkeypatch.setattr(recovery, "PROGRESS_SECONDS", 0.001)
        script = "import time\ntime.sleep(60)\n"
        monkeypatch.setattr(header_pool, "READER_COMMAND", ("-c", script))
        told = start(directory)
        assert told.recovered.unreadable + told.recovered.extents == len(samples)
        assert told.recovered.unreadable >= 2
        assert told.recovered.quarantined == 0
        assert all(path_of(directory, sample.name).exists() for sample in samples)
