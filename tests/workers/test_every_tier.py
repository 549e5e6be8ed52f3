"""What a tier of files promises, NVMe and disk alike. `desk` is the worker of one of them, `root` its directory."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.faults.system_calls import ALL_ERRNOS, hold, inject
from tests.storage.samples import BLOCK_TOKENS, FINGERPRINT, Sample, identity
from tests.workers.desk import SECONDS, Desk, DiskDesk, TierDesk, remove_order
from tierkv.core.identity import Identity
from tierkv.core.instructions import (
    GroupFound,
    OpFailed,
    PurgeAbout,
    PurgeResumed,
    PurgeScope,
    PurgeSwept,
    Read,
    ReadDone,
    RecordPurge,
    RemoveDone,
    ScopeGroup,
    Scrub,
    ScrubProgress,
    SetAside,
    SweepPurge,
    TierHealth,
    Touch,
    TouchRow,
    WriteDone,
)
from tierkv.core.keys import KEY_BYTES, chain_keys
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import ReadOutcome
from tierkv.storage.format import frame_header
from tierkv.storage.names import ExtentName, Parts
from tierkv.storage.purge_record import PurgeRecord, write_record
from tierkv.torture.waits import wait_until
from tierkv.workers.files import Files

Begin = Callable[..., TierDesk]


@pytest.fixture(params=["nvme", "disk"])
def begin(request: pytest.FixtureRequest) -> Begin:
    """Makes the worker of a tier at its directory."""
    return Desk if request.param == "nvme" else DiskDesk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def path_of(root: Path, sample: Sample) -> Path:
    return root.joinpath(*sample.name.parts)


def spoil(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def of_another_group(seed: int = 5) -> Sample:
    sample = Sample(seed=seed)
    sample.identity = identity(salt="other")
    sample.group = sample.parent = sample.identity.group_key()
    sample.keys = chain_keys(sample.group, sample.tokens, BLOCK_TOKENS)
    sample.name = ExtentName(FINGERPRINT, sample.group, 0, sample.keys[:KEY_BYTES])
    return sample


def check_right(desk: TierDesk, sample: Sample, op: int) -> None:
    assert desk.load(sample, op).valid == sample.num_blocks
    assert [desk.arena.read_back(sample, index) for index in range(sample.num_blocks)] == sample.blocks


def index_of(desk: TierDesk) -> Path:
    return desk.data / "disk-index" if isinstance(desk, DiskDesk) else desk.root / "index"


# -------------------------------------------------------------------- what was put there is there


def test_what_was_put_there_is_read_back(root: Path, begin: Begin) -> None:
    with begin(root) as desk:
        sample = Sample(num_blocks=3, block_bytes=5000, extras={1: [b"image"]})
        done = desk.store(sample, 1)
        assert done.file_bytes == path_of(root, sample).stat().st_size
        report = desk.load(sample, 2)
        assert (report.valid, report.reason, report.gone) == (3, None, False)
        assert (report.tokens, report.extras) == (sample.tokens, sample.extras)
        check_right(desk, sample, 3)
        assert os.listdir(root / "tmp") == []


def test_a_part_of_a_file_is_read_into_the_slots_asked_for_and_no_others(root: Path, begin: Begin) -> None:
    with begin(root) as desk:
        sample = Sample(num_blocks=4)
        desk.store(sample, 1)
        assert desk.load(sample, 2, first=1, count=2).valid == 2
        assert [desk.arena.read_back(sample, index) for index in range(2)] == sample.blocks[1:3]
        assert desk.arena.read_back(sample, 2) == b"\xee" * sample.block_bytes


@pytest.mark.parametrize("index", ["kept", "deleted", "garbage"])
@pytest.mark.parametrize("end", ["stopped", "gone without a word"])
def test_what_was_flushed_is_found_at_the_next_start(root: Path, begin: Begin, index: str, end: str) -> None:
    samples = [Sample(seed=50 * number + 1) for number in range(5)]
    with begin(root) as desk:
        desk.recovered()
        for op, sample in enumerate(samples):
            desk.store(sample, op)
        if end == "stopped":
            desk.stop()
    if index == "deleted":
        shutil.rmtree(index_of(desk))
    elif index == "garbage":
        (index_of(desk) / "data.mdb").write_bytes(b"nothing that LMDB knows" * 1000)
    with begin(root) as desk:
        recovered = desk.recovered()
        assert (recovered.extents, recovered.quarantined) == (5, 0)
        if index != "kept":
            assert recovered.headers_read == 5
        elif end == "stopped":
            assert recovered.headers_read == 0
        assert set(desk.rows) == {sample.name.key for sample in samples}
        assert [r.identity for r in desk.reports if isinstance(r, GroupFound)] == [samples[0].identity]
        check_right(desk, samples[3], 9)


def test_without_rows_only_temp_files_are_looked_for(root: Path, begin: Begin) -> None:
    sample = Sample()
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        desk.stop()
    with begin(root, sends_rows=False) as desk:
        assert desk.recovered().extents == 0
        check_right(desk, sample, 1)
        other = Sample(seed=90)
        desk.send(desk.put_order(other, 2))  # its group is known from the directory
        assert isinstance(desk.answer(2), WriteDone)


def test_uses_are_known_at_the_next_start_with_the_index_and_coarsely_without(root: Path, begin: Begin) -> None:
    sample, now = Sample(), time.time()
    name = sample.name
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        desk.stop()
    os.utime(path_of(root, sample), (1_000_000_000, 1_000_000_000))
    with begin(root) as desk:
        desk.recovered()
        for used, hits in ((now - 50, 7), (now - 40, 8)):
            desk.send(Touch([TouchRow(name.fingerprint, name.group, name.rank, name.key, used, hits)]))
        desk.stop()
        assert path_of(root, sample).stat().st_mtime == pytest.approx(now - 50)
    with begin(root) as desk:
        assert desk.recovered().index_rows == 1
        assert (desk.rows[name.key].last_used, desk.rows[name.key].hits) == (now - 40, 8)
    shutil.rmtree(index_of(desk))
    with begin(root) as desk:
        desk.recovered()
        assert desk.rows[name.key].last_used == pytest.approx(now - 50)


# -------------------------------------------------------------------- what was removed is not


def test_a_removed_extent_is_gone_and_can_be_put_there_again(root: Path, begin: Begin) -> None:
    sample = Sample()
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        desk.send(remove_order(sample, 2), remove_order(sample, 3))
        assert (desk.answer(2), desk.answer(3)) == (RemoveDone(2), RemoveDone(3))
        assert not path_of(root, sample).parent.exists()
        report = desk.load(sample, 4)
        assert (report.valid, report.reason, report.gone) == (0, Reason.NOT_FOUND, True)
        desk.store(sample, 5)
        check_right(desk, sample, 6)
        desk.send(remove_order(sample, 7))
        desk.answer(7)
        desk.stop()
    with begin(root) as desk:
        assert desk.recovered().extents == 0


def test_what_a_purge_of_its_group_removes_is_not_there_and_others_are(root: Path, begin: Begin) -> None:
    mine, other = Sample(), of_another_group()
    with begin(root) as desk:
        desk.recovered()
        desk.store(mine, 1)
        desk.store(other, 2)
        swept = purge(desk, mine)
        assert (swept.reason, swept.swept.files) == (None, 1)
        assert desk.load(mine, 3).reason == Reason.NOT_FOUND
        check_right(desk, other, 4)
        assert not (root / "models" / FINGERPRINT / mine.group.hex()).exists()
        desk.store(mine, 5)  # opened anew
        check_right(desk, mine, 6)


def purge(desk: TierDesk, sample: Sample) -> PurgeSwept:
    order = RecordPurge(
        b"purge number one", PurgeScope(groups=(ScopeGroup(FINGERPRINT, sample.group),)), PurgeAbout(1.0)
    )
    if isinstance(desk, DiskDesk):  # by the storage worker
        with DataDirectory.open(desk.data, create=False, writable=False) as data:
            write_record(data, PurgeRecord(order.purge, order.scope, order.about))
    else:
        desk.send(order)
    desk.send(SweepPurge(order.purge))
    return desk.wait_type(PurgeSwept)


# -------------------------------------------------------------------- nothing wrong is read


@pytest.mark.parametrize(
    ("region", "reason", "valid"),
    [(0, Reason.BAD_HEADER, 0), (100, Reason.BAD_HEADER, 0), (4096, Reason.CHECKSUM, 0), (-1, Reason.CHECKSUM, 2)],
)
def test_a_damaged_file_is_set_aside_at_its_first_read_and_replaceable(
    root: Path, begin: Begin, region: int, reason: Reason, valid: int
) -> None:
    sample = Sample()
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        spoil(path_of(root, sample), region)
        report = desk.load(sample, 2)
        assert (report.valid, report.reason, report.gone) == (valid, reason, True)
        assert not path_of(root, sample).exists()
        (aside,) = os.listdir(root / "quarantine")
        assert f"-{reason}-" in aside
        assert desk.load(sample, 3).reason == Reason.NOT_FOUND
        desk.store(sample, 4)
        check_right(desk, sample, 5)
        desk.stop()
    with begin(root) as desk:
        assert desk.recovered().extents == 1


@pytest.mark.parametrize("size", [0, 4095, 4096, 8191, 2 * 4096, 4 * 4096 - 1, 5 * 4096])
def test_a_torn_file_is_set_aside_by_the_next_start(root: Path, begin: Begin, size: int) -> None:
    torn, kept = Sample(), Sample(seed=60)
    with begin(root) as desk:
        desk.recovered()
        desk.store(torn, 1)
        desk.store(kept, 2)
        desk.stop()
    os.truncate(path_of(root, torn), size)
    with begin(root) as desk:
        recovered = desk.recovered()
        assert (recovered.extents, recovered.quarantined) == (1, 1)
        assert desk.load(torn, 1).reason == Reason.NOT_FOUND
        check_right(desk, kept, 2)


def test_files_that_have_changed_places_are_served_under_neither_name(root: Path, begin: Begin) -> None:
    one, two = Sample(), Sample(seed=60)
    with begin(root) as desk:
        desk.recovered()
        desk.store(one, 1)
        desk.store(two, 2)
        swapped = root / "swapped"
        os.rename(path_of(root, one), swapped)
        os.rename(path_of(root, two), path_of(root, one))
        os.rename(swapped, path_of(root, two))
        for op, sample in enumerate((one, two), 3):
            report = desk.load(sample, op)
            assert (report.valid, report.reason, report.gone) == (0, Reason.KEY_MISMATCH, True)
        assert len(os.listdir(root / "quarantine")) == 2


def test_a_file_of_another_group_is_not_served(root: Path, begin: Begin) -> None:
    mine, other = Sample(), of_another_group()
    with begin(root) as desk:
        desk.recovered()
        desk.store(mine, 1)
        desk.store(other, 2)
        shutil.copyfile(path_of(root, other), path_of(root, mine))
        report = desk.load(mine, 3)
        assert (report.valid, report.reason, report.gone) == (0, Reason.IDENTITY_MISMATCH, True)
        check_right(desk, other, 4)


def test_foreign_files_and_those_of_a_newer_format_are_left_alone(root: Path, begin: Begin) -> None:
    sample, pipe = Sample(), Sample(seed=60)
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        desk.store(pipe, 2)
        path_of(root, sample).write_bytes(frame_header(b"of tomorrow", 9))
        path_of(root, pipe).unlink()
        os.mkfifo(path_of(root, pipe))
        (root / "models" / "notes.txt").write_text("mine")
        report = desk.load(sample, 3)
        assert (report.valid, report.reason, report.gone) == (0, Reason.UNKNOWN_FORMAT, True)
        assert desk.load(pipe, 4).reason == Reason.NOT_FOUND
        newer = Reason.NAME_TAKEN if begin is DiskDesk else Reason.UNKNOWN_FORMAT
        for op, one, reason in ((5, sample, newer), (6, pipe, Reason.NAME_TAKEN)):
            desk.send(desk.put_order(one, op))
            refused = desk.answer(op)
            assert isinstance(refused, OpFailed)
            assert refused.reason == reason
        desk.send(remove_order(sample, 7), remove_order(pipe, 8))
        assert (desk.answer(7), desk.answer(8)) == (RemoveDone(7), RemoveDone(8))
        desk.stop()
    with begin(root) as desk:
        assert (desk.recovered().unknown_format, desk.recovered().foreign) == (1, 2)
    assert path_of(root, sample).exists()
    assert path_of(root, pipe).exists()
    assert os.listdir(root / "quarantine") == []


def test_an_extent_reported_bad_is_set_aside(root: Path, begin: Begin) -> None:
    sample = Sample()
    name = sample.name
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        for op in (2, 3):
            desk.send(SetAside(op, name.fingerprint, name.group, name.rank, name.key, Reason.REPORTED_BAD))
            assert desk.answer(op) == RemoveDone(op)
        assert len(os.listdir(root / "quarantine")) == 1
        desk.store(sample, 4)
        check_right(desk, sample, 5)
        assert desk.health(lambda health: health.quarantined_files == 1).overhead_bytes > 0


@pytest.mark.parametrize("repair", [False, True])
def test_a_scrub_names_what_is_damaged_and_moves_it_only_when_asked(root: Path, begin: Begin, repair: bool) -> None:
    good, bad, short = Sample(), Sample(seed=60), Sample(seed=120)
    with begin(root) as desk:
        desk.recovered()
        for op, sample in enumerate((good, bad, short)):
            desk.store(sample, op)
        spoil(path_of(root, bad), -1)
        os.truncate(path_of(root, short), 8192)
        desk.send(Scrub(50, repair))
        desk.wait(lambda report: isinstance(report, ScrubProgress) and report.finished)
        told = [report for report in desk.reports if isinstance(report, ScrubProgress)]
        assert sorted(damaged for report in told for damaged in report.damaged) == sorted(
            [(str(bad.name), Reason.CHECKSUM), (str(short.name), Reason.SHORT_FILE)]
        )
        assert told[-1].checked == 3
        aside = {key for report in told for _, _, key in report.set_aside}
        assert aside == ({bad.name.key, short.name.key} if repair else set())
        assert path_of(root, bad).exists() == (not repair)
        check_right(desk, good, 60)


# -------------------------------------------------------------------- a directory that fails


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_file_that_cannot_be_put_there_leaves_nothing_of_itself(
    root: Path, begin: Begin, operation: str, number: int
) -> None:
    before, failing = Sample(seed=50), Sample(num_blocks=4)
    with begin(root) as desk:
        desk.recovered()
        desk.store(before, 1)
        desk.open(failing)
        order = desk.put_order(failing, 2)
        with inject(number, operation):
            desk.send(order)
            failed = desk.answer(2)
        assert isinstance(failed, OpFailed)
        assert failed.reason == (Reason.DISK_FULL if number == errno.ENOSPC else Reason.IO_ERROR)
        wait_until(lambda: not os.listdir(root / "tmp"), "no temp file is left, that of a probe neither")
        assert not path_of(root, failing).exists()
        assert desk.health(lambda health: health.writable).errors[f"{operation} {errno.errorcode[number]}"] == 1
        desk.store(failing, 3)
        check_right(desk, failing, 4)


class Unflushed(Files):
    """Folders of extents can't be flushed."""

    fails = False

    def flush(self, directory: DataDirectory, folder: Parts) -> None:
        if self.fails:
            raise StorageError("fsync", "EIO", Reason.IO_ERROR, "injected")
        super().flush(directory, folder)


