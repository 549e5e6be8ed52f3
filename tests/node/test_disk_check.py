from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.node import disk_check
from tierkv.node.disk_check import require_disk_directory
from tierkv.storage.directory import DataDirectory

HANGS = """
import signal
signal.pause()
"""


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    DataDirectory.open(tmp_path / "data").close()
    return tmp_path / "data"


def test_a_directory_that_is_not_there_or_is_empty_is_the_workers_to_mind(data_dir: Path, tmp_path: Path) -> None:
    require_disk_directory(data_dir, tmp_path / "not mounted" / "disk")
    (tmp_path / "empty").mkdir()
    require_disk_directory(data_dir, tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_data_directory_is_a_mistake_and_named(data_dir: Path, tmp_path: Path) -> None:
    DataDirectory.open(tmp_path / "other").close()
    with pytest.raises(ConfigError, match="data directory") as caught:
        require_disk_directory(data_dir, tmp_path / "other")
    assert caught.value.field == "disk_dir"
    assert str(tmp_path / "other") in caught.value.problem


def test_one_directory_by_two_names_is_a_mistake(data_dir: Path, tmp_path: Path) -> None:
    (data_dir / "inside").mkdir()
    (tmp_path / "link").symlink_to(data_dir / "inside")
    with pytest.raises(ConfigError, match="disk_dir"):
        require_disk_directory(data_dir, tmp_path / "link")


def test_a_file_server_that_does_not_answer_holds_up_no_start(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hanging_check.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(disk_check, "MODULE", "hanging_check")
    monkeypatch.setattr(disk_check, "WAIT_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING):
        require_disk_directory(data_dir, tmp_path / "disk")
    assert "does not answer" in caplog.text
