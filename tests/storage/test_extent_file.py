from __future__ import annotations

import logging
import os
import socket
import struct
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.storage.samples import POISON, Sample, identity, path_of, temp_files
from tierkv.core.reasons import Reason
from tierkv.errors import BrokenInvariant, DamagedFile, ForeignFile, StorageError, UnknownFormat
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import (
    ReadOutcome,
    read_blocks,
    read_header,
    remove_extent,
    verify_file,
    write_extent,
)
from tierkv.storage.format import (
    FORMAT_VERSION,
    PREFIX_BYTES,
    decode_header,
    decode_prefix,
    file_bytes,
    frame_header,
    pack_header,
)
from tierkv.storage.names import ExtentName
from tierkv.storage.system_calls import Failure
from tierkv.storage.transfer import PIECE_BYTES


def replace_header(path: Path, **changes: object) -> None:
    """Forge: another header of the same length with a right checksum."""
    raw = path.read_bytes()
    old = decode_header(raw)
    new = pack_header(msgspec.structs.replace(old, **changes))
    path.write_bytes(new + raw[decode_prefix(raw).header_bytes :])


def flip(path: Path, offset: int, bits: int = 0x01) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def poisoned(sample: Sample, index: int) -> bool:
    return sample.read_back(index) == bytes([POISON]) * sample.block_bytes


# ---- round trip


@pytest.mark.scenario(
    "B222",
    then="blocks of 4096k, 4096k+512 and 1000 bytes come back as they were on a disk, tmpfs and an overlay, with"
    " O_DIRECT and without; the header keeps the real length and the file's size is the padded one",
)
@pytest.mark.parametrize("block_bytes", [4096, 3 * 4096, 3 * 4096 + 512, 4096 + 1, 1000, 1])
@pytest.mark.parametrize("direct_io", [True, False])
def test_blocks_come_back_as_they_were_on_any_file_system(
    any_file_system: Path, block_bytes: int, direct_io: bool
) -> None:
    sample = Sample(block_bytes=block_bytes, extras={2: [b"image"]})
    with DataDirectory.open(any_file_system / "data", direct_io=direct_io) as directory:
        written = sample.write(directory)
        outcome = sample.read(directory)
        path = path_of(directory, sample.name)
        assert read_header(directory, sample.name).header.block_bytes == block_bytes
        assert outcome == ReadOutcome(3, tokens=sample.tokens, extras=sample.extras)
        assert [sample.read_back(index) for index in range(3)] == sample.blocks
        assert written.file_bytes == path.stat().st_size == file_bytes(3, block_bytes, 4096)
        assert path.stat().st_mode & 0o7777 == 0o600
        assert temp_files(directory) == []


def test_what_lies_behind_a_block_in_its_slot_gets_into_no_file(directory: DataDirectory) -> None:
    sample = Sample(block_bytes=4096 + 1000)
    sample.write(directory)
    raw = path_of(directory, sample.name).read_bytes()
    assert bytes([POISON]) * 8 not in raw
    assert raw[4096 + 4096 + 1000 : 4096 + 8192] == bytes(4096 - 1000)


def test_any_run_of_blocks_can_be_read_and_nothing_else_is_touched(directory: DataDirectory) -> None:
    sample = Sample(num_blocks=5)
    sample.write(directory)
    for first in range(5):
        for count in range(1, 5 - first + 1):
            sample.arena[5 * 4096 :] = bytes([POISON]) * (5 * 4096)
            assert sample.read(directory, first, count).valid == count
            assert [sample.read_back(index) for index in range(count)] == sample.blocks[first : first + count]
            assert all(poisoned(sample, index) for index in range(count, 5))


def test_slots_may_lie_anywhere_in_the_arena(directory: DataDirectory) -> None:
    sample = Sample(num_blocks=3)
    order = sample.write_order(slots=[2 * 4096, 0, 4096])
    write_extent(directory, sample.arena, order, identity=sample.identity)
    outcome = read_blocks(directory, sample.arena, sample.read_order(slots=[5 * 4096, 3 * 4096, 4 * 4096]))
    assert outcome.valid == 3
    assert [sample.read_back(index) for index in (2, 0, 1)] == [sample.blocks[index] for index in (2, 0, 1)]


