from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.faults.system_calls import ShortTransfers, inject
from tests.storage.samples import FINGERPRINT, Sample
from tests.workers.desk import SECONDS, Desk, remove_order
from tierkv.core.identity import Identity
from tierkv.core.instructions import (
    CancelScrub,
    GroupFound,
    OpFailed,
    ReadDone,
    RemoveDone,
    Scrub,
    ScrubProgress,
    SetAside,
    Stopped,
    TierHealth,
    Touch,
    TouchRow,
    Write,
    WriteDone,
)
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, StorageError
from tierkv.storage.catalog import Catalog, IndexFailed
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome, Verified, WrittenFile
from tierkv.storage.names import ExtentName, Parts
from tierkv.storage.system_calls import Failure
from tierkv.torture.waits import wait_until
from tierkv.workers.files import Files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


def path_of(root: Path, sample: Sample) -> Path:
    return root.joinpath(*sample.name.parts)


def spoil(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def touch_order(sample: Sample, last_used: float, hits: int) -> Touch:
    name = sample.name
    return Touch([TouchRow(name.fingerprint, name.group, name.rank, name.key, last_used, hits)])


# -------------------------------------------------------------------- round trips


def test_what_was_written_is_read_back(root: Path) -> None:
    with Desk(root) as desk:
        sample = Sample(num_blocks=3, extras={1: [b"image"]})
        done = desk.store(sample, 1)
        assert done.file_bytes == path_of(root, sample).stat().st_size
        report = desk.load(sample, 2)
        assert (report.valid, report.reason, report.gone) == (3, None, False)
        assert (report.tokens, report.extras) == (sample.tokens, sample.extras)
        assert [desk.arena.read_back(sample, index) for index in range(3)] == sample.blocks


def test_a_part_of_a_file_is_read_into_the_slots_asked_for_and_no_others(root: Path) -> None:
    with Desk(root) as desk:
        sample = Sample(num_blocks=4)
        desk.store(sample, 1)
        assert desk.load(sample, 2, first=1, count=2).valid == 2
        assert [desk.arena.read_back(sample, index) for index in range(2)] == sample.blocks[1:3]
        assert desk.arena.read_back(sample, 2) == b"\xee" * sample.block_bytes


@pytest.mark.parametrize("index", ["kept", "deleted"])
def test_what_was_flushed_is_found_at_the_next_start(root: Path, index: str) -> None:
    samples = [Sample(seed=50 * number + 1) for number in range(5)]
    with Desk(root) as desk:
        for op, sample in enumerate(samples):
            desk.store(sample, op)
        desk.stop()
    if index == "deleted":
        shutil.rmtree(root / "index")
    with Desk(root) as desk:
        recovered = desk.recovered()
        assert recovered.extents == 5
        assert recovered.headers_read == (0 if index == "kept" else 5)
        assert set(desk.rows) == {sample.name.key for sample in samples}
        assert [r.identity for r in desk.reports if isinstance(r, GroupFound)] == [samples[0].identity]
        assert desk.load(samples[3], 9).valid == 3


def test_a_front_that_went_without_a_word_costs_rows_and_no_extents(root: Path) -> None:
    sample = Sample()
    with Desk(root) as desk:
        desk.store(sample, 1)
    with Desk(root) as desk:
        assert desk.recovered().extents == 1


def test_within_an_incarnation_no_rows_are_sent(root: Path) -> None:
    sample = Sample()
    with Desk(root) as desk:
        desk.store(sample, 1)
        desk.stop()
    (root / "tmp" / "77-0123abcd-5.tmp").write_bytes(b"half")
    with Desk(root, sends_rows=False) as desk:
        recovered = desk.recovered()
        assert (recovered.extents, recovered.temp_removed) == (0, 1)
        assert desk.rows == {}
        assert desk.load(sample, 1).valid == 3
        other = Sample(seed=90)
        desk.send(desk.arena.write_order(other, 2))  # its group is known from the disk
        assert isinstance(desk.answer(2), WriteDone)
        desk.stop()
    with Desk(root) as desk:
        assert desk.recovered().index_rows == 2


# -------------------------------------------------------------------- remove, set aside, touch


def test_a_removed_extent_is_gone_from_disk_and_from_the_index(root: Path) -> None:
    sample = Sample()
    with Desk(root) as desk:
        desk.store(sample, 1)
        desk.send(remove_order(sample, 2), remove_order(sample, 3))
        assert desk.answer(2) == RemoveDone(2)
        assert desk.answer(3) == RemoveDone(3)
        assert not path_of(root, sample).exists()
        assert not path_of(root, sample).parent.exists()
        report = desk.load(sample, 4)
        assert (report.valid, report.reason, report.gone) == (0, Reason.NOT_FOUND, True)
        desk.stop()
    with Desk(root) as desk:
        assert desk.recovered().extents == 0


def test_removing_and_setting_aside_take_the_row_along(root: Path) -> None:
    removed, aside, kept = (Sample(seed=50 * number + 1) for number in range(3))
    with Desk(root) as desk:
        for op, sample in enumerate((removed, aside, kept)):
            desk.store(sample, op)
        name = aside.name
        desk.send(remove_order(removed, 11))
        desk.send(SetAside(12, name.fingerprint, name.group, name.rank, name.key, Reason.REPORTED_BAD))
        desk.stop()
    assert count_rows(root) == 1


def count_rows(root: Path) -> int | IndexFailed:
    with (
        DataDirectory.open(root) as directory,
        directory.folder(("index",)) as index_fd,
        Catalog(index_fd, store_id=directory.store_id, map_bytes=2**20) as catalog,
    ):
        return catalog.count()


def test_what_was_removed_can_be_written_again(root: Path) -> None:
    sample = Sample()
    with Desk(root) as desk:
        desk.store(sample, 1)
        desk.send(remove_order(sample, 2), desk.arena.write_order(sample, 3))
        assert isinstance(desk.answer(2), RemoveDone)
        assert isinstance(desk.answer(3), WriteDone)
        assert desk.load(sample, 4).valid == 3


def test_an_extent_reported_bad_goes_to_quarantine_and_can_be_replaced(root: Path) -> None:
    sample = Sample()
    with Desk(root) as desk:
        desk.store(sample, 1)
        inode = path_of(root, sample).stat().st_ino
        name = sample.name
        for op in (2, 3):
            desk.send(SetAside(op, name.fingerprint, name.group, name.rank, name.key, Reason.REPORTED_BAD))
            assert desk.answer(op) == RemoveDone(op)
        assert len(os.listdir(root / "quarantine")) == 1
        desk.store(sample, 4)
        assert path_of(root, sample).stat().st_ino != inode
        assert desk.load(sample, 5).valid == 3
        assert desk.health(lambda health: health.quarantined_files == 1).overhead_bytes > 0


def test_hits_are_remembered_in_the_index_and_coarsely_in_the_file(root: Path) -> None:
    sample = Sample()
    now = time.time()
    with Desk(root) as desk:
        desk.store(sample, 1)
        desk.stop()
    os.utime(path_of(root, sample), (1_000_000_000, 1_000_000_000))
    with Desk(root) as desk:
        desk.recovered()
        desk.send(touch_order(sample, now - 50, 7), touch_order(sample, now - 40, 8))
        desk.stop()
        assert path_of(root, sample).stat().st_mtime == pytest.approx(now - 50)
    with Desk(root) as desk:
        assert desk.recovered().index_rows == 1
        row = desk.rows[sample.name.key]
        assert (row.last_used, row.hits) == (now - 40, 8)
    shutil.rmtree(root / "index")
    with Desk(root) as desk:
        desk.recovered()
        assert desk.rows[sample.name.key].last_used == pytest.approx(now - 50)


def test_a_file_just_written_is_not_touched_again(root: Path) -> None:
    sample = Sample()
    with Desk(root) as desk:
        desk.store(sample, 1)
        before = path_of(root, sample).stat()
        desk.send(touch_order(sample, time.time(), 1))
        desk.stop()
        assert path_of(root, sample).stat().st_ctime_ns == before.st_ctime_ns


def test_a_touch_of_what_is_not_there_does_nothing(root: Path) -> None:
    with Desk(root) as desk:
        desk.send(touch_order(Sample(), time.time(), 1))
        desk.stop()
    with Desk(root) as desk:
        assert desk.recovered().extents == 0


# -------------------------------------------------------------------- damage


@pytest.mark.scenario(
    "B112",
    then="a damaged file goes to quarantine at its first read, and the next store of its key really writes another"
    " file, which is read back right",
)
@pytest.mark.scenario("B110", then="a flipped byte of the payload is checksum, and the file is set aside")
@pytest.mark.parametrize(
    ("region", "reason", "valid"),
    [(0, Reason.BAD_HEADER, 0), (100, Reason.BAD_HEADER, 0), (4096, Reason.CHECKSUM, 0), (-1, Reason.CHECKSUM, 2)],
)
def test_a_damaged_file_is_set_aside_at_its_first_read_and_replaceable(
    root: Path, region: int, reason: Reason, valid: int
) -> None:
    sample = Sample()
    with Desk(root) as desk:
        desk.store(sample, 1)
        inode = path_of(root, sample).stat().st_ino
        spoil(path_of(root, sample), region)
        report = desk.load(sample, 2)
        assert (report.valid, report.reason, report.gone) == (valid, reason, True)
        assert not path_of(root, sample).exists()
        assert len(os.listdir(root / "quarantine")) == 1
        again = desk.load(sample, 3)
        assert (again.valid, again.reason, again.gone) == (0, Reason.NOT_FOUND, True)
        desk.store(sample, 4)
        assert path_of(root, sample).stat().st_ino != inode
        assert desk.load(sample, 5).valid == 3
        assert [desk.arena.read_back(sample, index) for index in range(3)] == sample.blocks
        assert len(os.listdir(root / "quarantine")) == 1
        desk.stop()
    with Desk(root) as desk:
        assert desk.recovered().extents == 1


def test_a_file_of_a_newer_format_is_left_where_it_is(root: Path) -> None:
    from tierkv.storage.format import frame_header

    sample = Sample()
    with Desk(root) as desk:
        desk.store(sample, 1)
        path_of(root, sample).write_bytes(frame_header(b"of tomorrow", 9))
        report = desk.load(sample, 2)
        assert (report.valid, report.reason, report.gone) == (0, Reason.UNKNOWN_FORMAT, True)
        desk.send(desk.arena.write_order(sample, 3))
        refused = desk.answer(3)
        assert isinstance(refused, OpFailed)
        assert refused.reason == Reason.UNKNOWN_FORMAT
        assert path_of(root, sample).exists()
        assert desk.store(Sample(seed=9), 4)


@pytest.mark.scenario("B111", then="one line sums up what the start has found, in numbers, and no pipe holds it up")
def test_a_start_sums_up_what_it_has_found_in_one_line(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, empty, pipe = (Sample(seed=50 * number + 1) for number in range(3))
    with Desk(root) as desk:
        desk.store(good, 1)
        desk.stop()
    for sample in (empty, pipe):
        path_of(root, sample).parent.mkdir(exist_ok=True)
    path_of(root, empty).touch()
    os.mkfifo(path_of(root, pipe))
    (root / "notes.txt").write_text("mine")
    (root / "tmp" / "1-0123abcd-0.tmp").write_bytes(bytes(5000))
    caplog.clear()
    with caplog.at_level(logging.INFO), Desk(root) as desk:
        assert desk.recovered().extents == 1
    (line,) = [record.getMessage() for record in caplog.records if "extents in" in record.getMessage()]
    assert "1 known to the index" in line
    assert "set aside 1, foreign 2, of an unknown format 0, unreadable 0, temp files removed 1" in line


# -------------------------------------------------------------------- failures


class Faulty(Files):
    """Raises, fails or waits where it is told to."""

    def __init__(self) -> None:
        self.write_failure: Failure | None = None
        self.read_failure: Failure | None = None
        self.bug_in: bytes = b""
        self.flush_errno = ""
        self.holding = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()
        self.hold: Callable[[str, Write], bool] = lambda stage, write: False
        self.flushed: list[Parts] = []

    def write(
        self, directory: DataDirectory, arena: memoryview, write: Write, identity: Identity
    ) -> WrittenFile | Failure:
        if write.key == self.bug_in:
            raise KeyError("a bug")
        return self.write_failure or super().write(directory, arena, write, identity)

    def reached(self, stage: str, write: Write) -> None:
        if self.hold(stage, write):
            self.holding.set()
            assert self.may_go.wait(SECONDS)

    def read(self, directory: DataDirectory, arena: memoryview, read: object, identity: Identity | None) -> ReadOutcome:
        if self.read_failure is not None:
            return ReadOutcome(0, self.read_failure.reason, self.read_failure.problem, failure=self.read_failure)
        return super().read(directory, arena, read, identity)  # type: ignore[arg-type]

    def flush(self, directory: DataDirectory, folder: Parts) -> None:
        if self.flush_errno:
            raise StorageError("fsync", self.flush_errno, Reason.IO_ERROR, "injected")
        super().flush(directory, folder)
        self.flushed.append(folder)


FULL = Failure(Reason.DISK_FULL, "pwritev", "ENOSPC", "No space left on device")
SICK = Failure(Reason.IO_ERROR, "preadv", "EIO", "Input/output error")


@pytest.mark.scenario(
    "B044",
    then="an error at the write, the flush or the rename leaves no file, no temp file and no row; what was stored"
    " before it is all that the next start finds, and the failure is counted once by call and error",
)
@pytest.mark.parametrize("operation", ["pwritev", "fdatasync", "rename"])
def test_a_store_that_fails_at_any_step_leaves_nothing_of_itself(root: Path, operation: str) -> None:
    before, failing = Sample(seed=50), Sample(num_blocks=4)
    with Desk(root) as desk:
        desk.store(before, 1)
        desk.open(failing)
        with inject(errno.EIO, operation):
            desk.send(desk.arena.write_order(failing, 2))
            failed = desk.answer(2)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.IO_ERROR
        wait_until(lambda: not os.listdir(root / "tmp"), "no temp file is left, that of a probe neither")
        assert not path_of(root, failing).exists()
        assert desk.load(failing, 3).reason == Reason.NOT_FOUND
        health = desk.health(lambda health: health.writable)
        assert health.errors[f"{operation} EIO"] == 1
        desk.stop()
    assert count_rows(root) == 1
    with Desk(root) as desk:
        assert desk.recovered().extents == 1
        on_disk = sum(path.stat().st_size for path in root.glob("models/*/*/*/*/*.kv"))
        assert sum(row.file_bytes for row in desk.rows.values()) == on_disk


@pytest.mark.scenario(
    "B045",
    then="a write that writes nothing fails and leaves no file; files that somebody cut to nothing are short_file, go"
    " to quarantine while the start goes on, and are counted there",
)
def test_a_file_of_no_bytes_is_never_a_success(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, cut, also_cut, empty = (Sample(seed=50 * number + 1) for number in range(4))
    with Desk(root) as desk:
        for op, sample in enumerate((good, cut, also_cut)):
            desk.store(sample, op)
        with monkeypatch.context() as patch:
            ShortTransfers(patch, "pwritev", 0)
            desk.send(desk.arena.write_order(empty, 9))
            failed = desk.answer(9)
        assert isinstance(failed, OpFailed)
        assert not path_of(root, empty).exists()
        os.truncate(path_of(root, cut), 0)
        desk.stop()
    os.truncate(path_of(root, also_cut), 0)
    with Desk(root) as desk:
        recovered = desk.recovered()
        assert (recovered.extents, recovered.quarantined) == (1, 2)
        assert all(Reason.SHORT_FILE in name for name in os.listdir(root / "quarantine"))
        assert desk.wait_type(TierHealth).quarantined_files == 2
        assert desk.load(cut, 1).reason == Reason.NOT_FOUND
        assert desk.load(good, 2).valid == 3


@pytest.mark.scenario(
    "B051",
    then="of 64 extents asked for at once, one of which was removed a moment before, 63 come and the other is"
    " not_found; of 64 written at once, one of which can't be, 63 are flushed and the other has its reason",
)
def test_one_of_a_batch_that_is_missing_costs_nothing_but_itself(root: Path) -> None:
    samples = [Sample(seed=50 * number + 1, num_blocks=1) for number in range(64)]
    with Desk(root) as desk:
        desk.open(samples[0])
        orders = [desk.arena.write_order(sample, op) for op, sample in enumerate(samples)]
        orders[10] = msgspec.structs.replace(orders[10], tokens=bytes(16))  # its keys are not those of its tokens
        desk.send(*orders)
        answers = [desk.answer(op) for op in range(64)]
        assert [op for op, answer in enumerate(answers) if not isinstance(answer, WriteDone)] == [10]
        assert isinstance(answers[10], OpFailed)
        assert answers[10].reason == Reason.KEY_MISMATCH
        desk.store(samples[10], 100)
        desk.send(remove_order(samples[10], 101))
        desk.send(*(desk.arena.read_order(sample, 200 + op) for op, sample in enumerate(samples)))
        reads = [desk.answer(200 + op) for op in range(64)]
        assert all(isinstance(read, ReadDone) for read in reads)
        assert [(op, read.reason) for op, read in enumerate(reads) if read.valid != 1] == [(10, Reason.NOT_FOUND)]  # type: ignore[union-attr]


def test_a_write_is_reported_after_its_folders_were_flushed(root: Path) -> None:
    files = Faulty()
    with Desk(root, files=files) as desk:
        sample = Sample()
        desk.store(sample, 1)
        assert sample.name.folder in files.flushed
        assert sample.name.folder[:-1] in files.flushed


def test_a_write_whose_folder_cannot_be_flushed_has_failed(root: Path) -> None:
    files = Faulty()
    files.flush_errno = "EIO"
    with Desk(root, files=files) as desk:
        sample = Sample()
        desk.open(sample)
        desk.send(desk.arena.write_order(sample, 1))
        failed = desk.answer(1)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.IO_ERROR
        files.flush_errno = ""
        desk.send(remove_order(sample, 2))  # what the core does about it
        assert desk.answer(2) == RemoveDone(2)
        assert not path_of(root, sample).exists()


def test_a_write_for_a_group_that_nobody_opened_fails(root: Path) -> None:
    with Desk(root) as desk:
        desk.send(desk.arena.write_order(Sample(), 1))
        failed = desk.answer(1)
        assert isinstance(failed, OpFailed)
        assert "never opened" in failed.problem
        assert os.listdir(root / "models") == []


def test_an_instruction_that_names_no_extent_is_answered(root: Path) -> None:
    with Desk(root) as desk:
        sample = Sample()
        desk.send(msgspec.structs.replace(desk.arena.write_order(sample, 0), fingerprint="../../etc"))
        assert isinstance(desk.answer(0), OpFailed)
        desk.send(msgspec.structs.replace(remove_order(sample, 1), rank=-1))
        assert isinstance(desk.answer(1), OpFailed)
        desk.send(msgspec.structs.replace(desk.arena.read_order(sample, 2), key=b"short"))
        assert isinstance(desk.answer(2), ReadDone)
        desk.send(Touch([TouchRow("nonsense", b"", 0, b"", 1.0, 1)]))
        desk.store(sample, 3)


def test_a_slot_outside_the_arena_fails_its_operation_alone(root: Path) -> None:
    with Desk(root) as desk:
        sample = Sample()
        desk.store(sample, 1)
        desk.send(desk.arena.write_order(sample, 2, slots=[2**40] * 3))
        assert isinstance(desk.answer(2), OpFailed)
        desk.send(desk.arena.read_order(sample, 3, slots=[2**40] * 3))
        report = desk.answer(3)
        assert isinstance(report, ReadDone)
        assert (report.valid, report.gone) == (0, False)
        assert desk.load(sample, 4).valid == 3


def test_a_bug_in_one_write_fails_that_one_and_is_logged_with_its_key(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Faulty()
    samples = [Sample(seed=50 * number + 1) for number in range(10)]
    files.bug_in = samples[4].name.key
    with Desk(root, files=files) as desk:
        desk.open(samples[0])
        desk.send(*(desk.arena.write_order(sample, op) for op, sample in enumerate(samples)))
        reports = [desk.answer(op) for op in range(10)]
    assert [isinstance(report, WriteDone) for report in reports] == [op != 4 for op in range(10)]
    assert reports[4] == OpFailed(4, Reason.IO_ERROR, "KeyError: 'a bug'")
    logged = [record for record in caplog.records if samples[4].name.key.hex() in record.getMessage()]
    assert len(logged) == 1


def test_a_passing_read_error_leaves_the_file(root: Path) -> None:
    files = Faulty()
    with Desk(root, files=files) as desk:
        sample = Sample()
        desk.store(sample, 1)
        files.read_failure = SICK
        report = desk.load(sample, 2)
        assert (report.valid, report.reason, report.gone) == (0, Reason.IO_ERROR, False)
        files.read_failure = None
        assert desk.load(sample, 3).valid == 3
        assert desk.health(lambda health: True).errors == {"preadv EIO": 1}


def test_a_full_disk_closes_the_tier_to_writes_and_it_comes_back_by_itself(root: Path) -> None:
    files = Faulty()
    with Desk(root, files=files) as desk:
        sample, other = Sample(), Sample(seed=40)
        desk.store(sample, 1)
        files.write_failure = FULL
        desk.send(desk.arena.write_order(other, 2))
        failed = desk.answer(2)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.DISK_FULL
        health = desk.wait(lambda report: isinstance(report, TierHealth) and not report.writable)
        assert isinstance(health, TierHealth)
        assert health.reason == Reason.DISK_FULL
        assert health.errors == {"pwritev ENOSPC": 1}
        assert desk.load(sample, 3).valid == 3
        files.write_failure = None
        desk.health(lambda health: health.writable)
        desk.send(desk.arena.write_order(other, 4))
        assert isinstance(desk.answer(4), WriteDone)


def test_a_write_that_has_ended_well_or_badly_counts_no_longer_as_being_written(root: Path) -> None:
    files = Faulty()
    with Desk(root, files=files) as desk:
        (root / "tmp" / "foreign").write_bytes(bytes(100_000))
        desk.store(Sample(), 1)
        files.bug_in = Sample(seed=40).name.key
        desk.send(desk.arena.write_order(Sample(seed=40), 2))
        assert isinstance(desk.answer(2), OpFailed)
        health = desk.health(lambda health: True)
        assert health.overhead_bytes - health.index_bytes >= 100_000


def test_the_reserve_is_not_written_into(root: Path) -> None:
    with Desk(root, reserve_bytes=2**60) as desk:
        sample = Sample()
        desk.open(sample)
        health = desk.wait_type(TierHealth)
        assert (health.writable, health.reason) == (False, Reason.DISK_FULL)
        desk.send(desk.arena.write_order(sample, 1))
        failed = desk.answer(1)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.DISK_FULL
        assert os.listdir(root / "tmp") == []


@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_a_data_directory_that_is_removed_is_told_and_not_made_anew(root: Path, how: str) -> None:
    with Desk(root) as desk:
        sample = Sample()
        desk.store(sample, 1)
        if how == "removed":
            shutil.rmtree(root)
        else:
            for path in root.iterdir():
                path.unlink() if path.is_file() else shutil.rmtree(path)
        report = desk.load(sample, 2)
        assert (report.valid, report.reason, report.gone) == (0, Reason.NOT_FOUND, True)
        health = desk.health(lambda health: not health.writable)
        assert health.reason == Reason.DATA_DIR_GONE
        desk.send(desk.arena.write_order(sample, 3))
        failed = desk.answer(3)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.DATA_DIR_GONE
        assert not root.exists() or os.listdir(root) == []


def test_a_data_directory_with_another_lock_is_refused(root: Path) -> None:
    root.mkdir()
    stale = os.open(root / "LOCK", os.O_CREAT | os.O_RDWR)
    os.unlink(root / "LOCK")
    with pytest.raises(DataDirectoryError):
        Desk_refused(root, stale)
    os.close(stale)
    assert os.listdir(root) == []


def Desk_refused(root: Path, lock_fd: int) -> None:
    import socket

    from tests.workers.desk import make_config
    from tierkv.workers.channel import worker_end
    from tierkv.workers.storage import StorageWorker

    left, right = socket.socketpair()
    with left, right:
        StorageWorker(make_config(root, lock_fd), worker_end(right), memoryview(bytearray(4096)))


# -------------------------------------------------------------------- order


def test_operations_of_one_extent_keep_their_order_and_others_overtake_them(root: Path) -> None:
    files = Faulty()
    files.may_go.clear()
    slow, quick = Sample(seed=1), Sample(seed=60)
    files.hold = lambda stage, write: stage == "temp_written" and write.key == slow.name.key
    with Desk(root, files=files) as desk:
        desk.open(slow)
        desk.store(quick, 1)
        desk.send(desk.arena.write_order(slow, 2))
        assert files.holding.wait(SECONDS)
        assert not path_of(root, slow).exists()
        desk.send(desk.arena.read_order(slow, 3), remove_order(slow, 4), desk.arena.write_order(slow, 5))
        assert desk.load(quick, 6).valid == 3
        assert not any(getattr(report, "op", None) in (2, 3, 4, 5) for report in desk.reports)
        files.may_go.set()
        read = desk.answer(3)
        assert isinstance(read, ReadDone)
        assert read.valid == 3
        assert [type(desk.answer(op)) for op in (2, 4, 5)] == [WriteDone, RemoveDone, WriteDone]
        assert path_of(root, slow).exists()


def test_a_read_finds_a_thread_while_writes_hold_all_others(root: Path) -> None:
    files = Faulty()
    files.may_go.clear()
    stored, *writing = [Sample(seed=70 * number + 1) for number in range(6)]
    files.hold = lambda stage, write: write.key != stored.name.key
    with Desk(root, files=files, io_threads=2) as desk:
        desk.store(stored, 1)
        desk.send(*(desk.arena.write_order(sample, 10 + op) for op, sample in enumerate(writing)))
        assert files.holding.wait(SECONDS)
        assert desk.load(stored, 2).valid == 3
        files.may_go.set()
        assert all(isinstance(desk.answer(10 + op), WriteDone) for op in range(5))


# -------------------------------------------------------------------- scrub


def test_scrubbing_finds_damage_and_repair_sets_it_aside(root: Path) -> None:
    samples = [Sample(seed=50 * number + 1) for number in range(4)]
    bad = samples[2]
    with Desk(root) as desk:
        for op, sample in enumerate(samples):
            desk.store(sample, op)
        spoil(path_of(root, bad), -1)
        desk.send(Scrub(op=10, repair=False))
        found = desk.wait(lambda report: isinstance(report, ScrubProgress) and report.finished)
        assert isinstance(found, ScrubProgress)
        assert (found.op, found.checked, found.total) == (10, 4, 4)
        assert found.checked_bytes == 4 * 3 * 4096
        assert sum_of_damage(desk, 10) == [(str(bad.name), "checksum")]
        assert path_of(root, bad).exists()
        desk.send(Scrub(op=11, repair=True))
        desk.wait(lambda report: isinstance(report, ScrubProgress) and report.op == 11 and report.finished)
        assert not path_of(root, bad).exists()
        moved = [moved for r in desk.reports if isinstance(r, ScrubProgress) for moved in r.set_aside]
        assert moved == [(bad.group, 0, bad.name.key)]
        assert len(os.listdir(root / "quarantine")) == 1


def test_scrubbing_tells_of_a_file_that_can_not_be_read_and_leaves_it(root: Path) -> None:
    class Unreadable(Files):
        def verify(self, directory: DataDirectory, name: ExtentName, pause: Callable[[int], None]) -> Verified:
            return Verified(
                0, 0, 0, Reason.IO_ERROR, "bad sector", failure=Failure(Reason.IO_ERROR, "preadv", "EIO", "")
            )

    sample = Sample()
    with Desk(root, files=Unreadable()) as desk:
        desk.store(sample, 1)
        desk.send(Scrub(op=10, repair=True))
        desk.wait(lambda report: isinstance(report, ScrubProgress) and report.finished)
        assert sum_of_damage(desk, 10) == [(str(sample.name), "io_error")]
        assert path_of(root, sample).exists()


def test_scrubbing_a_directory_that_was_removed_does_not_say_that_all_is_well(root: Path) -> None:
    with Desk(root) as desk:
        desk.store(Sample(), 1)
        shutil.rmtree(root)
        desk.send(Scrub(op=10, repair=False))
        desk.wait(lambda report: isinstance(report, ScrubProgress) and report.finished)
        assert sum_of_damage(desk, 10) == [(".", "data_dir_gone")]


def sum_of_damage(desk: Desk, op: int) -> list[tuple[str, str]]:
    return [found for r in desk.reports if isinstance(r, ScrubProgress) and r.op == op for found in r.damaged]


def test_a_scrub_ends_when_it_is_cancelled_or_another_one_begins(root: Path) -> None:
    class Slow(Faulty):
        """Verifies when it is let."""

        def verify(self, directory: DataDirectory, name: object, pause: Callable[[int], None]) -> object:  # type: ignore[override]
            self.holding.set()
            assert self.may_go.wait(SECONDS)
            return super().verify(directory, name, pause)  # type: ignore[arg-type]

    files = Slow()
    with Desk(root, files=files) as desk:
        for op in range(3):
            desk.store(Sample(seed=50 * op + 1), op)
        for first, end in ((10, CancelScrub(op=10)), (11, Scrub(op=12, repair=False))):
            files.may_go.clear()
            files.holding.clear()
            desk.send(Scrub(op=first, repair=False))
            assert files.holding.wait(SECONDS)
            desk.send(CancelScrub(op=999), end)
            files.may_go.set()
            report = desk.wait(lambda r, op=first: isinstance(r, ScrubProgress) and r.op == op and r.finished)  # type: ignore[misc]
            assert isinstance(report, ScrubProgress)
            assert report.checked < 3
        last = desk.wait(lambda r: isinstance(r, ScrubProgress) and r.op == 12 and r.finished)
        assert isinstance(last, ScrubProgress)
        assert last.checked == 3


# -------------------------------------------------------------------- stop


def test_stopping_finishes_what_was_taken_on(root: Path) -> None:
    samples = [Sample(seed=50 * number + 1) for number in range(12)]
    with Desk(root) as desk:
        desk.open(samples[0])
        desk.send(*(desk.arena.write_order(sample, op) for op, sample in enumerate(samples)))
        desk.stop()
        kinds = [type(report) for report in desk.reports]
        assert kinds.count(WriteDone) == 12
        assert kinds.index(Stopped) > max(i for i, kind in enumerate(kinds) if kind is WriteDone)
    with Desk(root) as desk:
        recovered = desk.recovered()
        assert (recovered.index_rows, recovered.headers_read) == (12, 0)


def test_stopping_keeps_to_its_budget_with_a_disk_that_does_not_answer(root: Path) -> None:
    files = Faulty()
    files.may_go.clear()
    files.hold = lambda stage, write: True
    sample = Sample()
    with Desk(root, files=files) as desk:
        desk.open(sample)
        desk.send(desk.arena.write_order(sample, 1))
        assert files.holding.wait(SECONDS)
        started = time.monotonic()
        desk.stop(budget_seconds=0.05)
        assert time.monotonic() - started < SECONDS
        files.may_go.set()


def test_the_group_is_described_on_disk_in_plain_words(root: Path) -> None:
    with Desk(root) as desk:
        sample = Sample()
        desk.store(sample, 1)
        group = root / "models" / FINGERPRINT / sample.group.hex()
        assert msgspec.json.decode((group / "identity.json").read_bytes())["model_name"] == "small"
        assert (group.parent / "model.json").exists()
