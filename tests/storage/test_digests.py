from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import msgspec
import pytest

from tests.faults.system_calls import Fault
from tests.storage.samples import temp_files
from tierkv.storage import digests
from tierkv.storage.digests import SETTLED_NS, DigestMemory
from tierkv.storage.directory import DataDirectory
from tierkv.storage.weight_files import FileStat

STAT = FileStat(device=5, inode=77, size=1000, mtime_ns=1_000, ctime_ns=2_000)
DIGEST = bytes(range(32))
LATER = STAT.ctime_ns + SETTLED_NS + 1


def remembering(directory: DataDirectory, stat: FileStat = STAT, digest: bytes = DIGEST) -> DigestMemory:
    memory = DigestMemory(directory)
    assert memory.remember(stat, digest, started_ns=stat.ctime_ns + SETTLED_NS + 1)
    return memory


def entries(directory: DataDirectory) -> list[Path]:
    return sorted((directory.path / "digests").iterdir())


def test_a_digest_is_remembered_between_runs(directory: DataDirectory) -> None:
    remembering(directory)
    assert DigestMemory(directory).recall(STAT) == DIGEST


@pytest.mark.parametrize("field", FileStat.__struct_fields__)
def test_a_file_that_differs_in_anything_is_unknown(directory: DataDirectory, field: str) -> None:
    memory = remembering(directory)
    assert memory.recall(msgspec.structs.replace(STAT, **{field: getattr(STAT, field) + 1})) is None
    assert memory.recall(STAT) == DIGEST


@pytest.mark.parametrize(
    ("age_ns", "kept"), [(SETTLED_NS + 1, True), (SETTLED_NS, False), (0, False), (-(10**12), False)]
)
def test_only_files_that_were_at_rest_when_hashing_began_are_remembered(
    directory: DataDirectory, age_ns: int, kept: bool
) -> None:
    memory = DigestMemory(directory)
    assert memory.remember(STAT, DIGEST, started_ns=STAT.ctime_ns + age_ns) is kept
    assert (memory.recall(STAT) == DIGEST) is kept
    assert len(entries(directory)) == kept


def test_a_changed_file_takes_the_place_of_the_old_one(directory: DataDirectory) -> None:
    memory = remembering(directory)
    changed = msgspec.structs.replace(STAT, ctime_ns=STAT.ctime_ns + 10)
    memory.remember(changed, bytes(32), started_ns=2 * LATER)
    assert (memory.recall(STAT), memory.recall(changed)) == (None, bytes(32))
    assert len(entries(directory)) == 1


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100, b"{}", b'{"stat": 1}', bytes(10_000)])
def test_garbage_is_ignored_and_replaced(directory: DataDirectory, content: bytes) -> None:
    memory = remembering(directory)
    (path,) = entries(directory)
    path.write_bytes(content)
    assert memory.recall(STAT) is None
    remembering(directory)
    assert memory.recall(STAT) == DIGEST


def test_a_single_wrong_bit_is_noticed(directory: DataDirectory) -> None:
    memory = remembering(directory)
    (path,) = entries(directory)
    raw = path.read_bytes()
    for index in range(len(raw)):
        path.write_bytes(raw[:index] + bytes([raw[index] ^ 1]) + raw[index + 1 :])
        assert memory.recall(STAT) in (None, DIGEST), index


def test_a_link_a_folder_and_a_fifo_are_ignored(directory: DataDirectory, tmp_path: Path) -> None:
    memory = remembering(directory)
    (path,) = entries(directory)
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    assert memory.recall(STAT) is None
    path.unlink()
    os.mkfifo(path)
    assert memory.recall(STAT) is None
    path.unlink()
    path.mkdir()
    assert memory.recall(STAT) is None


@pytest.mark.parametrize("operation", ["open", "write", "fdatasync", "rename"])
def test_a_memory_that_can_not_be_written_costs_only_hashing_again(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    memory = DigestMemory(directory)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        Fault(patch, operation, errno.ENOSPC)
        assert not memory.remember(STAT, DIGEST, started_ns=LATER)
    assert "is not remembered" in caplog.text
    assert memory.recall(STAT) is None
    assert temp_files(directory) == []


def test_a_memory_that_can_not_be_read_says_so(
    directory: DataDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = remembering(directory)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        Fault(patch, "open", errno.EACCES)
        assert memory.recall(STAT) is None
    assert "EACCES" in caplog.text
    assert memory.recall(STAT) == DIGEST


def test_the_oldest_entries_are_forgotten(directory: DataDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "MAX_ENTRIES", 3)
    stats = [msgspec.structs.replace(STAT, inode=number) for number in range(5)]
    for age, stat in enumerate(stats):
        memory = remembering(directory, stat)
        os.utime(directory.path / "digests" / f"5-{stat.inode:x}.json", (age, age))
    assert [memory.recall(stat) is not None for stat in stats] == [False, False, True, True, True]


def test_several_processes_may_remember_at_a_time(directory: DataDirectory) -> None:
    """Each with the directory opened on its own, as an engine beside the node."""

    def work() -> None:
        with DataDirectory.open(directory.path, create=False, writable=False) as own:
            for _ in range(10):
                memory = remembering(own)
                assert memory.recall(STAT) == DIGEST

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert DigestMemory(directory).recall(STAT) == DIGEST
    assert temp_files(directory) == []