def test_reading_no_block_is_fine(directory: DataDirectory) -> None:
    sample = Sample()
    sample.write(directory)
    outcome = sample.read(directory, 1, 0)
    assert (outcome.valid, outcome.reason) == (0, None)


@pytest.mark.parametrize("block_bytes", [PIECE_BYTES // 2 + 4096, PIECE_BYTES + 4096, 2 * PIECE_BYTES + 100])
def test_blocks_that_do_not_fit_the_pieces_come_back(directory: DataDirectory, block_bytes: int) -> None:
    sample = Sample(num_blocks=3, block_bytes=block_bytes)
    sample.write(directory)
    assert sample.read(directory).valid == 3
    assert [sample.read_back(index) for index in range(3)] == sample.blocks
    assert verify_file(directory, sample.name).valid == 3


@pytest.mark.scenario(
    "B119",
    then="extents of 10, 2, 10 and 1 blocks read one after the other into the same slots each come with their own"
    " length and bytes and touch nothing behind them; another block size than the file's is layout_mismatch",
)
def test_extents_of_ten_two_ten_and_one_blocks_each_keep_their_length(directory: DataDirectory) -> None:
    samples = [Sample(num_blocks=count, seed=100 * count) for count in (10, 2, 1)]
    for sample in samples:
        sample.write(directory)
    buffer = samples[0].arena
    for sample in (samples[0], samples[1], samples[0], samples[2]):
        buffer[:] = bytes([POISON]) * len(buffer)
        slots = [index * sample.slot_bytes for index in range(sample.num_blocks)]
        outcome = read_blocks(directory, buffer, sample.read_order(slots=slots), identity=sample.identity)
        assert outcome.valid == sample.num_blocks
        used = sample.num_blocks * sample.slot_bytes
        assert bytes(buffer[:used]) == b"".join(sample.blocks)
        assert bytes(buffer[used:]) == bytes([POISON]) * (len(buffer) - used)
    wrong = read_blocks(directory, buffer, samples[1].read_order(slots=[0, 8192], block_bytes=8192))
    assert (wrong.valid, wrong.reason) == (0, Reason.LAYOUT_MISMATCH)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.integers(1, 6), st.integers(1, 9000), st.data())
def test_any_size_and_any_damage_gives_right_blocks_or_fewer(
    directory: DataDirectory, num_blocks: int, block_bytes: int, data: st.DataObject
) -> None:
    sample = Sample(num_blocks=num_blocks, block_bytes=block_bytes)
    sample.write(directory)
    path = path_of(directory, sample.name)
    offset = data.draw(st.integers(0, path.stat().st_size - 1))
    flip(path, offset, data.draw(st.sampled_from([1 << bit for bit in range(8)])))
    outcome = sample.read(directory)
    assert outcome.damaged
    assert outcome.valid == (0 if offset < 4096 else (offset - 4096) // sample.slot_bytes)
    assert [sample.read_back(index) for index in range(outcome.valid)] == sample.blocks[: outcome.valid]
    assert verify_file(directory, sample.name).valid == outcome.valid


# ---- writing


def test_the_directories_to_flush_are_named_and_only_once_the_whole_path(directory: DataDirectory) -> None:
    sample = Sample()
    written = sample.write(directory)
    folder = sample.name.folder
    assert set(written.flush) == {folder[:depth] for depth in range(len(folder) + 1)}
    for needed in written.flush:
        directory.flush(needed)
    assert sample.write(directory).flush == (folder,)


def test_a_damaged_file_is_replaced_by_a_new_copy(directory: DataDirectory) -> None:
    sample = Sample()
    sample.write(directory)
    path = path_of(directory, sample.name)
    inode = path.stat().st_ino
    flip(path, 5000)
    assert sample.read(directory).reason == Reason.CHECKSUM
    sample.write(directory)
    assert path.stat().st_ino != inode
    assert sample.read(directory).valid == 3


@pytest.mark.parametrize("content", [b"", b"x", b"garbage" * 1000, bytes(8192)])
def test_whatever_is_no_extent_under_its_name_is_replaced(directory: DataDirectory, content: bytes) -> None:
    sample = Sample()
    path = path_of(directory, sample.name)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    sample.write(directory)
    assert sample.read(directory).valid == 3


def newer_file(sample: Sample, directory: DataDirectory) -> bytes:
    raw = path_of(directory, sample.name).read_bytes()
    body = raw[PREFIX_BYTES : PREFIX_BYTES + decode_prefix(raw).body_bytes]
    return frame_header(body, FORMAT_VERSION + 1) + raw[4096:]


def test_a_file_of_a_newer_version_is_neither_read_nor_replaced_nor_taken_for_damaged(directory: DataDirectory) -> None:
    sample = Sample()
    sample.write(directory)
    newer = newer_file(sample, directory)
    path_of(directory, sample.name).write_bytes(newer)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.UNKNOWN_FORMAT, False)
    verified = verify_file(directory, sample.name)
    assert (verified.reason, verified.damaged) == (Reason.UNKNOWN_FORMAT, False)
    with pytest.raises(UnknownFormat):
        read_header(directory, sample.name)
    failed = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
    assert isinstance(failed, Failure)
    assert failed.reason == Reason.UNKNOWN_FORMAT
    assert not remove_extent(directory, sample.name)
    assert path_of(directory, sample.name).read_bytes() == newer
    assert temp_files(directory) == []


def test_a_damaged_version_number_is_damage_and_can_be_replaced(directory: DataDirectory) -> None:
    sample = Sample()
    sample.write(directory)
    flip(path_of(directory, sample.name), 8, 0x04)
    assert sample.read(directory).damaged
    sample.write(directory)
    assert sample.read(directory).valid == 3


def test_keys_that_are_not_those_of_the_tokens_are_not_written(directory: DataDirectory) -> None:
    sample = Sample()
    order = sample.write_order(tokens=bytes(len(sample.tokens)))
    failed = write_extent(directory, sample.arena, order, identity=sample.identity)
    assert isinstance(failed, Failure)
    assert failed.reason == Reason.KEY_MISMATCH
    assert not path_of(directory, sample.name).exists()


def test_empty_extras_are_no_extras(directory: DataDirectory) -> None:
    sample = Sample()
    written = write_extent(directory, sample.arena, sample.write_order(extras={1: []}), identity=sample.identity)
    assert not isinstance(written, Failure)
    assert sample.read(directory).extras == {}


@pytest.mark.parametrize("slots", [[0, 4096, 100], [0, 4096, -4096], [0, 4096, 6 * 4096]])
def test_slots_that_are_no_slots_are_a_bug(directory: DataDirectory, slots: list[int]) -> None:
    sample = Sample()
    with pytest.raises(BrokenInvariant):
        write_extent(directory, sample.arena, sample.write_order(slots=slots), identity=sample.identity)
    with pytest.raises(BrokenInvariant):
        read_blocks(directory, sample.arena, sample.read_order(slots=slots))
    assert temp_files(directory) == []


def test_more_or_fewer_slots_than_keys_are_a_bug(directory: DataDirectory) -> None:
    sample = Sample()
    for slots in ([0, 4096], [0, 4096, 8192, 12288]):
        with pytest.raises(BrokenInvariant):
            write_extent(directory, sample.arena, sample.write_order(slots=slots), identity=sample.identity)
    with pytest.raises(BrokenInvariant):
        read_blocks(directory, sample.arena, sample.read_order(keys=sample.keys[:64]))


def test_the_stages_of_a_write_are_told_in_order(directory: DataDirectory) -> None:
    sample = Sample()
    seen = []

    def reached(stage: str) -> None:
        seen.append((stage, len(temp_files(directory)), path_of(directory, sample.name).exists()))

    write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity, reached=reached)
    assert seen == [("temp_written", 1, False), ("before_rename", 1, False), ("renamed", 0, True)]


