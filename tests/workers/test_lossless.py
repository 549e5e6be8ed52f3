"""Workers of a tier that writes its files smaller: what they report are the bytes that are really there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.samples import Sample, noise
from tests.workers.desk import Desk, DiskDesk, TierDesk, demote_order, remove_order
from tierkv.core.instructions import OpFailed, RemoveDone, Scrub, ScrubProgress, WriteDone
from tierkv.core.reasons import Reason
from tierkv.storage.codec_names import FileCodec
from tierkv.storage.directory import DataDirectory
from tierkv.storage.format import decode_prefix, file_bytes

Begin = Callable[..., TierDesk]
BLOCK_BYTES = 4 * 4096 + 100
PLAIN_BYTES = file_bytes(3, BLOCK_BYTES, 4096)


@pytest.fixture(params=["nvme", "disk"])
def begin(request: pytest.FixtureRequest) -> Begin:
    return Desk if request.param == "nvme" else DiskDesk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    DataDirectory.open(tmp_path / "of the node").close()
    return tmp_path / "tier"


def sample(seed: int = 1, num_blocks: int = 3) -> Sample:
    return Sample(num_blocks=num_blocks, block_bytes=BLOCK_BYTES, like_kv=True, seed=seed)


def path_in(root: Path, one: Sample) -> Path:
    return root.joinpath(*one.name.parts)


def began(begin: Begin, root: Path, codec: FileCodec = FileCodec.ZSTD, **more: object) -> TierDesk:
    if begin is Desk:
        DataDirectory.open(root).close()
    return begin(root, codec=codec, **more)


def test_what_is_reported_of_a_write_are_the_bytes_of_the_file(root: Path, begin: Begin) -> None:
    one, other = sample(1), sample(100)
    with began(begin, root) as desk:
        written = desk.store(one, 1)
        assert written.file_bytes == path_in(root, one).stat().st_size < PLAIN_BYTES
        assert desk.load(one, 2).valid == 3
        assert [desk.arena.read_back(one, index) for index in range(3)] == one.blocks
        desk.store(other, 3)
        desk.send(remove_order(other, 4))
        assert isinstance(desk.answer(4), RemoveDone)
        desk.stop()
    with began(begin, root, FileCodec.RAW) as desk:  # a setting that has changed since
        found = desk.recovered()
        assert (found.extents, found.headers_read) == (1, 0)
        assert {row.file_bytes for row in desk.rows.values()} == {written.file_bytes}
        assert desk.load(one, 5).valid == 3
        assert [desk.arena.read_back(one, index) for index in range(3)] == one.blocks
        raw = desk.store(other, 6)
        assert raw.file_bytes == path_in(root, other).stat().st_size == PLAIN_BYTES
        desk.stop()


def test_a_smaller_file_that_is_damaged_is_set_aside_at_its_first_read(root: Path, begin: Begin) -> None:
    one = sample()
    with began(begin, root) as desk:
        written = desk.store(one, 1)
        path = path_in(root, one)
        raw = path.read_bytes()
        path.write_bytes(raw[:-5000] + bytes([raw[-5000] ^ 1]) + raw[-4999:])
        done = desk.load(one, 2)
        assert (done.valid, done.reason, done.gone) == (2, Reason.CHECKSUM, True)
        assert not path.exists()
        (aside,) = (root / "quarantine").iterdir()
        assert aside.stat().st_size == written.file_bytes
        assert desk.store(one, 3).file_bytes == written.file_bytes
        assert desk.load(one, 4).valid == 3
        desk.stop()


def test_a_scrub_reads_what_is_there_and_finds_what_is_damaged(root: Path, begin: Begin) -> None:
    one, other = sample(1), sample(100)
    with began(begin, root) as desk:
        size = desk.store(one, 1).file_bytes + desk.store(other, 2).file_bytes
        path = path_in(root, other)
        raw = path.read_bytes()
        path.write_bytes(raw[:9000] + bytes([raw[9000] ^ 1]) + raw[9001:])
        desk.send(Scrub(op=3, repair=True))
        told = desk.wait(lambda report: isinstance(report, ScrubProgress) and report.finished)
        assert isinstance(told, ScrubProgress)
        assert (told.checked, told.checked_bytes <= size) == (2, True)
        assert [key for _, _, key in told.set_aside] == [other.name.key]
        assert not path.exists()
        desk.stop()


def test_room_for_a_copy_that_becomes_longer_is_asked_for_before_it_is_made(tmp_path: Path, root: Path) -> None:
    """What is smaller on NVMe and raw on disk takes what it takes there, and the reserve is not written into."""
    one = Sample(num_blocks=3, block_bytes=256 * 1024, like_kv=True)
    with DataDirectory.open(tmp_path / "of the node", codec=FileCodec.ZSTD) as data:
        smaller = one.write(data).file_bytes
    needed = file_bytes(3, 256 * 1024, 4096)
    assert smaller < 0.8 * needed
    seen: list[int] = []

    with DiskDesk(root, data=tmp_path / "of the node") as desk:
        gate = desk.worker._tier.gate
        admit = gate.admit
        gate.admit = lambda num_bytes, space: (seen.append(num_bytes), admit(num_bytes, space))[1]  # type: ignore[assignment, method-assign, func-returns-value]
        desk.open(one)
        desk.send(demote_order(one, 1))
        done = desk.answer(1)
        assert isinstance(done, WriteDone), done
        assert done.file_bytes == needed
        desk.stop()
    assert seen
    assert min(seen) >= needed - 4096


def test_a_file_is_written_anew_in_the_codec_of_the_tier_below(tmp_path: Path, root: Path) -> None:
    one = sample()
    one.put(1, noise("between", BLOCK_BYTES))
    with DataDirectory.open(tmp_path / "of the node") as data:
        one.write(data)
    with DiskDesk(root, data=tmp_path / "of the node", codec=FileCodec.ZSTD) as desk:
        desk.open(one)
        desk.send(demote_order(one, 1))
        done = desk.answer(1)
        assert isinstance(done, WriteDone), done
        raw = path_in(root, one).read_bytes()
        assert done.file_bytes == len(raw) < PLAIN_BYTES
        assert decode_prefix(raw).version == 2
        assert desk.load(one, 2).valid == 3
        assert [desk.arena.read_back(one, index) for index in range(3)] == one.blocks
        desk.stop()


def test_a_damaged_file_above_is_not_written_anew(tmp_path: Path, root: Path) -> None:
    one = sample()
    with DataDirectory.open(tmp_path / "of the node") as data:
        one.write(data)
        path = data.path.joinpath(*one.name.parts)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with DiskDesk(root, data=tmp_path / "of the node", codec=FileCodec.ZSTD) as desk:
        desk.open(one)
        desk.send(demote_order(one, 1))
        failed = desk.answer(1)
        assert isinstance(failed, OpFailed), failed
        assert failed.reason == Reason.CHECKSUM
        assert not path_in(root, one).exists()
        assert os.listdir(root / "tmp") == []
        desk.stop()
