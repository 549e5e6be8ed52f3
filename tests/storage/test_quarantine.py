from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.faults.system_calls import Fault
from tests.storage.samples import Sample, path_of
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.quarantine import Quarantine, Usage

NOW = 1_700_000_000.5
DAY = 86_400.0
FILE_BYTES = 4 * 4096  # a sample of three blocks


def quarantine(directory: DataDirectory, *, max_bytes: int = 2**30, days: float = 7) -> Quarantine:
    return Quarantine(directory, max_bytes=max_bytes, max_age_seconds=days * DAY)


def stored(directory: DataDirectory, seed: int = 1) -> Sample:
    sample = Sample(seed=seed)
    sample.write(directory)
    return sample


def entries(directory: DataDirectory) -> list[str]:
    return sorted(entry.name for entry in (directory.path / "quarantine").iterdir())


def test_a_file_moves_aside_with_time_reason_and_owner_in_its_name(directory: DataDirectory) -> None:
    sample = stored(directory)
    raw = path_of(directory, sample.name).read_bytes()
    aside = quarantine(directory)
    assert aside.set_aside(sample.name, Reason.CHECKSUM, NOW)
    assert not path_of(directory, sample.name).exists()
    (file,) = entries(directory)
    group, key = sample.group.hex(), sample.name.key.hex()
    assert file == f"20231114T221320.500000Z-checksum-0-{group}-0-{key}.kv"
    assert (directory.path / "quarantine" / file).read_bytes() == raw
    assert aside.usage() == Usage(1, FILE_BYTES)
    assert aside.num_set_aside == 1


def test_the_extent_can_be_stored_again_and_set_aside_again_at_the_same_moment(directory: DataDirectory) -> None:
    aside = quarantine(directory)
    for _ in range(3):
        assert aside.set_aside(stored(directory).name, Reason.CHECKSUM, NOW)
    assert len(set(entries(directory))) == 3


def test_numbers_go_on_after_a_restart(directory: DataDirectory) -> None:
    assert quarantine(directory).set_aside(stored(directory).name, Reason.CHECKSUM, NOW)
    assert quarantine(directory).set_aside(stored(directory).name, Reason.CHECKSUM, NOW)
    assert len(entries(directory)) == 2


def test_a_file_that_is_gone_is_no_error(directory: DataDirectory) -> None:
    assert not quarantine(directory).set_aside(Sample().name, Reason.CHECKSUM, NOW)


def test_a_quarantine_that_somebody_removed_is_made_again(directory: DataDirectory) -> None:
    aside = quarantine(directory)
    (directory.path / "quarantine").rmdir()
    assert aside.set_aside(stored(directory).name, Reason.CHECKSUM, NOW)
    assert len(entries(directory)) == 1


def test_a_link_or_a_folder_is_not_ours_to_move(directory: DataDirectory, tmp_path: Path) -> None:
    sample = Sample()
    path = path_of(directory, sample.name)
    path.parent.mkdir(parents=True)
    (tmp_path / "outside").write_text("mine")
    path.symlink_to(tmp_path / "outside")
    aside = quarantine(directory)
    assert not aside.set_aside(sample.name, Reason.CHECKSUM, NOW)
    assert path.is_symlink()
    path.unlink()
    path.mkdir()
    assert not aside.set_aside(sample.name, Reason.CHECKSUM, NOW)
    assert path.is_dir()
    assert entries(directory) == []


def test_the_oldest_go_when_there_is_too_much(directory: DataDirectory) -> None:
    aside = quarantine(directory, max_bytes=2 * FILE_BYTES)
    for number in range(4):
        aside.set_aside(stored(directory, seed=number + 1).name, Reason.SHORT_FILE, NOW + number)
    assert aside.usage() == Usage(2, 2 * FILE_BYTES)
    assert entries(directory) == aside.files()
    assert [file[:15] for file in aside.files()] == ["20231114T221322", "20231114T221323"]


def test_a_file_larger_than_the_bound_does_not_stay(directory: DataDirectory) -> None:
    aside = quarantine(directory, max_bytes=FILE_BYTES - 1)
    assert aside.set_aside(stored(directory).name, Reason.CHECKSUM, NOW)
    assert (entries(directory), aside.usage(), aside.num_set_aside) == ([], Usage(0, 0), 1)