def test_a_write_that_is_interrupted_by_an_exception_leaves_no_temp_file(directory: DataDirectory) -> None:
    def reached(stage: str) -> None:
        raise KeyboardInterrupt

    sample = Sample()
    with pytest.raises(KeyboardInterrupt):
        write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity, reached=reached)
    assert temp_files(directory) == []


# ---- damage


def test_every_byte_of_the_header_and_a_bit_of_every_block_is_covered(directory: DataDirectory) -> None:
    sample = Sample(block_bytes=1000)
    sample.write(directory)
    path = path_of(directory, sample.name)
    offsets = [*range(0, PREFIX_BYTES + 8), *range(64, 4096, 37), *range(4096, path.stat().st_size, 500)]
    for offset in offsets:
        flip(path, offset)
        outcome = sample.read(directory)
        assert outcome.damaged, offset
        assert outcome.valid == max(0, (offset - 4096) // 4096), offset
        assert outcome.reason == (Reason.BAD_HEADER if offset < 4096 else Reason.CHECKSUM) or offset in range(12, 16)
        flip(path, offset)
    assert sample.read(directory).valid == 3


def test_blocks_before_the_damaged_one_are_still_good(directory: DataDirectory) -> None:
    sample = Sample(num_blocks=4)
    sample.write(directory)
    flip(path_of(directory, sample.name), 4096 + 2 * 4096 + 17)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (2, Reason.CHECKSUM, True)
    assert sample.read(directory, 0, 2).reason is None
    assert sample.read(directory, 3, 1).valid == 1
    assert outcome.tokens == sample.tokens


@pytest.mark.parametrize("size", [0, 1, 55, 56, 4095, 4096, 4097, 8192, 3 * 4096 + 17])
def test_a_short_file_is_damaged(directory: DataDirectory, size: int) -> None:
    sample = Sample()
    sample.write(directory)
    os.truncate(path_of(directory, sample.name), size)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.SHORT_FILE, True)
    verified = verify_file(directory, sample.name)
    assert (verified.valid, verified.reason, verified.file_bytes) == (0, Reason.SHORT_FILE, size)
    with pytest.raises(DamagedFile):
        read_header(directory, sample.name)


