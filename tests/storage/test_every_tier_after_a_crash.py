"""A power loss at each step of what a tier of files does: a file is whole or absent or found damaged, what was reported
flushed is there, and the next start goes on. NVMe, where files are written, and the disk tier, where they are copied.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.faults.crash import CrashRecorder
from tests.storage.samples import Sample
from tests.workers.desk import demote_order
from tierkv.core.instructions import OpenNamespace, Report, Rows
from tierkv.storage.catalog import Catalog
from tierkv.storage.copier import copy_extent
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.extent_file import WrittenFile, remove_extent, verify_file
from tierkv.storage.namespace import write_namespace
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.recovery import recover
from tierkv.storage.unused_file import Used, remove_unused

LATER = time.time() + 1000.0

FIRST, LONGER, SECOND = Sample(num_blocks=2), Sample(num_blocks=3), Sample(seed=60, num_blocks=1)
SAMPLES = (FIRST, LONGER, SECOND)


class Tier:
    """Of one kind: its directory below `watched`, and how a file comes into it."""

    def __init__(self, kind: Kind, tmp_path: Path) -> None:
        self.kind = kind
        self.root = tmp_path / "watched" / "tier"
        self.root.parent.mkdir()
        self._above: dict[bytes, Path] = {}  # by keys, where each lies on NVMe: beside what is watched, and made before
        for number, sample in enumerate(SAMPLES):
            self._above[sample.keys] = tmp_path / f"above {number}"
            with DataDirectory.open(self._above[sample.keys]) as directory:
                sample.write(directory)

    def open(self, root: Path | None = None) -> DataDirectory:
        return DataDirectory.open(root or self.root, kind=self.kind, owner="0" * 8 if self.kind is Kind.DISK else "")

    def put(self, directory: DataDirectory, sample: Sample) -> WrittenFile:
        if self.kind is Kind.DATA:
            return sample.write(directory)
        with DataDirectory.open(self._above[sample.keys], create=False, writable=False) as above:
            copied = copy_extent(above, directory, demote_order(sample, 1), identity=sample.identity)
        assert isinstance(copied, WrittenFile), copied
        return copied

    def flush(self, directory: DataDirectory, written: WrittenFile) -> None:
        for folder in written.flush:
            directory.flush(folder)


@pytest.fixture(params=[Kind.DATA, Kind.DISK])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    return Tier(request.param, tmp_path)


def found_after(tier: Tier, root: Path, index: Path) -> dict[bytes, int]:
    """One start: of each extent that it tells of, by key, how many blocks are right. All of them, or its file is
    damaged: found so at the start, or by whoever reads it."""
    index.mkdir()
    reports: list[Report] = []
    index_fd = os.open(index, os.O_RDONLY)
    try:
        with tier.open(root) as directory, Catalog(index_fd, store_id="x", map_bytes=2**20) as catalog:
            quarantine = Quarantine(directory, max_bytes=2**20, max_age_seconds=1e9)
            recover(directory, catalog, quarantine, emit=reports.append, now=LATER)
            found = {}
            for told in reports:
                if isinstance(told, Rows):
                    for row in told.rows:
                        name = next(one.name for one in SAMPLES if one.name.key == row.key)
                        verified = verify_file(directory, name)
                        assert verified.valid == verified.blocks or verified.damaged
                        found[row.key] = verified.valid
            assert os.listdir(directory.path / "tmp") == []
            return found
    finally:
        os.close(index_fd)
        shutil.rmtree(index)


def check_states(tier: Tier, recorder: CrashRecorder, tmp_path: Path) -> int:
    """`notes`: (key, blocks) from here on at least; (key, -1): from here on maybe not."""
    count = 0
    for state in recorder.states(per_point=6, seed=1):
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        state.build(fresh)
        found = found_after(tier, fresh / "tier", tmp_path / "index")
        promised: dict[bytes, int] = {}
        for key, blocks in state.notes:
            promised[key] = blocks
        for key, blocks in promised.items():
            assert found.get(key, 0) >= blocks, f"after event {state.at}: what was flushed is lost"
        shutil.rmtree(fresh)
        count += 1
    return count


def test_what_comes_is_whole_or_absent_and_what_was_flushed_stays(tier: Tier, tmp_path: Path) -> None:
    with CrashRecorder(tmp_path / "watched") as recorder, tier.open() as directory:
        for sample in (FIRST, LONGER, SECOND):
            write_namespace(directory, OpenNamespace(sample.group, sample.identity))
            written = tier.put(directory, sample)
            tier.flush(directory, written)
            recorder.note((sample.name.key, sample.num_blocks))
    assert check_states(tier, recorder, tmp_path) >= 40


def test_what_goes_does_not_take_anything_else_along(tier: Tier, tmp_path: Path) -> None:
    with tier.open() as directory:
        for sample in (LONGER, SECOND):
            write_namespace(directory, OpenNamespace(sample.group, sample.identity))
            tier.flush(directory, tier.put(directory, sample))
    with CrashRecorder(tmp_path / "watched") as recorder, tier.open() as directory:
        recorder.note((SECOND.name.key, SECOND.num_blocks))
        assert remove_extent(directory, LONGER.name)
        directory.flush(LONGER.name.folder[:-1])
    assert check_states(tier, recorder, tmp_path) >= 4


def test_a_removal_that_is_taken_back_may_cost_that_file_and_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the disk tier: it is used by another node in the moment in which it has no name."""
    tier = Tier(Kind.DISK, tmp_path)
    with tier.open() as directory:
        for sample in (LONGER, SECOND):
            write_namespace(directory, OpenNamespace(sample.group, sample.identity))
            tier.flush(directory, tier.put(directory, sample))
        path = directory.path.joinpath(*LONGER.name.parts)
        os.utime(path, (1000.0, 1000.0))
    with CrashRecorder(tmp_path / "watched") as recorder, tier.open() as directory:
        recorder.note((SECOND.name.key, SECOND.num_blocks))
        with monkeypatch.context() as patch:
            recorded = os.rename

            def used_meanwhile(*args: object, **options: object) -> None:
                os.utime(path, (5000.0, 5000.0))
                recorded(*args, **options)  # type: ignore[arg-type]

            patch.setattr(os, "rename", used_meanwhile)
            assert remove_unused(directory, LONGER.name, 2000.0, LATER) == Used(5000.0)
        assert path.exists()
        assert os.listdir(directory.path / "tmp") == []
    assert check_states(tier, recorder, tmp_path) >= 3
