from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.system_calls import hold, inject
from tests.storage.samples import Sample, temp_files
from tierkv.core.reasons import Reason
from tierkv.errors import DataDirectoryError, DataDirectoryNewer, StorageError
from tierkv.storage.directory import DataDirectory, Kind
from tierkv.storage.disk_directory import hold_disk_index, open_disk_directory, require_apart
from tierkv.storage.stamp import require_no_data_directory
from tierkv.storage.temp_folder import ABANDONED_SECONDS
from tierkv.storage.unused_file import Used, remove_unused

LATER = 4_000_000_000.0


@pytest.fixture
def data(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "data") as opened:
        yield opened


def open_disk(path: Path, owner: str = "0" * 8, **options: bool) -> DataDirectory:
    return DataDirectory.open(path, kind=Kind.DISK, owner=owner, **options)


def tree(path: Path) -> dict[str, bytes | None]:
    return {str(one.relative_to(path)): one.read_bytes() if one.is_file() else None for one in sorted(path.rglob("*"))}


# -------------------------------------------------------------------- of its own kind


def test_it_has_a_format_of_its_own_kind_and_three_folders(tmp_path: Path) -> None:
    with open_disk(tmp_path / "disk") as first:
        store_id = first.store_id
    with open_disk(tmp_path / "disk") as second:
        assert second.store_id == store_id
        assert second.is_shared
    assert sorted(os.listdir(tmp_path / "disk")) == ["FORMAT", "models", "quarantine", "tmp"]
    assert json.loads((tmp_path / "disk" / "FORMAT").read_text())["kind"] == "disk"


@pytest.mark.parametrize(("kind", "other"), [(Kind.DATA, Kind.DISK), (Kind.DISK, Kind.DATA)])
def test_one_kind_is_not_taken_for_the_other(tmp_path: Path, kind: Kind, other: Kind) -> None:
    DataDirectory.open(tmp_path / "it", kind=kind).close()
    before = tree(tmp_path / "it")
    with pytest.raises(DataDirectoryError, match=f"can't be the {other}_dir"):
        DataDirectory.open(tmp_path / "it", kind=other)
    assert tree(tmp_path / "it") == before


def test_a_kind_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").write_text('{"format": 1, "store": "x", "kind": "tape"}')
    with pytest.raises(DataDirectoryError, match="'tape'"):
        open_disk(tmp_path)
    (tmp_path / "FORMAT").write_text('{"format": 2, "store": "x", "kind": "disk"}')
    with pytest.raises(DataDirectoryNewer):
        open_disk(tmp_path)


def test_a_data_directory_is_known_as_one_and_everything_else_is_not(tmp_path: Path) -> None:
    DataDirectory.open(tmp_path / "data").close()
    open_disk(tmp_path / "disk").close()
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataDirectoryError, match="is the data directory of a node"):
        require_no_data_directory(tmp_path / "data")
    for name in ("disk", "empty", "file", "absent"):
        require_no_data_directory(tmp_path / name)


def test_neither_may_lie_in_the_other_by_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "data" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for disk in ("data", "data/in", "data/in/deep", "link", "link/new", "data/../data/x"):
        with pytest.raises(DataDirectoryError, match="disk_dir"):
            require_apart(tmp_path / "data", tmp_path / disk)
    with pytest.raises(DataDirectoryError, match="lies in disk_dir"):
        require_apart(tmp_path / "data" / "in", tmp_path / "data")
    for disk in ("data2", "other/data", "dat"):
        require_apart(tmp_path / "data", tmp_path / disk)


# -------------------------------------------------------------------- made by several at once


def test_nodes_that_make_it_at_the_same_moment_all_have_the_same_one(tmp_path: Path) -> None:
    stores: list[str] = []
    start = threading.Barrier(6)

    def make() -> None:
        start.wait()
        with open_disk(tmp_path / "disk") as directory:
            stores.append(directory.store_id)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 6
    assert len(set(stores)) == 1
    assert sorted(os.listdir(tmp_path / "disk")) == ["FORMAT", "models", "quarantine", "tmp"]


def test_processes_that_make_it_at_the_same_moment_all_have_the_same_one(tmp_path: Path) -> None:
    script = (
        "import sys; from tierkv.storage.directory import DataDirectory, Kind; sys.stdin.read(1);"
        " print(DataDirectory.open(sys.argv[1], kind=Kind.DISK).store_id)"
    )
    made = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "disk")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for one in made:
        assert one.stdin is not None
        one.stdin.write("x")
        one.stdin.flush()
    stores = {one.communicate()[0] for one in made}
    assert [one.returncode for one in made] == [0, 0, 0]
    assert len(stores) == 1


