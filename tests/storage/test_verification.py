"""Verification without a worker, of a directory of either kind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.storage.samples import Sample, path_of
from tierkv.core.reasons import Reason
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.verification import Damage, Progress, verify_directory


def last_of(directory: DataDirectory, quarantine: Quarantine | None = None) -> tuple[Progress, list[Damage]]:
    told = list(verify_directory(directory, quarantine))
    assert [progress.finished for progress in told] == [False] * (len(told) - 1) + [True]
    return told[-1], [one for progress in told for one in progress.damaged]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("repair", [False, True])
def test_damaged_files_are_named_and_moved_only_when_asked(tmp_path: Path, kind: Kind, repair: bool) -> None:
    good, bad, short = Sample(), Sample(seed=60), Sample(seed=120, num_blocks=1)
    with DataDirectory.open(tmp_path, kind=kind) as directory:
        for sample in (good, bad, short):
            sample.write(directory)
        with path_of(directory, bad.name).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x00")
        os.truncate(path_of(directory, short.name), 4096)
        quarantine = Quarantine(directory, max_bytes=2**20, max_age_seconds=1e9)
        last, damaged = last_of(directory, quarantine if repair else None)
        assert sorted(damaged, key=str) == sorted(
            [Damage(str(bad.name), Reason.CHECKSUM), Damage(str(short.name), Reason.SHORT_FILE)], key=str
        )
        assert (last.checked_files, last.total_files, last.damaged_files) == (3, 3, 2)
        assert last.checked_bytes == (3 + 3) * 4096
        assert last.set_aside_files == (2 if repair else 0)
        assert path_of(directory, bad.name).exists() == (not repair)
        assert good.read(directory).valid == 3
        if repair:
            assert last_of(directory) == (Progress(1, 1, 3 * 4096, 0, 0, (), True), [])


@pytest.mark.parametrize("kind", list(Kind))
def test_an_empty_directory_is_verified_at_once(tmp_path: Path, kind: Kind) -> None:
    with DataDirectory.open(tmp_path, kind=kind) as directory:
        assert last_of(directory) == (Progress(0, 0, 0, 0, 0, (), True), [])


def test_a_file_that_another_node_removes_meanwhile_is_no_damage(tmp_path: Path) -> None:
    one, two = Sample(), Sample(seed=60)
    with DataDirectory.open(tmp_path, kind=Kind.DISK) as directory:
        for sample in (one, two):
            sample.write(directory)
        told = verify_directory(directory, clock=iter(range(100)).__next__)
        assert next(told).checked_files == 1
        for sample in (one, two):
            path_of(directory, sample.name).unlink()
        rest = list(told)
        assert rest[-1].finished
        assert rest[-1].damaged_files == 0
