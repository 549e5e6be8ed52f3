from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tierkv.errors import WeightsUnreadable
from tierkv.integrations.file_proof import MARGIN_SECONDS, find_change, process_started_ns

NAMES = ("model.safetensors", "part/more.safetensors")
SECOND = 10**9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "above" / "model"
    (root / "part").mkdir(parents=True)
    for name in NAMES:
        (root / name).write_bytes(b"weights")
    return root


def youngest_ns(folder: Path) -> int:
    """When the last thing in the folder changed."""
    found = [folder, *folder.rglob("*")]
    return max(path.lstat().st_ctime_ns for path in found)


def just_after(folder: Path) -> int:
    """The start of a process for which all of the folder is just old enough."""
    return youngest_ns(folder) + int(MARGIN_SECONDS * SECOND) + 1


def wait_for_a_later_ctime(folder: Path) -> None:
    """Until the clock of the file system shows another time than that of the last change."""
    last, probe = youngest_ns(folder), folder.parent.parent / "probe"
    deadline = time.monotonic() + 60
    while True:
        probe.touch()
        if probe.stat().st_ctime_ns > last:
            return
        assert time.monotonic() < deadline, "the clock of the file system stands still"


def test_files_that_are_older_than_the_process_are_what_it_found(folder: Path) -> None:
    assert find_change(folder, NAMES, before_ns=just_after(folder)) is None


def test_a_file_just_before_the_start_proves_nothing(folder: Path) -> None:
    told = find_change(folder, NAMES, before_ns=just_after(folder) - 1)
    assert told is not None
    assert str(folder) in told


def overwrite(folder: Path) -> None:
    (folder / NAMES[1]).write_bytes(b"others")


def overwrite_and_set_the_times_back(folder: Path) -> None:
    path = folder / NAMES[0]
    before = path.stat()
    path.write_bytes(b"others!")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def put_another_file_in_its_place(folder: Path) -> None:
    aside = folder.parent.parent / "other.safetensors"
    aside.rename(folder / NAMES[0])


def add_a_file(folder: Path) -> None:
    (folder / "new.safetensors").touch()


def remove_a_file(folder: Path) -> None:
    (folder / "extra.safetensors").unlink()


def swap_the_folder(folder: Path) -> None:
    folder.rename(folder.parent / "old")
    (folder.parent / "other").rename(folder)


def swap_the_folder_above(folder: Path) -> None:
    folder.parent.rename(folder.parent.parent / "old")
    (folder.parent.parent / "other-above").rename(folder.parent)


@pytest.mark.parametrize(
    "change",
    [
        overwrite,
        overwrite_and_set_the_times_back,
        put_another_file_in_its_place,
        add_a_file,
        remove_a_file,
        swap_the_folder,
        swap_the_folder_above,
    ],
    ids=lambda change: change.__name__,
)
def test_a_change_behind_the_start_shows(folder: Path, change: Callable[[Path], None]) -> None:
    """Whatever was prepared before the start is old; only the change itself is young."""
    make_the_same(folder.parent / "other")
    make_the_same(folder.parent.parent / "other-above" / "model")
    (folder.parent.parent / "other.safetensors").write_bytes(b"others")
    (folder / "extra.safetensors").touch()
    limit_ns = just_after(folder.parent.parent)
    wait_for_a_later_ctime(folder.parent.parent)
    assert find_change(folder, NAMES, before_ns=limit_ns) is None
    change(folder)
    assert find_change(folder, NAMES, before_ns=limit_ns) is not None


def make_the_same(folder: Path) -> None:
    (folder / "part").mkdir(parents=True)
    for name in NAMES:
        (folder / name).write_bytes(b"others")


def test_what_comes_and_goes_beside_the_folder_is_nobody_s_change(folder: Path) -> None:
    limit_ns = just_after(folder)
    wait_for_a_later_ctime(folder)
    (folder.parent / "log").touch()
    (folder.parent.parent / "another-model").mkdir()
    assert find_change(folder, NAMES, before_ns=limit_ns) is None


def make_snapshot(place: Path, content: bytes) -> Path:
    """As a hub's cache: a folder of links into a folder of blobs."""
    (place / "blobs").mkdir(parents=True)
    (place / "blobs" / "one").write_bytes(content)
    snapshot = place / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/one")
    return snapshot


def test_links_are_followed_to_what_they_name(tmp_path: Path) -> None:
    snapshot = make_snapshot(tmp_path / "hub", b"weights")
    current = tmp_path / "current"
    current.symlink_to("hub/snapshots/abc")
    limit_ns = just_after(tmp_path)
    wait_for_a_later_ctime(snapshot)
    assert find_change(current, ("model.safetensors",), before_ns=limit_ns) is None
    (tmp_path / "hub" / "blobs" / "one").write_bytes(b"others!")
    told = find_change(current, ("model.safetensors",), before_ns=limit_ns)
    assert told is not None
    assert "blobs/one" in told


def test_a_link_that_was_made_anew_shows_though_its_target_is_old(tmp_path: Path) -> None:
    make_snapshot(tmp_path / "hub", b"weights")
    make_snapshot(tmp_path / "other", b"others!")
    current = tmp_path / "current"
    current.symlink_to("hub/snapshots/abc")
    limit_ns = just_after(tmp_path)
    wait_for_a_later_ctime(tmp_path)
    current.unlink()
    current.symlink_to("other/snapshots/abc")
    told = find_change(current, ("model.safetensors",), before_ns=limit_ns)
    assert told is not None
    assert str(current) in told


def test_a_link_on_the_way_counts_too(tmp_path: Path) -> None:
    make_snapshot(tmp_path / "hub", b"weights")
    (tmp_path / "disk").symlink_to("hub")
    limit_ns = just_after(tmp_path)
    wait_for_a_later_ctime(tmp_path)
    folder = tmp_path / "disk" / "snapshots" / "abc"
    assert find_change(folder, ("model.safetensors",), before_ns=limit_ns) is None
    (tmp_path / "disk").unlink()
    (tmp_path / "disk").symlink_to("hub")
    assert find_change(folder, ("model.safetensors",), before_ns=limit_ns) is not None


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert find_change(tmp_path / "a", (), before_ns=just_after(tmp_path)) is None


def test_one_file_is_judged_without_its_neighbours(folder: Path) -> None:
    single = folder / "model.gguf"
    single.write_bytes(b"weights")
    limit_ns = just_after(folder)
    wait_for_a_later_ctime(folder)
    assert find_change(single, (), before_ns=limit_ns) is None
    (folder / "neighbour").touch()
    assert find_change(single, (), before_ns=limit_ns) is None
    single.write_bytes(b"others!")
    assert find_change(single, (), before_ns=limit_ns) is not None


def test_a_file_that_is_gone_is_told_in_words(folder: Path) -> None:
    (folder / NAMES[0]).unlink()
    with pytest.raises(WeightsUnreadable, match=r"model\.safetensors can't be read"):
        find_change(folder, NAMES, before_ns=just_after(folder))


def test_a_process_knows_when_it_started() -> None:
    started_ns = process_started_ns()
    assert 0 < time.time_ns() - started_ns < 24 * 3600 * SECOND