def test_a_file_that_is_too_long_is_damaged(directory: DataDirectory) -> None:
    sample = Sample()
    sample.write(directory)
    with path_of(directory, sample.name).open("ab") as file:
        file.write(bytes(4096))
    assert sample.read(directory).reason == Reason.SHORT_FILE


def test_a_header_that_promises_more_than_the_file_has_is_not_believed(directory: DataDirectory) -> None:
    sample = Sample()
    sample.write(directory)
    path = path_of(directory, sample.name)
    raw = bytearray(path.read_bytes())
    struct.pack_into("<I", raw, 12, 2**25)
    path.write_bytes(raw)
    assert sample.read(directory).reason == Reason.SHORT_FILE


def test_a_missing_file_is_not_found_and_not_damaged(directory: DataDirectory) -> None:
    sample = Sample()
    for outcome in (sample.read(directory), verify_file(directory, sample.name)):
        assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.NOT_FOUND, False)
    sample.write(directory)
    path_of(directory, sample.name).unlink()
    assert sample.read(directory).reason == Reason.NOT_FOUND


# ---- what is no file of ours


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    outside = path.parents[6] / "outside"
    outside.write_bytes(b"mine")
    path.symlink_to(outside)


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def make_socket(path: Path) -> None:
    bound = socket.socket(socket.AF_UNIX)
    before = Path.cwd()
    os.chdir(path.parent)  # the whole path is longer than a socket's may be
    try:
        bound.bind(path.name)
    finally:
        os.chdir(before)
        bound.close()


@pytest.mark.parametrize("make", [make_fifo, make_directory, make_link, make_dangling_link, make_socket])
def test_what_is_no_regular_file_is_left_alone(directory: DataDirectory, make: object) -> None:
    sample = Sample()
    path = path_of(directory, sample.name)
    path.parent.mkdir(parents=True)
    make(path)  # type: ignore[operator]
    before = path.lstat()
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.NOT_FOUND, False)
    assert not verify_file(directory, sample.name).damaged
    with pytest.raises(ForeignFile):
        read_header(directory, sample.name)
    failed = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
    assert isinstance(failed, Failure)
    assert (failed.reason, failed.operation) == (Reason.NAME_TAKEN, "rename")
    assert not remove_extent(directory, sample.name)
    assert path.lstat().st_ino == before.st_ino
    assert temp_files(directory) == []


