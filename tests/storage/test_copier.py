from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.system_calls import FlippedBit, ShortTransfers, inject
from tests.storage.samples import Sample, identity, noise, path_of, temp_files
from tests.workers.desk import demote_order
from tierkv.core.reasons import Reason
from tierkv.storage.codec_names import FileCodec
from tierkv.storage.copier import copy_extent
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.extent_file import WrittenFile, read_header, verify_file
from tierkv.storage.plane_codec import PlaneCodec
from tierkv.storage.system_calls import Failure


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "disk", kind=Kind.DISK, owner="0" * 8) as opened:
        yield opened


def copy(nvme: DataDirectory, disk: DataDirectory, sample: Sample) -> WrittenFile | Failure:
    return copy_extent(nvme, disk, demote_order(sample, 1), identity=sample.identity)


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes"), [(1, 1), (3, 4096), (5, 5000), (700, 4096), (2, 3 * 2**20), (3, 2**20 + 4096)]
)
def test_a_copy_is_the_file_byte_for_byte(
    nvme: DataDirectory, disk: DataDirectory, num_blocks: int, block_bytes: int
) -> None:
    sample = Sample(num_blocks=num_blocks, block_bytes=block_bytes)
    written = sample.write(nvme)
    copied = copy(nvme, disk, sample)
    assert isinstance(copied, WrittenFile)
    assert (copied.file_bytes, copied.keys) == (written.file_bytes, sample.keys)
    assert path_of(disk, sample.name).read_bytes() == path_of(nvme, sample.name).read_bytes()
    assert sample.name.folder in copied.flush
    assert temp_files(disk) == []


@pytest.mark.parametrize("limit", [512, 4096, 65_536])
def test_transfers_that_are_cut_short_are_gone_on_with(nvme: DataDirectory, disk: DataDirectory, limit: int) -> None:
    sample = Sample(num_blocks=5, block_bytes=9000)
    sample.write(nvme)
    with pytest.MonkeyPatch.context() as patch:
        ShortTransfers(patch, "preadv", limit)
        ShortTransfers(patch, "pwritev", limit)
        assert isinstance(copy(nvme, disk, sample), WrittenFile)
    assert path_of(disk, sample.name).read_bytes() == path_of(nvme, sample.name).read_bytes()


def test_a_bit_that_is_flipped_once_costs_a_second_look(nvme: DataDirectory, disk: DataDirectory) -> None:
    sample = Sample(num_blocks=5)
    sample.write(nvme)
    with pytest.MonkeyPatch.context() as patch:
        lie = FlippedBit(patch, "preadv", at=3 * 4096, times=1)
        assert isinstance(copy(nvme, disk, sample), WrittenFile)
        assert lie.flipped == 1
    assert path_of(disk, sample.name).read_bytes() == path_of(nvme, sample.name).read_bytes()


def test_what_stays_flipped_is_not_copied(nvme: DataDirectory, disk: DataDirectory) -> None:
    sample = Sample(num_blocks=5)
    sample.write(nvme)
    with pytest.MonkeyPatch.context() as patch:
        FlippedBit(patch, "preadv", at=3 * 4096)
        failure = copy(nvme, disk, sample)
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.errno_name) == (Reason.CHECKSUM, "")
    assert not path_of(disk, sample.name).exists()
    assert temp_files(disk) == []


@pytest.mark.parametrize("operation", ["preadv", "pread"])
def test_a_source_that_cannot_be_read_says_nothing_about_the_target(
    nvme: DataDirectory, disk: DataDirectory, operation: str
) -> None:
    sample = Sample()
    sample.write(nvme)
    with inject(errno.EIO, operation, times=10):
        failure = copy(nvme, disk, sample)
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.operation, failure.errno_name) == (Reason.IO_ERROR, "copy", "")
    assert "EIO" in failure.problem


def test_a_target_that_cannot_be_written_to_is_told_by_call_and_error(nvme: DataDirectory, disk: DataDirectory) -> None:
    sample = Sample()
    sample.write(nvme)
    with inject(errno.ENOSPC, "pwritev"):
        failure = copy(nvme, disk, sample)
    assert isinstance(failure, Failure)
    assert (failure.reason, failure.operation, failure.errno_name) == (Reason.DISK_FULL, "pwritev", "ENOSPC")
    assert temp_files(disk) == []


def test_a_file_of_another_layout_than_the_group_s_is_not_copied(nvme: DataDirectory, disk: DataDirectory) -> None:
    sample = Sample()
    sample.write(nvme)
    failure = copy_extent(nvme, disk, demote_order(sample, 1), identity=identity(dtype="float32"))
    assert isinstance(failure, Failure)
    assert failure.reason == Reason.LAYOUT_MISMATCH


@pytest.mark.parametrize("size", [0, 100, 4096, 8192])
def test_a_damaged_file_of_its_name_is_replaced(nvme: DataDirectory, disk: DataDirectory, size: int) -> None:
    sample = Sample()
    sample.write(nvme)
    copy(nvme, disk, sample)
    os.truncate(path_of(disk, sample.name), size)
    copied = copy(nvme, disk, sample)
    assert isinstance(copied, WrittenFile)
    assert copied.damaged in (Reason.SHORT_FILE, Reason.BAD_HEADER)
    assert sample.read(disk).valid == 3
    again = copy(nvme, disk, sample)
    assert isinstance(again, WrittenFile)
    assert again.damaged is None


