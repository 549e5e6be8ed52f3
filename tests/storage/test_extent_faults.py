"""Each error at each call: a named failure, no temp file, nothing else harmed, and it works again afterwards."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.faults.system_calls import ERRNOS, Fault, FlippedBit, ShortTransfers, hold, inject
from tests.storage.samples import POISON, Sample, path_of, temp_files
from tierkv.core.reasons import Reason
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import WrittenFile, read_blocks, remove_extent, verify_file, write_extent
from tierkv.storage.format import file_bytes
from tierkv.storage.system_calls import Failure

REASONS = {
    errno.ENOSPC: Reason.DISK_FULL,
    errno.EDQUOT: Reason.DISK_FULL,
    errno.EROFS: Reason.READ_ONLY,
    errno.EMFILE: Reason.TOO_MANY_FILES,
    errno.ENFILE: Reason.TOO_MANY_FILES,
    errno.EACCES: Reason.NO_ACCESS,
}
WRITE_CALLS = ("open", "fchmod", "pwritev", "fdatasync", "mkdir", "rename")
READ_CALLS = ("open", "fstat", "posix_fadvise", "pread")


def try_to_write(directory: DataDirectory, sample: Sample) -> WrittenFile | Failure:
    return write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)


# ---- writing


@pytest.mark.parametrize("operation", WRITE_CALLS)
@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "always"])
def test_a_write_fails_by_name_and_leaves_nothing(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, operation: str, number: int, times: int
) -> None:
    good, sample = Sample(seed=50), Sample()
    good.write(directory)
    with monkeypatch.context() as patch:
        fault = Fault(patch, operation, number, times=times)
        failed = try_to_write(directory, sample)
        assert fault.calls
    assert isinstance(failed, Failure)
    assert (failed.operation, failed.errno_name) == (operation, errno.errorcode[number])
    assert failed.reason == REASONS.get(number, Reason.IO_ERROR)
    assert temp_files(directory) == []
    assert not path_of(directory, sample.name).exists()
    assert good.read(directory).valid == 3
    sample.write(directory)
    assert sample.read(directory).valid == 3


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync", "rename"])
def test_a_failed_write_keeps_the_file_that_was_there(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    sample = Sample()
    sample.write(directory)
    before = path_of(directory, sample.name).stat()
    with monkeypatch.context() as patch:
        Fault(patch, operation, errno.EIO)
        assert isinstance(try_to_write(directory, sample), Failure)
    after = path_of(directory, sample.name).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert sample.read(directory).valid == 3


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_full_disk_at_any_transfer_of_a_write_leaves_no_temp_file(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    sample = Sample(num_blocks=2, block_bytes=2 * 2**20)  # two pieces, then the header
    with monkeypatch.context() as patch:
        Fault(patch, "pwritev", errno.ENOSPC, first=nth, times=1)
        failed = try_to_write(directory, sample)
    assert failed == Failure(Reason.DISK_FULL, "pwritev", "ENOSPC", os.strerror(errno.ENOSPC))
    assert temp_files(directory) == []


@pytest.mark.scenario("B118", then="a hundred stores on a full disk leave no temp file, and the next one works")
def test_many_writes_on_a_full_disk_leave_no_temp_file(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Fault(patch, "pwritev", errno.ENOSPC)
        failures = [try_to_write(directory, Sample(seed=seed)) for seed in range(100)]
    assert [failure.reason for failure in failures if isinstance(failure, Failure)] == [Reason.DISK_FULL] * 100
    assert temp_files(directory) == []
    Sample().write(directory)


@pytest.mark.parametrize("operation", WRITE_CALLS)
def test_an_interrupted_write_goes_on(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    sample = Sample()
    with monkeypatch.context() as patch:
        Fault(patch, operation, errno.EINTR, times=1)
        sample.write(directory)
    assert sample.read(directory).valid == 3


# A direct transfer stops between sectors, a buffered one anywhere.
@pytest.mark.parametrize(("limit", "direct_io"), [(512, True), (4096, True), (8192, True), (777, False), (5000, False)])
def test_short_transfers_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, direct_io: bool
) -> None:
    sample = Sample(block_bytes=4096 + 1000)
    with DataDirectory.open(tmp_path, direct_io=direct_io) as directory:
        shorts = [ShortTransfers(monkeypatch, operation, limit) for operation in ("pwritev", "preadv")]
        sample.write(directory)
        assert sample.read(directory).valid == 3
        assert verify_file(directory, sample.name).valid == 3
        assert all(short.calls > 3 for short in shorts)
        assert directory.direct_io == direct_io
    assert [sample.read_back(index) for index in range(3)] == sample.blocks


def test_a_write_that_writes_nothing_is_an_error(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: 0)
    failed = try_to_write(directory, Sample())
    assert isinstance(failed, Failure)
    assert (failed.reason, failed.operation) == (Reason.IO_ERROR, "pwritev")
    assert temp_files(directory) == []


def test_a_refused_direct_write_goes_on_buffered_from_then_on(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Sample(), Sample(seed=2)
    fault = Fault(monkeypatch, "pwritev", errno.EINVAL, times=1)
    first.write(directory)
    assert not directory.direct_io
    calls = fault.calls
    second.write(directory)
    assert fault.calls - calls == 2  # blocks and header, neither tried twice
    assert first.read(directory).valid == second.read(directory).valid == 3


@pytest.mark.scenario(
    "B043",
    then="two writers of one key have temp files of their own: one is held half way and fails, the other's file is"
    " whole and right, and no temp file is left",
)
def test_two_writers_of_one_key_have_nothing_in_common_but_the_name(directory: DataDirectory) -> None:
    slow, quick = Sample(num_blocks=3), Sample(num_blocks=2)
    assert slow.name == quick.name
    outcomes: list[WrittenFile | Failure] = []
    writer = threading.Thread(target=lambda: outcomes.append(try_to_write(directory, slow)))

    def is_slow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return threading.current_thread() is writer

    with inject(errno.EIO, "pwritev", nth=1, when=is_slow), hold("pwritev", when=is_slow, after=True) as barrier:
        writer.start()
        barrier.wait_reached()
        (half,) = temp_files(directory)
        quick.write(directory)
        assert temp_files(directory) == [half]
        barrier.release()
        writer.join(20)
    (failed,) = outcomes
    assert isinstance(failed, Failure)
    assert failed.errno_name == "EIO"
    assert temp_files(directory) == []
    assert path_of(directory, quick.name).stat().st_size == file_bytes(2, 4096, 4096)
    assert verify_file(directory, quick.name).valid == quick.read(directory).valid == 2
    assert [quick.read_back(index) for index in range(2)] == quick.blocks


def test_an_error_while_one_piece_is_hashed_waits_for_the_hashing(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots may be given to somebody else as soon as the call returns."""
    sample = Sample(num_blocks=2, block_bytes=2 * 2**20)
    begun, go_on, finished = threading.Event(), threading.Event(), threading.Event()
    submit = directory.hashers.submit

    def slow(function: object, *args: object) -> object:
        def work() -> None:
            begun.set()
            assert go_on.wait(30)
            function(*args)  # type: ignore[operator]
            finished.set()

        return submit(work)

    monkeypatch.setattr(directory.hashers, "submit", slow)

    def fail(fd: int, views: list[memoryview], offset: int) -> int:
        assert begun.wait(30)
        go_on.set()
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    assert isinstance(try_to_write(directory, sample), Failure)
    assert finished.is_set()


