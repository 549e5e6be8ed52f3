"""A worker's part of purges: written down first, swept beside everything else, memory zeroed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from tests.faults.system_calls import inject
from tests.storage.samples import BLOCK_TOKENS, FINGERPRINT, POISON, Sample, identity
from tests.workers.desk import Desk
from tierkv.core.instructions import (
    GroupFound,
    PurgeAbout,
    PurgeRecorded,
    PurgeResumed,
    PurgeScope,
    PurgeSwept,
    RecordPurge,
    Recovered,
    ScopeGroup,
    SweepPurge,
    Zero,
    Zeroed,
)
from tierkv.core.keys import KEY_BYTES, chain_keys
from tierkv.core.reasons import Reason
from tierkv.storage.names import ExtentName
from tierkv.workers.files import Files

PURGE = b"purge number one"


class Noting(Files):
    def __init__(self) -> None:
        self.stages: list[str] = []

    def purge_reached(self, stage: str, purge: bytes) -> None:
        self.stages.append(stage)


def other_tenants() -> Sample:
    sample = Sample(seed=5)
    sample.identity = identity(salt="other")
    sample.group = sample.parent = sample.identity.group_key()
    sample.keys = chain_keys(sample.group, sample.tokens, BLOCK_TOKENS)
    sample.name = ExtentName(FINGERPRINT, sample.group, 0, sample.keys[:KEY_BYTES])
    return sample


def scope_of(*samples: Sample) -> PurgeScope:
    return PurgeScope(groups=tuple(ScopeGroup(FINGERPRINT, sample.group) for sample in samples), names_tenant=True)


def record(desk: Desk, *samples: Sample) -> PurgeRecorded:
    desk.send(RecordPurge(PURGE, scope_of(*samples), PurgeAbout(1.0)))
    return desk.wait_type(PurgeRecorded)


def sweep(desk: Desk) -> PurgeSwept:
    seen = len(desk.reports)
    desk.send(SweepPurge(PURGE))
    found = desk.wait(lambda report: isinstance(report, PurgeSwept), seen=seen)
    assert isinstance(found, PurgeSwept)
    return found


def test_what_is_swept_is_gone_and_the_rest_is_still_read(tmp_path: Path) -> None:
    files = Noting()
    with Desk(tmp_path / "data", files=files) as desk:
        mine, other = Sample(), other_tenants()
        desk.store(mine, 1)
        desk.store(other, 2)
        assert record(desk, mine).reason is None
        assert os.listdir(tmp_path / "data" / "purges") == [PURGE.hex()]
        swept = sweep(desk)
        assert (swept.reason, swept.swept.files, swept.swept.index_rows) == (None, 1, 1)
        assert files.stages == ["recorded", "files", "quarantine", "temp", "index", "flushed", "crossed out"]
        assert os.listdir(tmp_path / "data" / "purges") == []
        assert desk.load(other, 3).valid == 3
        assert desk.load(mine, 4).reason == Reason.NOT_FOUND
    assert not (tmp_path / "data" / "models" / FINGERPRINT / mine.group.hex()).exists()


def test_a_folder_that_was_about_to_be_made_is_not_and_one_opened_anew_is(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        mine = Sample()
        desk.open(mine)
        record(desk, mine)
        assert sweep(desk).reason is None
        folder = tmp_path / "data" / "models" / FINGERPRINT / mine.group.hex()
        assert not folder.exists()
        desk.store(mine, 1)
        assert (folder / "identity.json").exists()


def test_memory_is_zeroed_where_it_is_told_and_nowhere_else(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        desk.arena.view[:] = bytes([POISON]) * len(desk.arena.view)
        desk.send(Zero(7, [(4096, 4096), (2**20, 2**20 + 12_288)]))
        assert desk.wait_type(Zeroed) == Zeroed(7)
        expected = bytearray([POISON]) * len(desk.arena.view)
        expected[4096:8192] = bytes(4096)
        expected[2**20 : 2**21 + 12_288] = bytes(2**20 + 12_288)
        assert desk.arena.view == expected


def test_a_disk_without_room_for_the_record_does_not_keep_it_from_going(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        mine = Sample()
        desk.store(mine, 1)
        name = PURGE.hex()
        with inject(errno.ENOSPC, "rename", times=10, when=lambda args, kwargs: args[1] == name):
            assert record(desk, mine).reason == Reason.DISK_FULL
            assert sweep(desk).reason is None
        assert not list((tmp_path / "data" / "models").iterdir())


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_the_record_is_told_and_nothing_goes_before_it_is_written(
    tmp_path: Path, number: int
) -> None:
    with Desk(tmp_path / "data") as desk:
        mine = Sample()
        desk.store(mine, 1)
        name = PURGE.hex()
        with inject(number, "rename", times=10, when=lambda args, kwargs: args[1] == name):
            assert record(desk, mine).reason is not None
            assert sweep(desk).reason is not None
        assert tmp_path.joinpath("data", *mine.name.parts).exists()
        assert sweep(desk).reason is None
        assert not tmp_path.joinpath("data", *mine.name.parts).exists()


def test_a_sweep_that_nobody_has_described_is_refused(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        assert sweep(desk).reason == Reason.NOT_FOUND


def test_a_start_tells_of_what_it_has_finished_before_it_tells_of_any_group(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        mine, other = Sample(), other_tenants()
        desk.store(mine, 1)
        desk.store(other, 2)
        record(desk, mine)
    with Desk(tmp_path / "data") as desk:
        desk.wait_type(Recovered)
        kinds = [type(report) for report in desk.reports]
        assert kinds.index(PurgeResumed) < kinds.index(GroupFound)
        resumed = desk.wait_type(PurgeResumed)
        assert (resumed.purge, resumed.reason, resumed.swept.files) == (PURGE, None, 1)
        assert resumed.scope == scope_of(mine)
        assert set(desk.rows) == {other.name.key}


def test_what_a_start_could_not_finish_is_swept_when_it_is_asked_for_again(tmp_path: Path) -> None:
    with Desk(tmp_path / "data") as desk:
        mine = Sample()
        desk.store(mine, 1)
        record(desk, mine)
    name = mine.name.file
    with (
        inject(errno.EIO, "unlink", times=1, when=lambda args, kwargs: args[0] == name),
        Desk(tmp_path / "data") as desk,
    ):
        assert desk.wait_type(PurgeResumed).reason == Reason.IO_ERROR
        desk.wait_type(Recovered)
        assert desk.rows == {}
        assert sweep(desk).reason is None
    assert not list((tmp_path / "data" / "models").iterdir())


def test_what_is_told_travels_as_it_is() -> None:
    for message in (
        RecordPurge(PURGE, scope_of(Sample()), PurgeAbout(1.0, 2, 3, 4, 5, 6)),
        SweepPurge(PURGE),
        Zero(1, [(4096, 8192)]),
    ):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)) == message