def test_what_is_not_flushed_is_not_reported_as_flushed(root: Path, begin: Begin) -> None:
    sample, files = Sample(), Unflushed()
    with begin(root, files=files) as desk:
        desk.recovered()
        desk.store(Sample(seed=60), 1)
        files.fails = True
        desk.send(desk.put_order(sample, 2))
        failed = desk.answer(2)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.IO_ERROR
        files.fails = False
        desk.health(lambda health: health.writable)
        desk.store(sample, 3)


def test_with_too_little_room_nothing_is_put_there_and_all_is_read(root: Path, begin: Begin) -> None:
    sample = Sample()
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        desk.stop()
    with begin(root, reserve_bytes=2**60) as desk:
        desk.recovered()
        health = desk.health(lambda health: not health.writable)
        assert health.reason == Reason.DISK_FULL
        desk.send(desk.put_order(Sample(seed=60), 2))
        failed = desk.answer(2)
        assert isinstance(failed, OpFailed)
        assert failed.reason == Reason.DISK_FULL
        check_right(desk, sample, 3)


def test_with_too_few_inodes_nothing_is_put_there_and_all_is_read(
    root: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, real = Sample(), os.fstatvfs

    def few_inodes(fd: int) -> os.statvfs_result:
        found = list(real(fd))
        found[5], found[6], found[7] = 10_000, 50, 50  # in all, free, and free for an ordinary user
        return os.statvfs_result(found)

    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstatvfs", few_inodes)
            health = desk.health(lambda health: not health.writable)
            assert health.reason == Reason.NO_INODES
            desk.send(desk.put_order(Sample(seed=60), 2))
            failed = desk.answer(2)
            assert isinstance(failed, OpFailed)
            assert failed.reason == Reason.NO_INODES
            check_right(desk, sample, 3)
        desk.health(lambda health: health.writable)


def test_read_only_nothing_is_changed(root: Path, begin: Begin) -> None:
    sample, damaged = Sample(), Sample(seed=60)
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
        desk.store(damaged, 2)
        desk.stop()
    spoil(path_of(root, damaged), -1)
    (root / "tmp" / "77-0123abcd-5.tmp").write_bytes(b"half")

    def tree() -> dict[str, tuple[int, int]]:
        found = {str(path.relative_to(root)): path.stat() for path in root.rglob("*") if path.name != "LOCK"}
        return {name: (status.st_mtime_ns, status.st_size) for name, status in found.items()}

    before = tree()
    with begin(root, read_only=True) as desk:
        assert desk.recovered().extents == 2
        check_right(desk, sample, 1)
        assert desk.load(damaged, 2).reason == Reason.CHECKSUM
        name, other = sample.name, Sample(seed=120)
        desk.send(
            desk.put_order(other, 3),
            remove_order(sample, 4),
            SetAside(5, name.fingerprint, name.group, name.rank, name.key, Reason.REPORTED_BAD),
            Touch([TouchRow(name.fingerprint, name.group, name.rank, name.key, time.time(), 9)]),
        )
        for op in (3, 4, 5):
            refused = desk.answer(op)
            assert isinstance(refused, OpFailed)
            assert refused.reason == Reason.READ_ONLY
        assert not desk.wait_type(TierHealth).writable
        desk.stop()
    assert tree() == before


def test_read_only_what_is_to_be_purged_stays_and_is_not_told(root: Path, begin: Begin) -> None:
    mine, other = Sample(), of_another_group()
    with begin(root) as desk:
        desk.recovered()
        desk.store(mine, 1)
        desk.store(other, 2)
        desk.stop()
    data = desk.data if isinstance(desk, DiskDesk) else root
    scope = PurgeScope(groups=(ScopeGroup(FINGERPRINT, mine.group),))
    with DataDirectory.open(data, create=False, writable=False) as directory:
        write_record(directory, PurgeRecord(b"purge number one", scope, PurgeAbout(1.0)))
    with begin(root, read_only=True) as desk:
        recovered = desk.recovered()
        assert recovered.extents == 1
        assert recovered.hidden_bytes == path_of(root, mine).stat().st_size
        assert desk.wait_type(PurgeResumed).reason == Reason.READ_ONLY
        assert set(desk.rows) == {other.name.key}


@pytest.mark.parametrize(
    "operation",
    ["open", "pwritev", "preadv", "pread", "fdatasync", "fsync", "rename", "link", "unlink", "stat", "fstat"],
)
def test_whatever_fails_once_it_goes_on(root: Path, begin: Begin, operation: str) -> None:
    kept, other = Sample(), Sample(seed=60, num_blocks=1)

    def is_io(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return threading.current_thread().name.startswith(("io-", "flusher"))

    with begin(root) as desk:
        desk.recovered()
        desk.store(kept, 1)
        order = desk.put_order(other, 2)
        op = 10
        for number in ALL_ERRNOS:
            for nth in range(2):
                with inject(number, operation, nth, when=is_io):
                    desk.send(
                        msgspec.structs.replace(order, op=op),
                        desk.arena.read_order(other, op + 1),
                        desk.arena.read_order(kept, op + 2),
                        remove_order(other, op + 3),
                    )
                    answers = [desk.answer(op + more) for more in range(4)]
                assert isinstance(answers[0], WriteDone | OpFailed)
                assert isinstance(answers[1], ReadDone)
                assert isinstance(answers[2], ReadDone)
                assert isinstance(answers[3], RemoveDone | OpFailed)
                desk.health(lambda health: health.writable)
                if desk.load(kept, op + 4).gone:  # told to be gone by the system itself: then it is stored again
                    assert number == errno.ENOENT
                    desk.store(kept, op + 5)
                op += 10
        desk.send(order)
        assert isinstance(desk.answer(2), WriteDone)
        check_right(desk, other, 3)
        check_right(desk, kept, 4)
        assert desk.dead_threads == []


# -------------------------------------------------------------------- a directory that hangs


class Hanging(Files):
    """Reading does not come back until it is let go."""

    def __init__(self) -> None:
        self.is_well = threading.Event()
        self.is_well.set()

    def read(self, directory: DataDirectory, arena: memoryview, read: Read, identity: Identity | None) -> ReadOutcome:
        assert self.is_well.wait(SECONDS)
        return super().read(directory, arena, read, identity)


def test_a_read_that_does_not_come_back_is_told_and_what_is_sent_is_answered(root: Path, begin: Begin) -> None:
    sample, other, files = Sample(), Sample(seed=60), Hanging()
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)
    with begin(root, files=files, stuck_seconds=0.1) as desk:
        desk.recovered()
        files.is_well.clear()
        desk.send(desk.arena.read_order(sample, 2))
        sick = desk.health(lambda health: not health.readable)
        assert (sick.writable, sick.reason) == (False, Reason.IO_STUCK)
        desk.send(desk.put_order(other, 3), remove_order(other, 4))
        refused = desk.answer(3)
        assert isinstance(refused, OpFailed)
        assert refused.reason == Reason.IO_STUCK
        assert desk.answer(4) == RemoveDone(4)
        files.is_well.set()
        answered = desk.answer(2)
        assert isinstance(answered, ReadDone)
        assert answered.valid == 3
        desk.health(lambda health: health.writable and health.readable)


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync", "fsync", "stat", "scandir", "fstatvfs"])
def test_whichever_call_does_not_come_back_it_is_told_and_files_are_read(
    root: Path, begin: Begin, operation: str
) -> None:
    sample, other = Sample(), Sample(seed=60)
    with begin(root) as desk:
        desk.recovered()
        desk.store(sample, 1)

    def is_worker(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return threading.current_thread().name.startswith(("io-", "flusher", "health"))

    with begin(root, stuck_seconds=0.1) as desk:
        desk.recovered()
        desk.open(sample)
        order = desk.put_order(other, 2)
        with hold(operation, when=is_worker) as barrier:
            desk.send(order)
            barrier.wait_reached()
            assert not desk.health(lambda health: health.reason == Reason.IO_STUCK).writable
            check_right(desk, sample, 3)
        assert isinstance(desk.answer(2), WriteDone | OpFailed)
        desk.health(lambda health: health.writable)
