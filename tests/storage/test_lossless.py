"""Extents whose blocks are stored smaller: the same promises as for those that are stored as they are."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.system_calls import ERRNOS, Fault, FlippedBit, ShortTransfers, inject
from tests.storage.samples import POISON, Sample, identity, noise, path_of, temp_files
from tests.storage.test_extent_file import flip
from tests.storage.test_hostile_files import bounded, only_row
from tests.storage.test_recovery import index_of, start
from tierkv.core.instructions import OpenNamespace
from tierkv.core.reasons import Reason
from tierkv.errors import DamagedFile, UnknownFormat
from tierkv.storage import extent_header
from tierkv.storage import format as file_format
from tierkv.storage.catalog import PutRow
from tierkv.storage.codec_names import FileCodec
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import (
    ReadOutcome,
    WrittenFile,
    read_blocks,
    read_header,
    remove_extent,
    verify_file,
    write_extent,
)
from tierkv.storage.format import (
    FORMAT_VERSION,
    PLAIN_VERSION,
    Header,
    decode_header,
    decode_prefix,
    file_bytes,
    frame_header,
    pack_header,
    pack_lengths,
    stored_bytes,
)
from tierkv.storage.namespace import write_namespace
from tierkv.storage.plane_codec import PlaneCodec
from tierkv.storage.system_calls import Failure
from tierkv.storage.transfer import PIECE_BYTES

BLOCK_BYTES = 5 * 4096 + 500


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "data", codec=FileCodec.ZSTD) as opened:
        yield opened


def kv(num_blocks: int = 4, block_bytes: int = BLOCK_BYTES, **more: Any) -> Sample:
    return Sample(num_blocks=num_blocks, block_bytes=block_bytes, like_kv=True, **more)


def header_of(directory: DataDirectory, sample: Sample) -> Header:
    return decode_header(path_of(directory, sample.name).read_bytes())


def with_noise(sample: Sample, *blocks: int) -> Sample:
    """Some of its blocks can't become smaller."""
    for index in blocks:
        sample.put(index, noise(f"noise {index}", sample.block_bytes))
    return sample


# ---- round trip


@pytest.mark.parametrize("block_bytes", [2 * 4096 + 2, 4 * 4096, BLOCK_BYTES, BLOCK_BYTES + 1, 2**18 + 2])
@pytest.mark.parametrize("direct_io", [True, False])
def test_blocks_come_back_as_they_were_from_smaller_files_on_any_file_system(
    any_file_system: Path, block_bytes: int, direct_io: bool
) -> None:
    sample = kv(block_bytes=block_bytes, extras={2: [b"image"]})
    with DataDirectory.open(any_file_system / "data", direct_io=direct_io, codec=FileCodec.ZSTD) as directory:
        written = sample.write(directory)
        outcome = sample.read(directory)
        path = path_of(directory, sample.name)
        assert outcome == ReadOutcome(4, tokens=sample.tokens, extras=sample.extras)
        assert [sample.read_back(index) for index in range(4)] == sample.blocks
        assert written.file_bytes == path.stat().st_size < file_bytes(4, block_bytes, 4096)
        assert read_header(directory, sample.name).file_bytes == written.file_bytes
        verified = verify_file(directory, sample.name)
        assert (verified.valid, verified.blocks, verified.file_bytes) == (4, 4, written.file_bytes)
        assert temp_files(directory) == []


@pytest.mark.parametrize(("dtype", "codec"), [("float32", "planes4+zstd"), ("uint8", "zstd")])
def test_elements_of_other_sizes_come_back(directory: DataDirectory, dtype: str, codec: str) -> None:
    sample = kv(dtype=dtype)
    sample.write(directory)
    assert header_of(directory, sample).codec == codec
    assert sample.read(directory).valid == 4
    assert [sample.read_back(index) for index in range(4)] == sample.blocks


def test_what_lies_behind_a_block_is_neither_stored_nor_left_in_the_slot(directory: DataDirectory) -> None:
    sample = kv()
    sample.write(directory)
    sample.read(directory)
    for index in range(4):
        begin, end = (4 + index) * sample.slot_bytes + BLOCK_BYTES, (4 + index + 1) * sample.slot_bytes
        assert bytes(sample.arena[begin:end]) == bytes(end - begin)


