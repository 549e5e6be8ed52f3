"""A disk in a mood."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.torture.barriers import FOLDER
from tierkv.torture.disk import Mood, MoodReader, Quota, set_mood, used_bytes


@pytest.fixture
def quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quota:
    (tmp_path / "control").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "control"))
    return Quota(tmp_path / "data")


def test_a_mood_reaches_a_worker_with_its_next_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    reader = MoodReader()
    assert reader.now() == Mood()
    for mood in (Mood(error_part=0.5), Mood(quota_bytes=7, errno_name="ENOSPC"), Mood()):
        set_mood(tmp_path, mood)
        assert reader.now() == mood


def test_who_is_told_of_no_folder_has_a_disk_without_moods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    assert MoodReader().now() == Mood()


@pytest.mark.parametrize(("name", "reason"), [("ENOSPC", Reason.DISK_FULL), ("EDQUOT", Reason.DISK_FULL)])
def test_what_takes_room_is_refused_when_the_quota_is_used_up(
    tmp_path: Path, quota: Quota, name: str, reason: Reason
) -> None:
    file = tmp_path / "data" / "file"
    with file.open("wb") as out:
        set_mood(tmp_path / "control", Mood(quota_bytes=4096, errno_name=name))
        quota.call("write", os.write, out.fileno(), b"x" * 4096)
        with pytest.raises(StorageError) as caught:
            quota.call("write", os.write, out.fileno(), b"x")
        assert (caught.value.reason, caught.value.errno_name) == (reason, name)
        assert quota.call("stat", os.stat, file).st_size == 4096, "what takes no room goes on"
        set_mood(tmp_path / "control", Mood())
        assert quota.call("write", os.write, out.fileno(), b"x") == 1


def test_a_quota_of_nothing_refuses_every_write(tmp_path: Path, quota: Quota) -> None:
    set_mood(tmp_path / "control", Mood(quota_bytes=0, errno_name="EIO"))
    with pytest.raises(StorageError) as caught:
        quota.call("pwritev", os.pwritev, 0, [b""], 0)
    assert caught.value.errno_name == errno.errorcode[errno.EIO]


def test_what_files_take_is_what_the_file_system_says(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(10_000))
    assert used_bytes(tmp_path) >= 10_000
    assert used_bytes(tmp_path / "a" / "nothing") == 0