def test_a_file_of_its_name_with_a_damaged_block_is_replaced(nvme: DataDirectory, disk: DataDirectory) -> None:
    """Its header is right, so nothing but reading it tells: and the file on NVMe will be given up for it."""
    sample = Sample(num_blocks=5)
    sample.write(nvme)
    assert isinstance(copy(nvme, disk, sample), WrittenFile)
    right = path_of(disk, sample.name).read_bytes()
    path_of(disk, sample.name).write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    copied = copy(nvme, disk, sample)
    assert isinstance(copied, WrittenFile)
    assert copied.damaged is Reason.CHECKSUM
    assert path_of(disk, sample.name).read_bytes() == right
    assert temp_files(disk) == []


def test_where_a_file_has_one_name_only_it_is_copied_all_the_same(nvme: DataDirectory, disk: DataDirectory) -> None:
    sample = Sample()
    sample.write(nvme)
    with inject(errno.EPERM, "link", times=10):
        assert isinstance(copy(nvme, disk, sample), WrittenFile)
    assert sample.read(disk).valid == 3
    assert temp_files(disk) == []


def test_a_file_that_comes_between_looking_and_naming_is_looked_at_again(
    nvme: DataDirectory, disk: DataDirectory, tmp_path: Path
) -> None:
    """Another node's, and longer: it stays."""
    mine, longer = Sample(num_blocks=2), Sample(num_blocks=4)
    mine.write(nvme)
    real = os.fdatasync

    def and_another_comes(fd: int) -> None:
        real(fd)
        os.fdatasync = real
        longer.write(disk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", and_another_comes)
        copied = copy(nvme, disk, mine)
    assert isinstance(copied, WrittenFile)
    assert copied.keys == longer.keys
    assert longer.read(disk).valid == 4
    assert temp_files(disk) == []


def test_a_shorter_file_that_has_become_a_longer_one_is_not_replaced(nvme: DataDirectory, disk: DataDirectory) -> None:
    short, mine, longer = (Sample(num_blocks=count) for count in (1, 2, 4))
    short.write(disk)
    mine.write(nvme)
    real = os.fdatasync

    def and_it_grows(fd: int) -> None:
        real(fd)
        os.fdatasync = real
        longer.write(disk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", and_it_grows)
        copied = copy(nvme, disk, mine)
    assert isinstance(copied, WrittenFile)
    assert copied.keys == longer.keys
    assert longer.read(disk).valid == 4


def test_where_nobody_may_set_times_it_is_copied_all_the_same(nvme: DataDirectory, disk: DataDirectory) -> None:
    sample = Sample()
    sample.write(nvme)
    with inject(errno.EPERM, "utime", times=10):
        assert isinstance(copy(nvme, disk, sample), WrittenFile)
    assert sample.read(disk).valid == 3


# ---- codecs

CODECS = [FileCodec.RAW, FileCodec.ZSTD]
BLOCK_BYTES = 5 * 4096 + 500


def opened(path: Path, codec: FileCodec, kind: Kind = Kind.DATA) -> DataDirectory:
    return DataDirectory.open(path, kind=kind, owner="0" * 8 if kind is Kind.DISK else "", codec=codec)


@pytest.mark.parametrize("below", CODECS)
@pytest.mark.parametrize("above", CODECS)
@pytest.mark.parametrize("block_bytes", [BLOCK_BYTES, 2**20 + 4096])
def test_a_copy_has_the_codec_of_where_it_goes_and_the_same_blocks(
    tmp_path: Path, above: FileCodec, below: FileCodec, block_bytes: int
) -> None:
    sample = Sample(num_blocks=4, block_bytes=block_bytes, like_kv=True, extras={1: [b"image"]})
    sample.put(2, noise("in between", block_bytes))
    with opened(tmp_path / "data", above) as nvme, opened(tmp_path / "disk", below, Kind.DISK) as disk:
        written = sample.write(nvme)
        copied = copy(nvme, disk, sample)
        assert isinstance(copied, WrittenFile)
        path = path_of(disk, sample.name)
        assert copied.file_bytes == path.stat().st_size
        assert (copied.file_bytes == written.file_bytes) == (above is below)
        ours, theirs = (read_header(one, sample.name).header for one in (nvme, disk))
        assert (theirs.codec == "") == (below is FileCodec.RAW)
        assert (theirs.checksums, theirs.keys, theirs.created) == (ours.checksums, ours.keys, ours.created)
        if above is below:
            assert path.read_bytes() == path_of(nvme, sample.name).read_bytes()
        outcome = sample.read(disk)
        assert (outcome.valid, outcome.extras) == (4, sample.extras)
        assert [sample.read_back(index) for index in range(4)] == sample.blocks
        assert verify_file(disk, sample.name).valid == 4
        assert temp_files(disk) == []


def test_what_does_not_become_smaller_is_copied_as_it_is(tmp_path: Path) -> None:
    sample = Sample(num_blocks=4, block_bytes=BLOCK_BYTES)
    with opened(tmp_path / "data", FileCodec.RAW) as nvme, opened(tmp_path / "disk", FileCodec.ZSTD, Kind.DISK) as disk:
        sample.write(nvme)
        assert isinstance(copy(nvme, disk, sample), WrittenFile)
        assert path_of(disk, sample.name).read_bytes() == path_of(nvme, sample.name).read_bytes()


def test_without_the_group_s_identity_a_copy_has_the_codec_of_the_source(tmp_path: Path) -> None:
    sample = Sample(num_blocks=4, block_bytes=BLOCK_BYTES, like_kv=True)
    with opened(tmp_path / "data", FileCodec.RAW) as nvme, opened(tmp_path / "disk", FileCodec.ZSTD, Kind.DISK) as disk:
        sample.write(nvme)
        assert isinstance(copy_extent(nvme, disk, demote_order(sample, 1)), WrittenFile)
        assert path_of(disk, sample.name).read_bytes() == path_of(nvme, sample.name).read_bytes()


@pytest.mark.parametrize("below", CODECS)
def test_a_file_of_the_other_codec_that_is_there_is_taken_over(tmp_path: Path, below: FileCodec) -> None:
    """Another node's, whose setting is another: its blocks are the same."""
    sample = Sample(num_blocks=4, block_bytes=BLOCK_BYTES, like_kv=True)
    other = FileCodec.RAW if below is FileCodec.ZSTD else FileCodec.ZSTD
    with opened(tmp_path / "data", FileCodec.RAW) as nvme, opened(tmp_path / "disk", other, Kind.DISK) as theirs:
        size = sample.write(theirs).file_bytes
        sample.write(nvme)
        with opened(tmp_path / "disk", below, Kind.DISK) as disk:
            copied = copy(nvme, disk, sample)
        assert isinstance(copied, WrittenFile)
        assert copied.file_bytes == size


@pytest.mark.parametrize(("above", "below"), [CODECS, CODECS[::-1]])
def test_damage_of_the_source_is_found_while_it_is_written_anew(
    tmp_path: Path, above: FileCodec, below: FileCodec
) -> None:
    sample = Sample(num_blocks=4, block_bytes=BLOCK_BYTES, like_kv=True)
    with opened(tmp_path / "data", above) as nvme, opened(tmp_path / "disk", below, Kind.DISK) as disk:
        sample.write(nvme)
        path = path_of(nvme, sample.name)
        raw = path.read_bytes()
        for at in range(4096, len(raw), 7 * 4096):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
            failure = copy(nvme, disk, sample)
            assert isinstance(failure, Failure)
            assert (failure.reason, failure.errno_name) == (Reason.CHECKSUM, "")
            assert not path_of(disk, sample.name).exists()
        path.write_bytes(raw)
        with pytest.MonkeyPatch.context() as patch:
            lie = FlippedBit(patch, "preadv", at=2 * 4096, times=1)
            assert isinstance(copy(nvme, disk, sample), WrittenFile)
            assert lie.flipped == 1
        assert sample.read(disk).valid == 4
        assert temp_files(disk) == []


@pytest.mark.parametrize(("above", "below"), [CODECS, CODECS[::-1]])
def test_a_target_that_takes_no_write_is_told_by_call_and_error_when_it_is_written_anew(
    tmp_path: Path, above: FileCodec, below: FileCodec
) -> None:
    sample = Sample(num_blocks=4, block_bytes=BLOCK_BYTES, like_kv=True)
    with opened(tmp_path / "data", above) as nvme, opened(tmp_path / "disk", below, Kind.DISK) as disk:
        sample.write(nvme)
        with inject(errno.ENOSPC, "pwritev"):
            failure = copy(nvme, disk, sample)
        assert isinstance(failure, Failure)
        assert (failure.reason, failure.operation, failure.errno_name) == (Reason.DISK_FULL, "pwritev", "ENOSPC")
        assert temp_files(disk) == []


def test_a_codec_that_gives_back_another_block_stores_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file on NVMe will be given up for the copy: a block that does not decode to itself is stored as it is."""
    sample = Sample(num_blocks=4, block_bytes=BLOCK_BYTES, like_kv=True)
    encode = PlaneCodec.encode

    def forgetful(codec: PlaneCodec, block: memoryview, most_bytes: int) -> bytes | None:
        return encode(codec, memoryview(bytes(len(block))), most_bytes)

    with opened(tmp_path / "data", FileCodec.RAW) as nvme, opened(tmp_path / "disk", FileCodec.ZSTD, Kind.DISK) as disk:
        sample.write(nvme)
        with monkeypatch.context() as patch:
            patch.setattr(PlaneCodec, "encode", forgetful)
            assert isinstance(copy(nvme, disk, sample), WrittenFile)
        assert sample.read(disk).valid == 4
        assert path_of(disk, sample.name).read_bytes() == path_of(nvme, sample.name).read_bytes()