def test_the_one_that_is_later_takes_what_is_there_by_then(tmp_path: Path) -> None:
    opened: list[DataDirectory] = []
    with hold("link") as barrier:
        thread = threading.Thread(target=lambda: opened.append(open_disk(tmp_path)))
        thread.start()
        barrier.wait_reached()
        with open_disk(tmp_path) as quick:
            barrier.release()
            thread.join()
            with opened[0] as slow:
                assert slow.store_id == quick.store_id


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_a_file_has_one_name_only_it_is_made_all_the_same(tmp_path: Path, number: int) -> None:
    with inject(number, "link"), open_disk(tmp_path / "disk") as directory:
        store_id = directory.store_id
    with open_disk(tmp_path / "disk") as again:
        assert again.store_id == store_id
    assert sorted(os.listdir(tmp_path / "disk")) == ["FORMAT", "models", "quarantine", "tmp"]


def test_a_set_up_that_was_killed_does_not_keep_the_next_one_from_it(tmp_path: Path) -> None:
    (tmp_path / "FORMAT.0123abcd.new").write_text("{")
    with open_disk(tmp_path) as directory:
        assert directory.store_id


# -------------------------------------------------------------------- temp files


def test_a_node_clears_away_its_own_temp_files_and_leaves_those_of_others(tmp_path: Path) -> None:
    with open_disk(tmp_path, "aaaaaaaa") as mine, open_disk(tmp_path, "bbbbbbbb") as other:
        for directory in (mine, other):
            name, fd = directory.create_temp(direct=False)
            os.close(fd)  # as a writer that was killed leaves it
            assert name.startswith("aaaaaaaa" if directory is mine else "bbbbbbbb")
        (tmp_path / "tmp" / "notes.txt").write_text("foreign")
        cleared = mine.clear_temp()
        assert (cleared.files, cleared.kept, cleared.foreign) == (1, 1, 1)
        assert [name[:8] for name in temp_files(mine)] == ["bbbbbbbb", "notes.tx"]


def test_an_old_temp_file_of_another_node_goes_unless_somebody_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.storage.temp_folder.ABANDONED_SECONDS", -1.0)
    with open_disk(tmp_path, "aaaaaaaa") as mine, open_disk(tmp_path, "bbbbbbbb") as other:
        _, left = other.create_temp(direct=False)
        os.close(left)
        held_name, held = other.create_temp(direct=False)
        cleared = mine.clear_temp()
        assert (cleared.files, cleared.kept) == (1, 1)
        assert temp_files(mine) == [held_name]
        os.close(held)
    assert ABANDONED_SECONDS >= 600


