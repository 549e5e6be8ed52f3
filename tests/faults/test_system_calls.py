from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import pytest

from tests.faults.system_calls import Calls, FlippedBit, ShortTransfers, hold, inject, record_calls

SOURCES = Path(__file__).parents[2] / "tierkv"
NO_SYSTEM_CALL = {"fsdecode", "fsencode", "path", "strerror", "stat_result", "DirEntry"}
CAN_NOT_FAIL = {"getpid", "getppid", "geteuid", "cpu_count", "close", "_exit"}


def test_every_call_on_a_file_that_storage_makes_can_be_recorded() -> None:
    named: set[str] = set()
    for path in SOURCES.joinpath("storage").glob("*.py"):
        named |= set(re.findall(r"\bos\.([a-z_][A-Za-z0-9_]*)", path.read_text()))
    assert named - NO_SYSTEM_CALL - CAN_NOT_FAIL <= set(Calls.FUNCTIONS)


def test_the_nth_call_fails_and_the_others_do_not(tmp_path: Path) -> None:
    with inject(errno.EIO, "mkdir", nth=1) as fault:
        os.mkdir(tmp_path / "a")
        with pytest.raises(OSError, match="Input/output error"):
            os.mkdir(tmp_path / "b")
        os.mkdir(tmp_path / "c")
    assert (fault.calls, fault.failed) == (3, 1)
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]


def test_a_held_call_waits_until_it_is_let_go(tmp_path: Path) -> None:
    with hold("mkdir") as barrier:
        thread = threading.Thread(target=os.mkdir, args=(tmp_path / "a",))
        thread.start()
        barrier.wait_reached()
        assert not (tmp_path / "a").exists()
        barrier.release()
        thread.join(20)
    assert (tmp_path / "a").exists()


def test_a_bit_is_flipped_where_it_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    FlippedBit(monkeypatch, "pread", at=70, bit=3, times=1)
    FlippedBit(monkeypatch, "preadv", at=70, bit=0)
    assert os.pread(fd, 50, 50) == bytes(20) + b"\x08" + bytes(29)
    assert os.pread(fd, 50, 50) == bytes(50)
    views = [memoryview(bytearray(15)), memoryview(bytearray(15))]
    os.preadv(fd, views, 50)
    assert bytes(views[0]) + bytes(views[1]) == bytes(20) + b"\x01" + bytes(9)
    os.close(fd)


def test_a_transfer_of_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT, 0o600)
    ShortTransfers(monkeypatch, "write", 0)
    ShortTransfers(monkeypatch, "pwritev", 3)
    assert os.write(fd, b"abc") == 0
    assert os.pwritev(fd, [b"ab", b"cde"], 0) == 3
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_recording_names_the_calls_in_their_order(tmp_path: Path) -> None:
    with record_calls() as calls:
        os.mkdir(tmp_path / "a")
        os.listdir(tmp_path)
        os.rmdir(tmp_path / "a")
    assert calls.made == ["mkdir", "listdir", "rmdir"]
    assert calls.count()["mkdir"] == 1
