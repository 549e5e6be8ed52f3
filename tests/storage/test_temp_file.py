from __future__ import annotations

import errno
import os

import pytest

from tests.faults.system_calls import Fault
from tests.storage.samples import temp_files
from tierkv.errors import BrokenInvariant, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.temp_file import TempFile, write_small_file

FOLDER = ("models", "x")


def test_a_file_appears_under_its_name_only_when_it_is_published(directory: DataDirectory) -> None:
    path = directory.path / "models" / "x" / "file"
    with TempFile(directory, direct=False) as temp:
        os.write(temp.fd, b"content")
        assert not path.exists()
        temp.publish(FOLDER, "file")
        assert path.read_bytes() == b"content"
    assert temp_files(directory) == []


def test_a_file_that_is_not_published_is_removed(directory: DataDirectory) -> None:
    with TempFile(directory, direct=False):
        assert len(temp_files(directory)) == 1
    assert temp_files(directory) == []


def test_a_file_that_must_not_be_replaced_stays(directory: DataDirectory) -> None:
    def refuse(folder_fd: int) -> None:
        raise PermissionError

    write_small_file(directory, FOLDER, "file", b"old")
    with pytest.raises(PermissionError), TempFile(directory, direct=False) as temp:
        temp.publish(FOLDER, "file", refuse=refuse)
    assert (directory.path / "models" / "x" / "file").read_bytes() == b"old"
    assert temp_files(directory) == []


def test_publishing_twice_is_a_bug(directory: DataDirectory) -> None:
    with TempFile(directory, direct=False) as temp:
        temp.publish(FOLDER, "file")
        with pytest.raises(BrokenInvariant):
            temp.publish(FOLDER, "file")


def test_the_first_failure_is_told_when_the_temp_file_can_not_be_removed_either(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Fault(patch, "write", errno.ENOSPC)
        Fault(patch, "unlink", errno.EIO)
        with pytest.raises(StorageError, match="write failed with ENOSPC"):
            write_small_file(directory, FOLDER, "file", b"content")
    assert len(temp_files(directory)) == 1
    assert directory.clear_temp().files == 1


def test_a_small_file_is_durable_when_it_was_written(directory: DataDirectory) -> None:
    write_small_file(directory, FOLDER, "file", b"content")
    assert directory.unflushed(FOLDER) == (FOLDER,)


@pytest.mark.parametrize("operation", ["write", "fdatasync", "rename", "fsync"])
def test_a_small_file_that_is_not_durable_is_an_error(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    Fault(monkeypatch, operation, errno.EIO)
    with pytest.raises(StorageError, match=f"{operation} failed with EIO"):
        write_small_file(directory, FOLDER, "file", b"content")
    assert temp_files(directory) == []


def test_short_writes_of_a_small_file_go_on(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, rest: real(fd, rest[:3]))
    write_small_file(directory, FOLDER, "file", b"content")
    assert (directory.path / "models" / "x" / "file").read_bytes() == b"content"


def test_writing_nothing_is_an_error(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda fd, rest: 0)
    with pytest.raises(StorageError, match="nothing was written"):
        write_small_file(directory, FOLDER, "file", b"content")
