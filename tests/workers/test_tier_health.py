from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.storage.samples import Sample
from tierkv.core.instructions import OpenNamespace, Report, TierHealth
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.catalog import Catalog
from tierkv.storage.directory import DataDirectory, Space
from tierkv.storage.namespace import write_namespace
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.system_calls import Failure
from tierkv.workers.tier_gate import TierGate
from tierkv.workers.tier_health import GROWTH_BYTES, HealthWatch, described_bytes, probe


class Watched:
    """A HealthWatch whose thread is not started: each `look` is one report."""

    def __init__(self, directory: DataDirectory, catalog: Catalog) -> None:
        self.gate = TierGate(reserve_bytes=0)
        self.reports: list[TierHealth] = []
        quarantine = Quarantine(directory, max_bytes=2**20, max_age_seconds=60.0)
        self.watch = HealthWatch(
            directory, catalog, quarantine, self.gate, self._report, lambda: 0.0, period_seconds=0.0
        )

    def _report(self, reports: Sequence[Report]) -> None:
        self.reports += [report for report in reports if isinstance(report, TierHealth)]

    def look(self) -> TierHealth:
        self.watch.look()
        return self.reports[-1]


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
def watched(directory: DataDirectory) -> Iterator[Watched]:
    with (
        directory.folder(("index",)) as index_fd,
        Catalog(index_fd, store_id=directory.store_id, map_bytes=2**20) as catalog,
    ):
        yield Watched(directory, catalog)


def test_a_tier_in_order_is_writable_and_says_what_lies_beside_the_extents(
    watched: Watched, directory: DataDirectory
) -> None:
    before = watched.look()
    assert before.writable
    assert before.index_bytes > 0
    assert before.free_bytes == pytest.approx(directory.space().free_bytes, rel=0.1)
    (directory.path / "tmp" / "foreign").write_bytes(bytes(100_000))
    after = watched.look()
    assert after.overhead_bytes >= before.overhead_bytes + 100_000


def test_room_is_kept_for_what_grows_between_two_looks(watched: Watched) -> None:
    health = watched.look()
    assert health.overhead_bytes >= health.index_bytes + 2 * 4096 + GROWTH_BYTES


def test_the_files_that_describe_a_group_are_counted(directory: DataDirectory) -> None:
    sample = Sample()
    before = described_bytes(directory)
    write_namespace(directory, OpenNamespace(group=sample.group, identity=sample.identity))
    on_disk = sum(path.stat().st_blocks * 512 for path in (directory.path / "models").rglob("*.json"))
    assert described_bytes(directory) - before == on_disk == 2 * 4096


def test_what_is_being_written_is_not_counted_twice(watched: Watched, directory: DataDirectory) -> None:
    before = watched.look().overhead_bytes
    (directory.path / "tmp" / "half").write_bytes(bytes(8192))
    assert watched.gate.admit(8192, directory.space()) is None
    assert watched.look().overhead_bytes == before


def test_a_fault_is_told_first_and_probed_at_the_next_look(watched: Watched) -> None:
    watched.gate.write_failed(Failure(Reason.READ_ONLY, "open", "EROFS", "Read-only file system"), 0)
    told = watched.look()
    assert (told.writable, told.reason) == (False, Reason.READ_ONLY)
    assert told.errors == {"open EROFS": 1}
    assert watched.look().writable


def test_a_probe_that_fails_keeps_the_tier_closed_with_its_own_reason(
    watched: Watched, directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*, direct: bool) -> tuple[str, int]:
        raise StorageError("open", "ENOSPC", Reason.DISK_FULL, "No space left on device")

    watched.gate.write_failed(Failure(Reason.IO_ERROR, "fdatasync", "EIO", "injected"), 0)
    assert watched.look().reason == Reason.IO_ERROR
    monkeypatch.setattr(directory, "create_temp", refuse)
    assert watched.look().reason == Reason.DISK_FULL
    monkeypatch.undo()
    assert watched.look().writable


def test_a_file_system_that_does_not_say_how_full_it_is_is_counted(
    watched: Watched, directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Space:
        raise StorageError("statvfs", "EIO", Reason.IO_ERROR, "Input/output error")

    monkeypatch.setattr(directory, "space", refuse)
    told = watched.look()
    assert told.free_bytes == 0
    assert told.errors == {"statvfs EIO": 1}


def test_a_probe_leaves_nothing_behind(directory: DataDirectory) -> None:
    assert probe(directory) is None
    assert list((directory.path / "tmp").iterdir()) == []