def test_a_link_in_place_of_a_folder_leads_nowhere(directory: DataDirectory, tmp_path: Path) -> None:
    sample = Sample()
    sample.write(directory)
    shelf = path_of(directory, sample.name).parent
    shelf.rename(tmp_path / "outside")
    shelf.symlink_to(tmp_path / "outside")
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.damaged) == (0, False)
    failed = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
    assert isinstance(failed, Failure)
    with pytest.raises(StorageError):
        remove_extent(directory, sample.name)
    assert (tmp_path / "outside" / sample.name.file).exists()


# ---- the wrong file under a right name


@pytest.mark.parametrize(
    ("changes", "reason", "named"),
    [
        ({"group": bytes(32)}, Reason.IDENTITY_MISMATCH, "group"),
        ({"fingerprint": "cd" * 32}, Reason.IDENTITY_MISMATCH, "fingerprint"),
        ({"rank": 1}, Reason.IDENTITY_MISMATCH, "rank"),
        ({"dtype": "float16"}, Reason.LAYOUT_MISMATCH, "dtype"),
        ({"layout": "engine=other"}, Reason.LAYOUT_MISMATCH, "layout"),
        ({"block_bytes": 4095}, Reason.LAYOUT_MISMATCH, "block_bytes"),
    ],
)
def test_a_forged_header_is_refused_by_the_name_of_what_differs(
    directory: DataDirectory, changes: dict[str, object], reason: Reason, named: str
) -> None:
    sample = Sample(first_token=8)
    sample.write(directory)
    replace_header(path_of(directory, sample.name), **changes)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, reason, True)
    assert outcome.problem.startswith(f"{named}: ")
    assert all(poisoned(sample, index) for index in range(3))


def test_a_good_file_of_another_key_under_this_one_is_refused(directory: DataDirectory) -> None:
    sample, other = Sample(), Sample(seed=2)
    other.write(directory)
    path = path_of(directory, sample.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path_of(directory, other.name).rename(path)
    outcome = sample.read(directory)
    assert (outcome.reason, outcome.damaged) == (Reason.KEY_MISMATCH, True)
    assert not verify_file(directory, sample.name).valid
    with pytest.raises(DamagedFile):
        read_header(directory, sample.name)


def test_a_file_in_the_folder_of_another_rank_is_refused(directory: DataDirectory) -> None:
    sample = Sample()
    sample.write(directory)
    elsewhere = ExtentName(sample.name.fingerprint, sample.name.group, 1, sample.name.key)
    path_of(directory, elsewhere).parent.mkdir(parents=True)
    path_of(directory, sample.name).rename(path_of(directory, elsewhere))
    assert read_blocks(directory, sample.arena, sample.read_order(rank=1)).reason == Reason.IDENTITY_MISMATCH


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parent": bytes(32)}, Reason.KEY_MISMATCH),
        ({"first_token": 4}, Reason.KEY_MISMATCH),
        ({"block_tokens": 8}, Reason.LAYOUT_MISMATCH),
        ({"block_bytes": 4000}, Reason.LAYOUT_MISMATCH),
    ],
)
def test_a_file_that_is_not_what_the_tree_says_is_refused(
    directory: DataDirectory, changes: dict[str, object], reason: Reason
) -> None:
    sample = Sample()
    sample.write(directory)
    outcome = read_blocks(directory, sample.arena, sample.read_order(**changes), identity=sample.identity)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, reason, True)


