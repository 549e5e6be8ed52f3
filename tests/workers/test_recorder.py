"""Recordings: what engines ask, as lines in two bounded files that a purge can be sure of."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tierkv.core.reasons import Reason
from tierkv.core.recording import (
    AnyAnswer,
    AnyPacket,
    Asked,
    Forget,
    Forgotten,
    Group,
    Mark,
    Missing,
    Recorded,
    Stored,
    shorten,
)
from tierkv.errors import TraceUnreadable
from tierkv.replay.formats import read_trace
from tierkv.replay.reading import ReadOptions
from tierkv.replay.trace import Gap, Trace, Verb
from tierkv.workers import recorder
from tierkv.workers.recorder import Recorder, RecorderConfig, Recording

ONE = Group(group=b"1" * 32, name="llama", fingerprint="ab", salt="", block_tokens=16, block_bytes=100)
TWO = Group(group=b"2" * 32, name="llama", fingerprint="ab", salt="c0ffee00", block_tokens=16, block_bytes=100)


def short(prompt: str) -> bytes:
    """A letter a block. Each key tells the whole prefix, as real ones do."""
    return b"".join(prompt[: index + 1].encode().rjust(8, b".") for index in range(len(prompt)))


def asked(prompt: str, time: float = 1.0, *, hit: int = 0, group: Group = ONE) -> Asked:
    return Asked(time=time, group=group.group, blocks=len(prompt), hit=hit, keys=short(prompt))


def stored(prompt: str, time: float = 1.0, *, group: Group = ONE) -> Stored:
    return Stored(time=time, group=group.group, blocks=len(prompt), stored=len(prompt), keys=short(prompt))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def recording(path: Path) -> Iterator[Recording]:
    made = Recording(path, 2**20, now=lambda: 0.0)
    made.note(ONE)
    made.note(TWO)
    yield made
    made.close()


def record(recording: Recording, *lines: Asked | Stored) -> None:
    for line in lines:
        assert recording.add(line)
        recording.flush()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def read(path: Path) -> Trace:
    return read_trace(path, ReadOptions())


def test_what_was_recorded_is_read_as_it_happened(recording: Recording, path: Path) -> None:
    record(
        recording, asked("abc", 1.0), stored("abc", 2.0), asked("abd", 3.0, hit=2, group=TWO), asked("abd", 4.0, hit=2)
    )
    trace = read(path)
    assert [(step.time, step.verb, step.group, step.tokens) for step in trace.steps] == [
        (1.0, Verb.ASK, 0, 48),
        (2.0, Verb.STORE, 0, 48),
        (3.0, Verb.ASK, 1, 48),
        (4.0, Verb.ASK, 0, 48),
    ]
    assert [list(step.blocks) for step in trace.steps] == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [0, 1, 6]]
    assert [(group.name, group.block_tokens, group.block_bytes) for group in trace.groups] == 2 * [("llama", 16, 100)]


def test_blocks_that_were_written_before_are_not_written_again(recording: Recording, path: Path) -> None:
    record(recording, asked("abcdefgh"), stored("abcdefgh"), asked("abcdefghi"))
    assert path.read_text().count("keys") == 3
    assert [len(line["keys"]) > 0 for line in lines_of(path)[2:]] == [True, False, True]
    assert [list(step.blocks) for step in read(path).steps] == [list(range(8)), list(range(8)), list(range(9))]


def test_with_too_many_blocks_known_prompts_are_written_whole_again(
    recording: Recording, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_KNOWN_BLOCKS", 4)
    record(recording, asked("abcde"), asked("abcde"), asked("xyz"), asked("abc"))
    assert [list(step.blocks) for step in read(path).steps] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [5, 6, 7], [0, 1, 2]]


def test_a_second_life_goes_on_behind_what_is_there(recording: Recording, path: Path) -> None:
    record(recording, asked("ab"))
    recording.close()
    with path.open("ab") as file:
        file.write(b'{"line":"asked","ti')  # its last write was torn
    again = Recording(path, 2**20, now=lambda: 0.0)
    again.note(ONE)
    record(again, asked("abc", 5.0))
    again.close()
    assert [list(step.blocks) for step in read(path).steps] == [[0, 1], [0, 1, 2]]


def test_a_torn_line_is_left_out_of_a_replay(recording: Recording, path: Path) -> None:
    record(recording, asked("ab"))
    recording.close()
    with path.open("ab") as file:
        file.write(b'{"line":"asked","ti')
    assert len(read(path).steps) == 1


def test_a_damaged_line_that_others_depend_on_is_said(recording: Recording, path: Path) -> None:
    record(recording, asked("ab"), asked("abc"))
    recording.close()
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], lines[2][:20], *lines[3:]]))
    with pytest.raises(TraceUnreadable, match=r'line 3.* remove it and all behind it up to the next line .*"begun"'):
        read(path)
    path.write_bytes(b"\n".join([*lines[:2], b"", lines[2][:20], *lines[:3]]))
    assert len(read(path).steps) == 1, "a line that was torn by a crash is left out"


def test_a_damaged_line_of_the_older_file_is_looked_for_there(recording: Recording, path: Path) -> None:
    record(recording, asked("ab"), asked("abc"))
    recording.close()
    older = path.with_name("requests.jsonl.1")
    lines = path.read_bytes().splitlines()
    older.write_bytes(b"\n".join([lines[0], b"{", *lines[1:]]))
    with pytest.raises(TraceUnreadable, match=r"requests\.jsonl\.1: line 2"):
        read(path)


def test_a_full_file_becomes_the_older_one_and_each_can_be_read_by_itself(path: Path) -> None:
    recording = Recording(path, 4_000, now=lambda: 0.0)
    recording.note(ONE)
    older = path.with_name("requests.jsonl.1")
    for number in range(200):
        record(recording, asked("ab" + chr(97 + number % 26), float(number)))
        assert sum(file.stat().st_size for file in (path, older) if file.exists()) < 4_500
    recording.close()
    steps = read(path).steps
    times = [step.time for step in steps]
    assert len(read(older).steps) < len(steps)
    assert times == sorted(times)
    assert times[-1] == 199.0
    assert {len(step.blocks) for step in steps} == {3}


@pytest.mark.parametrize(
    ("purge", "left"),
    [
        (Forget(job=b"j", groups=(ONE.group,)), [TWO.group]),
        (Forget(job=b"j", salts=("c0ffee00",)), [ONE.group]),
        (Forget(job=b"j", salts=("",)), [TWO.group]),
        (Forget(job=b"j", fingerprints=("ab",)), []),
        (Forget(job=b"j", keys=(short("xy")[8:],)), [ONE.group]),
        (Forget(job=b"j", keys=(short("nobody")[-8:],)), [ONE.group, TWO.group]),
    ],
)
def test_a_purge_leaves_no_line_of_what_it_means_in_either_file(
    recording: Recording, path: Path, purge: Forget, left: list[bytes]
) -> None:
    record(recording, asked("ab"), stored("xyz", group=TWO))
    recording.close()
    os.replace(path, path.with_name("requests.jsonl.1"))
    record(recording, asked("ab"), stored("xyz", group=TWO))
    removed = recording.forget(purge)
    for file in (path, path.with_name("requests.jsonl.1")):
        groups = [line["group"] for line in lines_of(file) if line["line"] != "begun"]
        told = [msgspec.json.decode(msgspec.json.encode(group), type=bytes) for group in groups]
        assert list(dict.fromkeys(told)) == left
    assert removed == 4 * (2 - len(left))
    assert [file.name for file in path.parent.iterdir() if file.name.endswith(".new")] == []


def test_after_a_purge_recording_goes_on_and_can_be_read(recording: Recording, path: Path) -> None:
    record(recording, asked("abc"), asked("xy", group=TWO))
    recording.forget(Forget(job=b"j", groups=(ONE.group,)))
    record(recording, asked("abcd", 9.0), asked("xyz", 10.0, group=TWO))
    assert [(step.time, len(step.blocks)) for step in read(path).steps] == [(1.0, 2), (9.0, 4), (10.0, 3)]


def test_a_line_of_an_unknown_group_waits_until_it_is_known(
    recording: Recording, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_UNPLACED", 2)
    third = msgspec.structs.replace(ONE, group=b"3" * 32)
    for number in range(3):
        assert not recording.add(asked("abc"[: number + 1], float(number), group=third))
    recording.flush()
    assert not path.exists()
    assert recording.missing == {Reason.WORKER_DIED: 1}, "there is room for so many"
    recording.note(third)
    recording.flush()
    trace = read(path)
    assert [(step.time, len(step.blocks)) for step in trace.steps] == [(0.0, 1), (1.0, 2)]
    assert trace.gaps == (Gap(0.0, 1, "worker_died"),)


def test_a_link_is_not_followed(recording: Recording, path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        recording.add(asked("a"))
    assert not (tmp_path / "elsewhere").exists()


# ---- what is missing


class Full:
    """The disk is full once `room` more bytes are written. A write may take a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(recorder.os, "write", self)

    def __call__(self, fd: int, content: memoryview) -> int:
        if self.room is None:
            return self._write(fd, content)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self._write(fd, content[: self.room])
        self.room -= done
        return done