def test_a_file_on_a_bad_sector_can_be_replaced(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample()
    sample.write(directory)
    inode = path_of(directory, sample.name).stat().st_ino
    with monkeypatch.context() as patch:
        Fault(patch, "pread", errno.EIO)
        sample.write(directory)
    assert path_of(directory, sample.name).stat().st_ino != inode
    assert sample.read(directory).valid == 3


def test_the_bytes_are_on_disk_before_the_name(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that any crash leaves a whole file or none: nothing is written after the flush, and the rename comes last."""
    order: list[str] = []

    def record(operation: str) -> None:
        real = getattr(os, operation)

        def recorded(*args: object, **kwargs: object) -> object:
            order.append(operation)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, operation, recorded)

    for operation in ("pwritev", "write", "fdatasync", "rename", "fsync"):
        record(operation)
    sample = Sample()
    written = sample.write(directory)
    assert order == ["pwritev", "pwritev", "fdatasync", "rename"]
    for folder in written.flush:
        directory.flush(folder)
    assert set(order[4:]) == {"fsync"}


def test_a_folder_that_vanishes_before_the_rename_is_made_again(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample()
    real = os.rename
    folder = path_of(directory, sample.name).parent
    calls = 0

    def rename(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            folder.rmdir()  # as another thread does that removed the last file in it
        real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    written = sample.write(directory)
    assert calls == 2
    assert sample.name.folder[:-1] in written.flush
    assert sample.read(directory).valid == 3


# ---- reading


@pytest.mark.parametrize("operation", READ_CALLS)
@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
def test_a_read_that_fails_is_no_damage_and_works_again(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    sample = Sample()
    sample.write(directory)
    with monkeypatch.context() as patch:
        Fault(patch, operation, number)
        outcome = sample.read(directory)
        verified = verify_file(directory, sample.name)
    for found in (outcome, verified):
        assert (found.valid, found.damaged) == (0, False)
        assert found.failure is not None
        assert (found.failure.operation, found.failure.errno_name) == (operation, errno.errorcode[number])
    assert sample.read(directory).valid == 3


@pytest.mark.parametrize("bad", range(5))
def test_the_blocks_before_a_bad_sector_are_good_and_those_behind_are_not_touched(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    sample = Sample(num_blocks=5)
    sample.write(directory)
    real = os.preadv
    sector = 4096 + bad * 4096

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if offset <= sector < offset + sum(map(len, views)):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (bad, Reason.IO_ERROR, False)
    assert [sample.read_back(index) for index in range(bad)] == sample.blocks[:bad]
    assert all(sample.read_back(index) == bytes([POISON]) * 4096 for index in range(bad, 5))
    assert outcome.failure == Failure(Reason.IO_ERROR, "preadv", "EIO", "Input/output error")


def test_a_passing_error_of_one_read_costs_no_block(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(num_blocks=5)
    sample.write(directory)
    Fault(monkeypatch, "preadv", errno.EIO, times=1)
    assert sample.read(directory).valid == 5


def test_a_damaged_block_before_a_bad_sector_is_damage(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(num_blocks=5)
    sample.write(directory)
    with path_of(directory, sample.name).open("r+b") as file:
        file.seek(4096 + 4096)
        file.write(b"damage")
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if offset + sum(map(len, views)) > 4096 + 3 * 4096:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (1, Reason.CHECKSUM, True)


def test_an_interrupted_read_goes_on(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample()
    sample.write(directory)
    for operation in (*READ_CALLS, "preadv"):
        with monkeypatch.context() as patch:
            Fault(patch, operation, errno.EINTR, times=1)
            assert sample.read(directory).valid == 3


def test_a_refused_direct_read_goes_on_buffered(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample()
    sample.write(directory)
    Fault(monkeypatch, "preadv", errno.EINVAL, times=1)
    assert sample.read(directory).valid == 3
    assert not directory.direct_io


def test_a_file_that_is_cut_while_it_is_read_is_damaged(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(num_blocks=4)
    sample.write(directory)
    path = path_of(directory, sample.name)
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        os.truncate(path, 4096 + 2 * 4096)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (2, Reason.SHORT_FILE, True)
    assert verify_file(directory, sample.name).reason == Reason.SHORT_FILE


@pytest.mark.parametrize("at", [4096, 4096 + 5000, 4096 + 3 * 4096 - 1])
def test_a_disk_that_flips_a_bit_in_a_block_gives_no_wrong_block(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    sample = Sample()
    sample.write(directory)
    lie = FlippedBit(monkeypatch, "preadv", at=at, bit=5)
    outcome = sample.read(directory)
    assert lie.flipped
    assert (outcome.valid, outcome.reason) == ((at - 4096) // 4096, Reason.CHECKSUM)
    assert [sample.read_back(index) for index in range(outcome.valid)] == sample.blocks[: outcome.valid]
    assert verify_file(directory, sample.name).reason == Reason.CHECKSUM


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize(
    ("operation", "at"), [("preadv", 4096 + 5000), ("preadv", 4096), ("pread", 30), ("pread", 400)]
)
def test_a_bit_that_was_flipped_on_the_way_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, at: int, direct_io: bool
) -> None:
    """By memory, a cable, a controller: what is on disk is right when it is read again."""
    sample = Sample()
    with DataDirectory.open(tmp_path, direct_io=direct_io) as directory:
        sample.write(directory)
        lie = FlippedBit(monkeypatch, operation, at=at, bit=5, times=1)
        outcome = sample.read(directory)
        assert lie.flipped == 1
        assert (outcome.valid, outcome.damaged) == (3, False)
        assert [sample.read_back(index) for index in range(3)] == sample.blocks
        if operation == "preadv":
            assert outcome.failure is not None
            assert outcome.failure.errno_name == "CHECKSUM"
        FlippedBit(monkeypatch, operation, at=at, bit=4, times=1)
        assert verify_file(directory, sample.name).valid == 3


@pytest.mark.parametrize("at", [0, 9, 13, 30, 60, 400])
def test_a_disk_that_flips_a_bit_in_a_header_gives_no_block_at_all(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    sample = Sample()
    sample.write(directory)
    FlippedBit(monkeypatch, "pread", at=at, bit=2)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.damaged) == (0, True)
    assert all(sample.read_back(index) == bytes([POISON]) * 4096 for index in range(3))


def test_a_scrub_tells_a_bad_sector_from_damage(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample()
    sample.write(directory)
    Fault(monkeypatch, "preadv", errno.EIO, first=1)
    verified = verify_file(directory, sample.name)
    assert (verified.reason, verified.damaged) == (Reason.IO_ERROR, False)


# ---- removing


@pytest.mark.parametrize("operation", ["open", "unlink"])
def test_a_removal_that_fails_is_named(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    sample = Sample()
    sample.write(directory)
    with monkeypatch.context() as patch:
        Fault(patch, operation, errno.EIO)
        with pytest.raises(Exception, match=f"{operation} failed with EIO"):
            remove_extent(directory, sample.name)
    assert read_blocks(directory, sample.arena, sample.read_order()).valid == 3