def test_any_run_of_blocks_can_be_read_and_nothing_else_is_touched(directory: DataDirectory) -> None:
    sample = with_noise(kv(5), 1, 4)
    sample.write(directory)
    for first in range(5):
        for count in range(5 - first + 1):
            sample.arena[5 * sample.slot_bytes :] = bytes([POISON]) * (5 * sample.slot_bytes)
            outcome = sample.read(directory, first, count)
            assert (outcome.valid, outcome.reason) == (count, None)
            assert [sample.read_back(index) for index in range(count)] == sample.blocks[first : first + count]
            behind = sample.arena[(5 + count) * sample.slot_bytes :]
            assert bytes(behind) == bytes([POISON]) * len(behind)


@pytest.mark.parametrize("block_bytes", [PIECE_BYTES // 2 + 4096, 3 * PIECE_BYTES + 100])
def test_blocks_that_do_not_fit_the_pieces_come_back(directory: DataDirectory, block_bytes: int) -> None:
    sample = kv(3, block_bytes)
    sample.write(directory)
    assert sample.read(directory).valid == 3
    assert [sample.read_back(index) for index in range(3)] == sample.blocks
    read: list[int] = []
    assert verify_file(directory, sample.name, pause=read.append).valid == 3
    assert sum(read) == header_of(directory, sample).payload_bytes
    assert max(read) <= PIECE_BYTES


def test_a_scrub_may_stop_between_pieces(directory: DataDirectory) -> None:
    sample = kv()
    sample.write(directory)

    def stop(num_bytes: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        verify_file(directory, sample.name, pause=stop)


# ---- what does not become smaller


def test_a_block_that_does_not_become_smaller_by_a_page_is_stored_as_it_is(directory: DataDirectory) -> None:
    sample = with_noise(kv(), 2)
    sample.write(directory)
    header = header_of(directory, sample)
    lengths = header.block_lengths()
    assert [length == sample.slot_bytes for length in lengths] == [False, False, True, False]
    raw = path_of(directory, sample.name).read_bytes()
    at = len(raw) - header.payload_bytes + sum(map(stored_bytes, lengths[:2]))
    assert raw[at : at + BLOCK_BYTES] == sample.blocks[2]
    assert sample.read(directory).valid == verify_file(directory, sample.name).valid == 4
    assert sample.read_back(2) == sample.blocks[2]


@pytest.mark.parametrize("sample", [Sample(num_blocks=3, block_bytes=BLOCK_BYTES), kv(3, 4096)], ids=["noise", "pages"])
def test_a_file_that_does_not_become_smaller_is_the_one_that_it_always_was(
    directory: DataDirectory, tmp_path: Path, sample: Sample
) -> None:
    """To the byte: so nodes of before read it."""
    sample.write(directory)
    with DataDirectory.open(tmp_path / "raw") as raw:
        sample.write(raw)
        plain = path_of(raw, sample.name).read_bytes()
    assert path_of(directory, sample.name).read_bytes() == plain
    assert decode_prefix(plain).version == PLAIN_VERSION
    assert sample.read(directory).valid == 3


def test_what_a_block_saves_may_be_less_than_what_the_header_takes(directory: DataDirectory, tmp_path: Path) -> None:
    """It has more in it: where that comes to a page, one page that a block has saved is none."""
    versions = set()
    with DataDirectory.open(tmp_path / "raw") as raw:
        for num_blocks in (1, 20, 35, 45):
            sample = with_noise(kv(num_blocks, 9000, seed=1000 * num_blocks), *range(1, num_blocks))
            written, plain = sample.write(directory), sample.write(raw)
            version = decode_prefix(path_of(directory, sample.name).read_bytes()).version
            assert (written.file_bytes < plain.file_bytes) == (version == FORMAT_VERSION)
            assert written.file_bytes <= plain.file_bytes
            assert sample.read(directory).valid == num_blocks
            versions.add(version)
    assert versions == {PLAIN_VERSION, FORMAT_VERSION}


def test_files_of_either_kind_are_read_whatever_is_written(directory: DataDirectory, tmp_path: Path) -> None:
    smaller, plain = kv(seed=10), kv(seed=20)
    smaller.write(directory)
    with DataDirectory.open(tmp_path / "data") as raw:
        plain.write(raw)
        assert smaller.read(raw).valid == plain.read(raw).valid == 4
        smaller.write(raw)  # over the smaller one
        assert decode_prefix(path_of(raw, smaller.name).read_bytes()).version == PLAIN_VERSION
    assert smaller.read(directory).valid == plain.read(directory).valid == 4


# ---- versions


def test_a_node_of_the_version_before_leaves_smaller_files_alone(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = kv()
    sample.write(directory)
    path = path_of(directory, sample.name)
    raw = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(file_format, "READERS", {PLAIN_VERSION: file_format.READERS[PLAIN_VERSION]})
        patch.setattr(directory, "codec", FileCodec.RAW)
        outcome = sample.read(directory)
        assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.UNKNOWN_FORMAT, False)
        verified = verify_file(directory, sample.name)
        assert (verified.reason, verified.damaged) == (Reason.UNKNOWN_FORMAT, False)
        failed = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
        assert isinstance(failed, Failure)
        assert failed.reason == Reason.UNKNOWN_FORMAT
        assert not remove_extent(directory, sample.name)
    assert path.read_bytes() == raw
    assert sample.read(directory).valid == 4


def test_a_codec_of_later_is_left_alone(directory: DataDirectory) -> None:
    sample = kv()
    sample.write(directory)
    rewrite(directory, sample, codec="planes3+zstd")
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.UNKNOWN_FORMAT, False)
    assert not remove_extent(directory, sample.name)


# ---- forged, with a right header checksum


def rewrite(directory: DataDirectory, sample: Sample, **changes: object) -> None:
    path = path_of(directory, sample.name)
    raw = path.read_bytes()
    old = decode_header(raw)
    body = msgspec.msgpack.encode(msgspec.structs.replace(old, **changes))
    path.write_bytes(frame_header(body, FORMAT_VERSION) + raw[decode_prefix(raw).header_bytes :])


LENGTHS = {
    "none": b"",
    "too few": pack_lengths([100] * 3),
    "no bytes": pack_lengths([0, 100, 100, 100]),
    "more than a block has": pack_lengths([2**63, 100, 100, 100]),
    "a byte more than it saves": pack_lengths([5 * 4096 + 1, 100, 100, 100]),
    "half of one": pack_lengths([100] * 4)[:-1],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths_that_can_not_be_are_damage(directory: DataDirectory, lengths: bytes) -> None:
    sample = kept(directory, kv())
    rewrite(directory, sample, lengths=lengths)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.BAD_HEADER, True)
    assert verify_file(directory, sample.name).reason == Reason.BAD_HEADER
    assert start(directory).recovered.quarantined == 1


def test_lengths_that_are_not_those_of_the_file_are_damage(directory: DataDirectory) -> None:
    sample = kv()
    sample.write(directory)
    lengths = header_of(directory, sample).block_lengths()
    rewrite(directory, sample, lengths=pack_lengths([lengths[0] + 4096, *lengths[1:]]))
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.SHORT_FILE, True)


def test_fields_of_smaller_blocks_in_a_file_of_version_1_are_damage(directory: DataDirectory) -> None:
    sample = kv()
    sample.write(directory)
    body = msgspec.msgpack.encode(msgspec.structs.replace(header_of(directory, sample), codec=""))
    with pytest.raises(DamagedFile, match="stored as they are"):
        decode_header(frame_header(body, PLAIN_VERSION))


def test_a_plain_codec_in_a_file_of_version_2_is_of_no_program_that_we_know(directory: DataDirectory) -> None:
    body = msgspec.msgpack.encode(msgspec.structs.replace(plain_header(directory), codec=""))
    with pytest.raises(UnknownFormat):
        decode_header(frame_header(body, FORMAT_VERSION))


def plain_header(directory: DataDirectory) -> Header:
    sample = Sample(seed=77)
    sample.write(directory)
    return header_of(directory, sample)


def forge(directory: DataDirectory, sample: Sample, index: int, stored: bytes) -> None:
    """A file with right checksums all over, in which a block is stored as something else."""
    path = path_of(directory, sample.name)
    raw = path.read_bytes()
    header = decode_header(raw)
    lengths = header.block_lengths()
    blocks, at = [], decode_prefix(raw).header_bytes
    for length in map(stored_bytes, lengths):
        blocks.append(raw[at : at + length])
        at += length
    blocks[index] = stored + bytes(-len(stored) % 4096)
    lengths[index] = len(stored)
    digests = b"".join(blake3(block).digest() for block in blocks)
    forged = msgspec.structs.replace(header, lengths=pack_lengths(lengths), stored_checksums=digests)
    path.write_bytes(pack_header(forged) + b"".join(blocks))


def piece(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def two(first: bytes, second: bytes) -> bytes:
    return struct.pack("<II", len(first), len(second)) + first + second


PAYLOADS = {
    "a bomb": two(piece(bytes(2**27)), piece(bytes(BLOCK_BYTES // 2))),
    "another block": two(piece(bytes(BLOCK_BYTES // 2)), piece(bytes(BLOCK_BYTES // 2))),
    "noise": os.urandom(5_000),
    "a longer block": two(piece(bytes(BLOCK_BYTES // 2 + 1)), piece(bytes(BLOCK_BYTES // 2 + 1))),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_a_payload_with_right_checksums_that_is_not_the_block_is_damage_and_costs_nothing(
    directory: DataDirectory, payload: bytes
) -> None:
    """By whom it was made with right checksums is nothing that can be known: only the block's own counts."""
    sample = kv()
    sample.write(directory)
    forge(directory, sample, 2, payload)
    with bounded():
        outcome = sample.read(directory)
        verified = verify_file(directory, sample.name)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (2, Reason.CHECKSUM, True)
    assert [sample.read_back(index) for index in range(2)] == sample.blocks[:2]
    assert (verified.valid, verified.reason, verified.damaged) == (2, Reason.CHECKSUM, True)
    assert sample.read(directory, 3, 1).valid == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=1, max_size=9_000))
def test_any_payload_with_right_checksums_is_damage(directory: DataDirectory, payload: bytes) -> None:
    sample = kv(2)
    sample.write(directory)
    forge(directory, sample, 0, payload)
    assert sample.read(directory).valid == 0
    assert sample.read(directory, 1, 1).valid == 1


# ---- damage


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(1, 40_000), st.data())
def test_any_size_and_any_damage_gives_right_blocks_or_fewer(
    directory: DataDirectory, num_blocks: int, block_bytes: int, data: st.DataObject
) -> None:
    sample = kv(num_blocks, block_bytes)
    noisy = data.draw(st.sets(st.integers(0, num_blocks - 1)))
    with_noise(sample, *noisy)
    sample.write(directory)
    path = path_of(directory, sample.name)
    raw = path.read_bytes()
    start_ = decode_prefix(raw).header_bytes
    ends = [start_]
    for length in decode_header(raw).block_lengths():
        ends.append(ends[-1] + stored_bytes(length))
    assert ends[-1] == len(raw)
    offset = data.draw(st.integers(0, len(raw) - 1))
    flip(path, offset, data.draw(st.sampled_from([1 << bit for bit in range(8)])))
    outcome = sample.read(directory)
    assert outcome.damaged
    assert outcome.valid == sum(offset >= end for end in ends[1:])
    assert [sample.read_back(index) for index in range(outcome.valid)] == sample.blocks[: outcome.valid]
    assert verify_file(directory, sample.name).valid == outcome.valid


@pytest.mark.parametrize("cut", [1, 4095, 4096, 20_000])
def test_a_torn_file_is_damaged(directory: DataDirectory, cut: int) -> None:
    sample = kv()
    size = sample.write(directory).file_bytes
    os.truncate(path_of(directory, sample.name), size - cut)
    outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (0, Reason.SHORT_FILE, True)
    assert verify_file(directory, sample.name).reason == Reason.SHORT_FILE


def test_a_torn_page_in_the_middle_costs_the_blocks_from_there_on(directory: DataDirectory) -> None:
    sample = kv()
    sample.write(directory)
    with path_of(directory, sample.name).open("r+b") as file:
        file.seek(4096 + stored_bytes(header_of(directory, sample).block_lengths()[0]))
        file.write(bytes(4096))
    assert sample.read(directory).valid == 1


def test_a_bit_that_is_flipped_once_on_the_way_costs_a_second_look(directory: DataDirectory) -> None:
    sample = kv()
    sample.write(directory)
    with pytest.MonkeyPatch.context() as patch:
        lie = FlippedBit(patch, "preadv", at=4096 + 100, times=1)
        outcome = sample.read(directory)
        assert lie.flipped == 1
    assert (outcome.valid, outcome.reason) == (4, None)
    assert outcome.failure is not None
    assert [sample.read_back(index) for index in range(4)] == sample.blocks


# ---- faults


@pytest.mark.parametrize("operation", ["open", "fchmod", "pwritev", "fdatasync", "mkdir", "rename"])
@pytest.mark.parametrize("number", ERRNOS, ids=errno.errorcode.get)
def test_a_write_fails_by_name_and_leaves_nothing(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    sample = kv()
    with monkeypatch.context() as patch:
        Fault(patch, operation, number, times=1)
        failed = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
    assert isinstance(failed, Failure)
    assert (failed.operation, failed.errno_name) == (operation, errno.errorcode[number])
    assert temp_files(directory) == []
    assert not path_of(directory, sample.name).exists()
    sample.write(directory)
    assert sample.read(directory).valid == 4


def test_blocks_before_a_read_that_fails_still_count(directory: DataDirectory) -> None:
    sample = kv(3, PIECE_BYTES)
    sample.write(directory)
    with inject(errno.EIO, "preadv", nth=1, times=10):
        outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason, outcome.damaged) == (1, Reason.IO_ERROR, False)
    assert sample.read_back(0) == sample.blocks[0]


def test_a_read_that_fails_once_is_tried_again(directory: DataDirectory) -> None:
    sample = kv()
    sample.write(directory)
    with inject(errno.EIO, "preadv", times=1):
        outcome = sample.read(directory)
    assert (outcome.valid, outcome.reason) == (4, None)
    assert outcome.failure is not None


@pytest.mark.parametrize(("limit", "direct_io"), [(512, True), (4096, True), (777, False)])
def test_short_transfers_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, direct_io: bool
) -> None:
    sample = kv()
    with DataDirectory.open(tmp_path, direct_io=direct_io, codec=FileCodec.ZSTD) as directory:
        shorts = [ShortTransfers(monkeypatch, operation, limit) for operation in ("pwritev", "preadv")]
        sample.write(directory)
        assert sample.read(directory).valid == verify_file(directory, sample.name).valid == 4
        assert all(short.calls > 3 for short in shorts)
    assert [sample.read_back(index) for index in range(4)] == sample.blocks


@pytest.mark.parametrize("stage", ["temp_written", "before_rename"])
def test_a_write_that_is_killed_leaves_no_file_under_its_name(directory: DataDirectory, stage: str) -> None:
    sample = kv()

    def reached(at: str) -> None:
        if at == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity, reached=reached)
    assert not path_of(directory, sample.name).exists()
    assert temp_files(directory) == []


def test_a_codec_that_fails_fails_the_write_and_lets_go_of_the_slots(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = kv(12)
    with monkeypatch.context() as patch:
        patch.setattr(PlaneCodec, "encode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sample.write(directory)
    assert temp_files(directory) == []
    assert sample.write(directory).file_bytes < file_bytes(12, BLOCK_BYTES, 4096)


# ---- recovery


def kept(directory: DataDirectory, sample: Sample) -> Sample:
    """Written, and known by its group's folder."""
    write_namespace(directory, OpenNamespace(group=sample.group, identity=sample.identity, model_name="small"))
    sample.write(directory)
    return sample


def test_a_start_knows_smaller_files_from_the_index_and_from_their_headers(directory: DataDirectory) -> None:
    samples = [kept(directory, kv(seed=100 * number)) for number in range(1, 4)]
    sizes = {sample.name.key: path_of(directory, sample.name).stat().st_size for sample in samples}
    first = start(directory)
    assert {key: row.file_bytes for key, row in first.rows.items()} == sizes
    assert first.recovered.headers_read == 3
    second = start(directory)
    assert second.rows == first.rows
    assert second.recovered.headers_read == 0


SPOILED_ROWS: dict[str, dict[str, object]] = {
    "more bytes than all of its blocks": {"file_bytes": 2**40},
    "fewer bytes than it has blocks": {"file_bytes": 4 * 4096},
    "bytes that are no pages": {"file_bytes": 40_000},
}


@pytest.mark.parametrize("change", SPOILED_ROWS.values(), ids=SPOILED_ROWS)
def test_a_row_whose_file_can_not_be_so_long_is_not_believed(
    directory: DataDirectory, change: dict[str, object]
) -> None:
    sample = kept(directory, kv())
    right = start(directory).rows
    name, row = only_row(directory)
    with index_of(directory) as catalog:
        catalog.apply([PutRow(name, msgspec.structs.replace(row, row=msgspec.structs.replace(row.row, **change)))])
    again = start(directory)
    assert (again.recovered.headers_read, again.rows) == (1, right)
    assert sample.read(directory).valid == 4


def test_a_header_alone_says_how_long_the_file_is(directory: DataDirectory) -> None:
    sample = kv()
    written = sample.write(directory)
    found = extent_header.read_header(directory, sample.name)
    assert (found.file_bytes, found.header_bytes + found.header.payload_bytes) == (written.file_bytes,) * 2
    assert found.header.checksums != found.header.stored_checksums


def test_the_layout_is_compared_as_in_any_file(directory: DataDirectory) -> None:
    sample = kv()
    written = sample.write(directory)
    assert isinstance(written, WrittenFile)
    other = identity(BLOCK_BYTES, dtype="float16")
    outcome = read_blocks(directory, sample.arena, sample.read_order(), identity=other)
    assert (outcome.valid, outcome.reason) == (0, Reason.LAYOUT_MISMATCH)