def test_what_a_full_disk_has_cost_stands_where_it_is_missing(
    recording: Recording, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Full(monkeypatch)
    record(recording, asked("ab"))
    for _ in range(2):  # the second time that some are missing is lost as well, and told again
        recording.add(asked("abc", 2.0))
        recording.add(asked("abcd", 3.0))
        disk.room = 0
        with pytest.raises(OSError, match="No space"):
            recording.flush()
        disk.room = None
    record(recording, asked("abcde", 4.0))
    assert (recording.written, recording.missing) == (2, {Reason.DISK_FULL: 4})
    trace = read(path)
    assert [step.time for step in trace.steps] == [1.0, 4.0]
    assert trace.gaps == (Gap(0.0, 4, "disk_full"),)


def test_of_a_write_that_ended_in_the_middle_whole_lines_are_there(
    recording: Recording, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Full(monkeypatch)
    record(recording, asked("ab"))
    disk.room = 100 + len(msgspec.json.encode(asked("xy", 2.0)))
    for number in range(3):
        recording.add(asked("xy", 2.0 + number))
    with pytest.raises(OSError, match="No space"):
        recording.flush()
    disk.room = None
    record(recording, asked("ab", 9.0))
    trace = read(path)
    assert recording.written == len(trace.steps) == 3
    assert trace.gaps == (Gap(0.0, 2, "disk_full"),)


def test_what_went_with_a_file_that_somebody_removed_is_missing_in_the_next(recording: Recording, path: Path) -> None:
    record(recording, asked("ab"), asked("abc"))
    path.unlink()
    recording.add(asked("abcd"))
    recording.flush()
    record(recording, asked("abcde", 5.0))
    assert recording.missing == {Reason.NOT_FOUND: 3}
    trace = read(path)
    assert [step.time for step in trace.steps] == [5.0]
    assert trace.gaps == (Gap(0.0, 3, "not_found"),)


def test_a_folder_that_can_not_be_looked_at_keeps_no_line_back(
    recording: Recording, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(recording, asked("ab"))

    def refuse(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", refuse)
        record(recording, asked("abc", 2.0))
    assert (recording.written, recording.missing) == (2, {})
    assert len(read(path).steps) == 2


def test_a_file_that_was_moved_away_keeps_what_it_has_and_another_begins(recording: Recording, path: Path) -> None:
    record(recording, asked("ab"))
    moved = path.with_name("yesterday.jsonl")
    os.replace(path, moved)
    record(recording, asked("abc", 2.0), asked("abcd", 3.0))
    assert [step.time for step in read(moved).steps] == [1.0, 2.0]
    assert [step.time for step in read(path).steps] == [3.0]
    assert not recording.missing


def test_what_the_front_could_not_send_stands_in_the_file(recording: Recording, path: Path) -> None:
    record(recording, asked("ab"))
    recording.note_missing(Missing(since=1.5, requests=12, reason=Reason.NO_ROOM))
    record(recording, asked("ab", 2.0))
    assert not recording.missing, "the front has counted them"
    assert read(path).gaps == (Gap(1.5, 12, "no_room"),)


def test_a_purge_leaves_what_it_says_of_missing_requests(recording: Recording, path: Path) -> None:
    recording.note_missing(Missing(since=1.5, requests=12, reason=Reason.NO_ROOM))
    record(recording, asked("ab"))
    recording.forget(Forget(job=b"j", salts=("",)))
    assert [line["line"] for line in lines_of(path)] == ["begun", "missing"]


def test_what_is_missing_is_said_though_nothing_follows(recording: Recording, path: Path) -> None:
    record(recording, asked("ab"))
    recording.note_missing(Missing(since=1.5, requests=12, reason=Reason.NO_ROOM))
    assert recording.untold() == {Reason.NO_ROOM: 12}
    recording.flush()
    assert recording.untold() == {}
    recording.close()
    recording.note_missing(Missing(since=2.5, requests=3, reason=Reason.NO_ROOM))
    recording.flush()
    assert recording.untold() == {Reason.NO_ROOM: 3}, "not for this alone a file is opened"
    recording.finish()
    assert [gap.requests for gap in read(path).gaps] == [12, 3]


# ---- the process


def answers(sock: socket.socket, wanted: type[AnyAnswer]) -> Iterator[Any]:
    """Those of one kind, as they come."""
    while True:
        answer = msgspec.msgpack.decode(sock.recv(2**16), type=AnyAnswer)
        if isinstance(answer, wanted):
            yield answer


def send(sock: socket.socket, *packets: AnyPacket) -> None:
    for packet in packets:
        sock.send(msgspec.msgpack.encode(packet))


def test_packets_become_lines_until_nobody_is_left_to_send_any(path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=Recorder(theirs, Recording(path, 2**20)).run)
    with theirs:
        with ours:
            thread.start()
            send(ours, ONE, asked("ab"), stored("ab"), Forget(job=b"j", salts=("someone",)))
            ours.settimeout(30)
            assert next(answers(ours, Forgotten)) == Forgotten(job=b"j", lines=0)
            send(ours, asked("abc"))
        thread.join(30)
    assert not thread.is_alive()
    assert [len(step.blocks) for step in read(path).steps] == [2, 2, 3]


def test_a_recording_that_can_not_be_written_loses_lines_and_is_told_of_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.mkdir()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with ours:
            send(ours, ONE, asked("a"), asked("b"), Forget(job=b"j"))
            thread = threading.Thread(target=Recorder(theirs, Recording(path, 2**20)).run)
            thread.start()
            ours.settimeout(30)
            assert next(answers(ours, Forgotten)).problem
            path.rmdir()
            send(ours, asked("c"))
        thread.join(30)
    trace = read(path)
    assert [step.tokens for step in trace.steps] == [16]
    assert [gap.requests for gap in trace.gaps] == [2]
    assert len([one for one in caplog.records if "is not recorded" in one.message]) == 1


def test_the_front_is_told_what_came_of_all_that_was_sent_before_a_mark(path: Path) -> None:
    path.mkdir()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        with ours:
            thread = threading.Thread(target=Recorder(theirs, Recording(path, 2**20)).run)
            thread.start()
            ours.settimeout(30)
            said = answers(ours, Recorded)
            first = next(said)
            assert first == Recorded(pid=os.getpid(), file_bytes=path.stat().st_size)
            send(ours, ONE, asked("a"), asked("b"), Mark(number=7))
            full = next(one for one in said if one.mark == 7)
            assert (full.taken, full.written, full.missing) == (2, 0, {"io_error": 2})
            assert "Is a directory" in full.problem
            path.rmdir()
            send(ours, asked("c"), Mark(number=8))
            whole = next(one for one in said if one.mark == 8)
            assert (whole.taken, whole.written, whole.missing, whole.problem) == (1, 1, {}, "")
            assert whole.file_bytes == path.stat().st_size
        thread.join(30)
    assert not thread.is_alive()


def test_the_process_ends_with_its_socket(path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        config = RecorderConfig(path=str(path), max_bytes=2**20, socket_fd=theirs.fileno(), parent_pid=os.getpid())
        command = [sys.executable, "-m", "tierkv.workers.recorder", config.encode()]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        send(ours, ONE, asked("ab"))
        ours.close()
        assert process.wait(30) == 0
    assert len(read(path).steps) == 1


def test_short_keys_are_the_first_bytes_of_each_key() -> None:
    assert shorten(bytes(range(32)) + bytes(range(100, 132))) == bytes(range(8)) + bytes(range(100, 108))
    assert shorten(b"") == b""