def test_what_is_too_old_goes(directory: DataDirectory) -> None:
    aside = quarantine(directory, days=7)
    aside.set_aside(stored(directory).name, Reason.CHECKSUM, NOW)
    assert aside.prune(NOW + 7 * DAY) == Usage(1, FILE_BYTES)
    assert aside.prune(NOW + 7 * DAY + 1) == Usage(0, 0)
    assert entries(directory) == []


def test_times_in_the_future_neither_empty_it_nor_break_the_bound(directory: DataDirectory) -> None:
    aside = quarantine(directory, max_bytes=FILE_BYTES)
    aside.set_aside(stored(directory).name, Reason.CHECKSUM, NOW + 1000 * DAY)
    assert aside.prune(NOW).files == 1
    aside.set_aside(stored(directory, seed=2).name, Reason.CHECKSUM, NOW)
    assert len(entries(directory)) == 1


def test_foreign_entries_are_neither_counted_nor_removed(directory: DataDirectory, tmp_path: Path) -> None:
    folder = directory.path / "quarantine"
    outside = tmp_path / "outside"
    outside.write_text("mine")
    named = f"20231114T221320.500000Z-checksum-0-{'ab' * 32}-0-{'cd' * 32}.kv"
    (folder / named).symlink_to(outside)
    (folder / named.replace("T22", "T99")).write_text("no such hour")
    (folder / "notes.txt").write_text("mine too")
    (folder / named.replace("-0-a", "-1-a")).mkdir()
    before = entries(directory)
    aside = quarantine(directory, max_bytes=0, days=0)
    assert aside.prune(NOW + 10_000 * DAY) == Usage(0, 0)
    assert entries(directory) == before
    assert outside.read_text() == "mine"


@pytest.mark.scenario("B089", then="what is removed from quarantine counts no more")
def test_whose_files_leave_and_why_is_told(directory: DataDirectory) -> None:
    told: list[tuple[bytes, int, str, str]] = []
    aside = Quarantine(directory, max_bytes=2**30, max_age_seconds=DAY, left=lambda *what: told.append(what))
    samples = [stored(directory, seed) for seed in range(4)]
    for days, sample in enumerate(samples):
        aside.set_aside(sample.name, Reason.CHECKSUM, NOW + days * DAY / 2)
    assert [reason for *_, reason in told] == [Reason.EXPIRED]
    (directory.path / "quarantine" / aside.files()[0]).unlink()
    aside.prune(NOW + 1.5 * DAY)
    assert [reason for *_, reason in told] == [Reason.EXPIRED, Reason.NOT_FOUND]
    assert aside.lengths() == {samples[0].group: 2 * FILE_BYTES}
    aside.remove(lambda file, group: True)
    assert [what[2:] for what in told[2:]] == 2 * [("purged", Reason.PURGED)]
    assert {what[:2] for what in told} == {(samples[0].group, FILE_BYTES)}


def test_what_an_operator_removed_is_noticed(directory: DataDirectory) -> None:
    aside = quarantine(directory, max_bytes=FILE_BYTES)
    aside.set_aside(stored(directory).name, Reason.CHECKSUM, NOW)
    (directory.path / "quarantine" / entries(directory)[0]).unlink()
    aside.set_aside(stored(directory, seed=2).name, Reason.CHECKSUM, NOW + 1)  # evicts what is gone already
    assert aside.usage() == Usage(1, FILE_BYTES)
    (directory.path / "quarantine" / entries(directory)[0]).unlink()
    assert aside.prune(NOW + 2) == Usage(0, 0)


@pytest.mark.parametrize("operation", ["rename", "stat"])
def test_a_failure_leaves_the_file_where_it_is(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    sample = stored(directory)
    aside = quarantine(directory)
    with monkeypatch.context() as patch:
        Fault(patch, operation, errno.EIO)
        with pytest.raises(StorageError, match=f"{operation} failed with EIO"):
            aside.set_aside(sample.name, Reason.CHECKSUM, NOW)
    assert path_of(directory, sample.name).exists()
    assert (aside.usage().files, aside.num_set_aside) == (0, 0)


def test_a_file_that_can_not_be_removed_stays_counted(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = quarantine(directory)
    aside.set_aside(stored(directory).name, Reason.CHECKSUM, NOW)
    Fault(monkeypatch, "unlink", errno.EIO)
    with pytest.raises(StorageError):
        aside.prune(NOW + 8 * DAY)
    assert aside.usage().files == 1