def test_a_file_with_other_or_fewer_blocks_than_the_tree_says_is_refused(directory: DataDirectory) -> None:
    sample, longer = Sample(num_blocks=2), Sample(num_blocks=3)
    assert sample.name == longer.name
    sample.write(directory)
    assert longer.read(directory).reason == Reason.KEY_MISMATCH
    other = bytearray(sample.keys)
    other[-1] ^= 1
    order = sample.read_order(keys=bytes(other))
    assert read_blocks(directory, sample.arena, order).reason == Reason.KEY_MISMATCH


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"axes": "kv,layer,head,token,dim"}])
def test_a_group_of_equal_byte_counts_and_another_layout_gets_no_block(
    directory: DataDirectory, changes: dict[str, str]
) -> None:
    sample = Sample()
    sample.write(directory)
    other = identity(**changes)  # type: ignore[arg-type]
    outcome = read_blocks(directory, sample.arena, sample.read_order(), identity=other)
    assert (outcome.valid, outcome.reason) == (0, Reason.LAYOUT_MISMATCH)
    assert all(poisoned(sample, index) for index in range(3))


# ---- header, scrub, removal


def test_a_header_is_read_with_size_and_last_use(directory: DataDirectory) -> None:
    sample = Sample()
    written = sample.write(directory)
    os.utime(path_of(directory, sample.name), (5.0, 1234.5))
    found = read_header(directory, sample.name)
    assert (found.file_bytes, found.modified) == (written.file_bytes, 1234.5)
    assert (found.header.keys, found.header.num_blocks) == (sample.keys, 3)


def test_a_scrub_is_told_what_it_read_and_may_stop(directory: DataDirectory) -> None:
    sample = Sample(block_bytes=PIECE_BYTES + 4096)
    sample.write(directory)
    read: list[int] = []
    verified = verify_file(directory, sample.name, pause=read.append)
    assert (verified.valid, verified.blocks, verified.reason) == (3, 3, None)
    assert read == [PIECE_BYTES, 4096] * 3

    def stop(num_bytes: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        verify_file(directory, sample.name, pause=stop)


def test_a_scrub_counts_the_intact_blocks_before_the_damage(directory: DataDirectory) -> None:
    sample = Sample(num_blocks=4, block_bytes=1000)
    sample.write(directory)
    flip(path_of(directory, sample.name), 4096 + 2 * 4096 + 3000)  # in the zeros behind the block
    verified = verify_file(directory, sample.name)
    assert (verified.valid, verified.blocks, verified.reason, verified.damaged) == (2, 4, Reason.CHECKSUM, True)


def test_removing_unlinks_the_file_and_an_empty_folder(directory: DataDirectory) -> None:
    sample = Sample()
    sample.write(directory)
    folder = path_of(directory, sample.name).parent
    (folder / "notes.txt").write_text("mine")
    assert remove_extent(directory, sample.name)
    assert [entry.name for entry in folder.iterdir()] == ["notes.txt"]
    assert not remove_extent(directory, sample.name)
    (folder / "notes.txt").unlink()
    sample.write(directory)
    assert remove_extent(directory, sample.name)
    assert not folder.exists()
    assert folder.parent.exists()
    assert not remove_extent(directory, sample.name)


@pytest.mark.parametrize("content", [b"", b"x" * 5_000])
def test_removing_takes_a_damaged_file_as_well(directory: DataDirectory, content: bytes) -> None:
    sample = Sample()
    sample.write(directory)
    path_of(directory, sample.name).write_bytes(content)
    assert remove_extent(directory, sample.name)
    assert not path_of(directory, sample.name).exists()


def test_a_removed_data_directory_is_named_and_no_disk_full(directory: DataDirectory, tmp_path: Path) -> None:
    sample = Sample()
    sample.write(directory)
    (tmp_path / "data").rename(tmp_path / "moved")
    for path in (tmp_path / "moved" / "tmp").iterdir():
        path.unlink()
    (tmp_path / "moved" / "tmp").rmdir()
    failed = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
    assert isinstance(failed, Failure)
    assert failed.reason == Reason.IO_ERROR
    assert "removed or replaced" in failed.problem


def test_an_arena_that_is_not_aligned_is_used_buffered(
    directory: DataDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    """Direct transfers refuse it; nobody is to lose an extent by that."""
    sample = Sample()
    shifted = memoryview(bytearray(len(sample.arena) + 1))[1:]
    shifted[:] = sample.arena
    with caplog.at_level(logging.WARNING):
        written = write_extent(directory, shifted, sample.write_order(), identity=sample.identity)
    assert not isinstance(written, Failure)
    assert sample.read(directory).valid == 3