def test_without_locks_only_an_old_temp_file_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(fd: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", none)
    with open_disk(tmp_path, "aaaaaaaa") as mine:
        name, fd = mine.create_temp(direct=False)
        assert mine.clear_temp().kept == 1
        monkeypatch.setattr("tierkv.storage.temp_folder.ABANDONED_SECONDS", -1.0)
        assert mine.clear_temp().files == 1
        os.close(fd)
        assert name not in temp_files(mine)


# -------------------------------------------------------------------- as one node has it


def opened_by(data: DataDirectory, path: Path, **options: bool) -> DataDirectory:
    return open_disk_directory(path, data, direct_io=True, read_only=options.get("read_only", False))


def test_an_empty_directory_where_one_was_is_not_filled(data: DataDirectory, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    opened_by(data, disk).close()
    os.rename(disk, tmp_path / "away")
    for mount_point in ("absent", "empty"):
        if mount_point == "empty":
            disk.mkdir()
        with pytest.raises(DataDirectoryError, match="is the disk mounted"):
            opened_by(data, disk)
    assert os.listdir(disk) == []
    opened_by(data, tmp_path / "another").close()  # another path is another matter
    with pytest.raises(DataDirectoryError, match="lies in"):
        opened_by(data, data.path / "disk")


def test_where_its_mount_is_missing_it_is_not_made_at_a_first_start(data: DataDirectory, tmp_path: Path) -> None:
    disk = tmp_path / "mnt" / "share" / "tierkv"
    with pytest.raises(DataDirectoryError, match=f"neither is {disk.parent}: is the disk mounted"):
        opened_by(data, disk)
    assert not (tmp_path / "mnt").exists()
    disk.parent.mkdir(parents=True)
    opened_by(data, disk).close()
    assert (disk / "FORMAT").exists()


def test_with_what_the_node_knew_of_it_removed_it_begins_anew(data: DataDirectory, tmp_path: Path) -> None:
    opened_by(data, tmp_path / "disk").close()
    for path in (tmp_path / "disk" / "FORMAT", data.path / "disk-index" / "USED"):
        path.unlink()
    for name in ("models", "tmp", "quarantine"):
        (tmp_path / "disk" / name).rmdir()
    with opened_by(data, tmp_path / "disk") as anew:
        assert anew.store_id


def test_a_file_system_that_is_read_only_is_read(data: DataDirectory, tmp_path: Path) -> None:
    opened_by(data, tmp_path / "disk").close()
    failures: list[str] = []
    with inject(
        errno.EROFS, "open", times=10, when=lambda args, _: isinstance(args[0], str) and args[0].endswith(".tmp")
    ):
        disk = open_disk_directory(
            tmp_path / "disk",
            data,
            direct_io=True,
            read_only=False,
            failed=lambda failure: failures.append(failure.reason),
        )
    with disk:
        assert failures == [Reason.READ_ONLY]
        with disk.folder(("models",)):
            pass


def test_the_index_is_one_worker_s_at_a_time(data: DataDirectory) -> None:
    with hold_disk_index(data) as folder_fd:
        assert folder_fd >= 0
        with pytest.raises(DataDirectoryError, match="has not ended yet"), hold_disk_index(data):
            pass
    with hold_disk_index(data):
        pass


# -------------------------------------------------------------------- removing what nobody uses


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DataDirectory]:
    with open_disk(tmp_path / "shared") as opened:
        yield opened


def put(directory: DataDirectory, used: float) -> tuple[Sample, Path]:
    sample = Sample()
    sample.write(directory)
    path = directory.path.joinpath(*sample.name.parts)
    os.utime(path, (used, used))
    return sample, path


def test_what_was_used_since_stays_and_what_was_not_goes(disk: DataDirectory) -> None:
    sample, path = put(disk, 5000.0)
    assert remove_unused(disk, sample.name, 4000.0, LATER) == Used(5000.0)
    assert path.exists()
    assert remove_unused(disk, sample.name, 5000.0, LATER) is True
    assert not path.parent.exists()
    assert remove_unused(disk, sample.name, 5000.0, LATER) is False
    assert temp_files(disk) == []


def test_what_is_used_in_the_moment_of_its_removal_has_its_name_again(disk: DataDirectory) -> None:
    sample, path = put(disk, 1000.0)
    with hold("rename") as barrier:
        removed: list[bool | Used] = []
        thread = threading.Thread(target=lambda: removed.append(remove_unused(disk, sample.name, 2000.0, LATER)))
        thread.start()
        barrier.wait_reached()
        os.utime(path, (3000.0, 3000.0))
        barrier.release()
        thread.join()
    assert removed == [Used(3000.0)]
    assert sample.read(disk).valid == 3
    assert temp_files(disk) == []


@pytest.mark.parametrize("links", ["as ever", "none"])
def test_a_file_that_another_node_has_put_there_meanwhile_is_left(disk: DataDirectory, links: str) -> None:
    sample, path = put(disk, 1000.0)
    real = os.rename

    def used_and_put_anew(*args: object, **options: object) -> None:
        os.utime(path, (3000.0, 3000.0))
        real(*args, **options)  # type: ignore[arg-type]
        if os.rename is not real:
            os.rename = real  # type: ignore[assignment]
            sample.write(disk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", used_and_put_anew)
        if links == "none":
            with inject(errno.EPERM, "link"):
                assert remove_unused(disk, sample.name, 2000.0, LATER) == Used(3000.0)
        else:
            assert remove_unused(disk, sample.name, 2000.0, LATER) == Used(3000.0)
    assert sample.read(disk).valid == 3
    assert temp_files(disk) == []


def test_a_use_in_the_future_holds_a_file_no_longer_than_one_of_now(disk: DataDirectory) -> None:
    sample, path = put(disk, 9_000_000.0)
    assert remove_unused(disk, sample.name, 4000.0, 5000.0) == Used(5000.0)
    assert path.stat().st_mtime == 5000.0
    assert remove_unused(disk, sample.name, 5000.0, 6000.0) is True


def test_what_is_not_ours_keeps_its_name(disk: DataDirectory) -> None:
    sample, path = put(disk, 1000.0)
    path.unlink()
    path.symlink_to("/etc/hostname")
    assert remove_unused(disk, sample.name, 1e12, LATER) is False
    assert path.is_symlink()


@pytest.mark.parametrize("operation", ["rename", "unlink", "stat"])
def test_a_removal_that_fails_is_told(disk: DataDirectory, operation: str) -> None:
    sample, path = put(disk, 1000.0)
    with inject(errno.EIO, operation), pytest.raises(StorageError):
        remove_unused(disk, sample.name, 2000.0, LATER)
    assert path.exists() == (operation != "unlink")
    disk.clear_temp()
    assert temp_files(disk) == []


def test_a_file_server_that_was_set_up_anew_is_a_directory_that_is_gone(disk: DataDirectory) -> None:
    assert disk.find_loss() == ""
    with inject(errno.ESTALE, "fstat", times=10):
        assert "set up anew" in disk.find_loss()
    with (
        inject(errno.ESTALE, "fstat", times=10),
        inject(errno.ESTALE, "stat", times=10),
        pytest.raises(StorageError),
    ):
        disk.find_loss()
