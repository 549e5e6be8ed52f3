"""No assumption about the file system: what differs between them is probed, avoided, or told by name."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.faults.system_calls import ALWAYS, inject, record_calls
from tests.storage.conftest import overlay
from tests.storage.samples import Sample, path_of, temp_files
from tests.storage.test_recovery import fill, keys_of, start
from tierkv.core.reasons import Reason
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_file import remove_extent, write_extent
from tierkv.storage.quarantine import Quarantine
from tierkv.storage.system_calls import Failure


def live(path: Path) -> None:
    """Whatever a data directory goes through: made, written, read, replaced, set aside, removed, started on again."""
    with DataDirectory.open(path) as directory:
        samples = fill(directory, 3)
        samples[0].write(directory)
        assert samples[0].read(directory).valid == 3
        quarantine = Quarantine(directory, max_bytes=2**20, max_age_seconds=1e9)
        assert quarantine.set_aside(samples[1].name, Reason.CHECKSUM, 1_700_000_000.0)
        assert remove_extent(directory, samples[2].name)
    with DataDirectory.open(path) as directory:
        assert set(start(directory).rows) == keys_of(samples[:1])


@pytest.mark.scenario(
    "B223",
    then="nothing is preallocated, so that a file system without fallocate is used like any other; a full disk is still"
    " told as disk_full",
)
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_nothing_depends_on_preallocation(tmp_path: Path, number: int) -> None:
    with inject(number, "posix_fallocate", times=ALWAYS), record_calls() as calls:
        live(tmp_path / "data")
    assert "posix_fallocate" not in calls.made
    with DataDirectory.open(tmp_path / "data") as directory, inject(errno.ENOSPC, "pwritev", times=ALWAYS):
        sample = Sample(seed=77)
        failed = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
    assert isinstance(failed, Failure)
    assert failed.reason == Reason.DISK_FULL


@pytest.mark.scenario(
    "B225",
    then="temp files are made in the data directory, whatever TMPDIR says; a directory below models/ that is a mount"
    " point fails the stores into it by name (EXDEV) and leaves nothing behind, and one that is a link is not followed",
)
def test_temp_files_lie_in_the_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    live(tmp_path / "data")
    assert os.listdir(elsewhere) == []
    sample = Sample(seed=77)
    with DataDirectory.open(tmp_path / "data") as directory:
        with inject(errno.EXDEV, "rename", times=ALWAYS):
            failed = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
        assert isinstance(failed, Failure)
        assert (failed.operation, failed.errno_name) == ("rename", "EXDEV")
        path_of(directory, sample.name).parent.rmdir()
        path_of(directory, sample.name).parent.symlink_to(elsewhere)
        refused = write_extent(directory, sample.arena, sample.write_order(), identity=sample.identity)
        assert isinstance(refused, Failure)
        assert temp_files(directory) == []
    assert os.listdir(elsewhere) == []


def is_rename_of_a_folder(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    status = os.stat(args[0], dir_fd=kwargs.get("src_dir_fd"), follow_symlinks=False)
    return stat.S_ISDIR(status.st_mode)


@pytest.mark.scenario("B228", then="only files are renamed, so that EXDEV for a directory is never met")
def test_no_directory_is_ever_renamed(tmp_path: Path) -> None:
    with inject(errno.EXDEV, "rename", times=ALWAYS, when=is_rename_of_a_folder) as fault:
        live(tmp_path / "data")
    assert fault.calls == 0


@pytest.mark.scenario(
    "B228",
    then="over a cache that was baked into an image a store replaces the lower layer's file, and an extent that was"
    " removed stays gone after a restart; what is counted is what is seen, both layers together",
)
def test_a_cache_in_a_lower_layer_is_replaced_and_removed_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "lower").mkdir()
    with DataDirectory.open(tmp_path / "lower" / "data") as directory:
        old = fill(directory, 3)
    with overlay(tmp_path) as merged:
        with DataDirectory.open(merged / "data") as directory:
            assert set(start(directory).rows) == keys_of(old)
            old[0].write(directory)
            assert remove_extent(directory, old[1].name)
            assert old[0].read(directory).valid == 3
        with DataDirectory.open(merged / "data") as directory:
            told = start(directory)
            assert set(told.rows) == {old[0].name.key, old[2].name.key}
            assert sum(row.file_bytes for row in told.rows.values()) == 2 * 16384
            assert old[2].read(directory).valid == 3
    assert (tmp_path / "lower" / "data").joinpath(*old[1].name.parts).exists(), "a whiteout, and the image as it was"


@pytest.mark.scenario("B226", then="in a set-group-id directory too, directories are 0700 and files 0600")
def test_a_set_group_id_directory_changes_no_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o2777)
    live(tmp_path / "data")
    for path in (tmp_path / "data").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.name != "data.mdb":
            assert mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        assert not mode & 0o077, path


@pytest.mark.scenario("B226", then="an entry that can't be read is skipped and counted, and is found again when it can")
def test_an_unreadable_entry_is_skipped_and_counted(tmp_path: Path) -> None:
    with DataDirectory.open(tmp_path / "data") as directory:
        samples = fill(directory, 2)

        def is_victim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return args[0] == samples[0].name.file

        with inject(errno.EACCES, "open", times=ALWAYS, when=is_victim):
            told = start(directory)
        assert (told.recovered.unreadable, set(told.rows)) == (1, keys_of(samples[1:]))
        assert set(start(directory).rows) == keys_of(samples)
