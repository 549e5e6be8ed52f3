"""The crash simulator: it allows what POSIX allows, and forbids what a flush forbids."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.crash import CrashRecorder, CrashState

SOME = b"a" * 4096 + b"b" * 4096


def write(path: Path, content: bytes, *, flush: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwritev(fd, [content], 0)
    if flush:
        os.fdatasync(fd)
    os.close(fd)


def flush_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def last_states(recorder: CrashRecorder, per_point: int = 300) -> list[CrashState]:
    end = len(recorder.events)
    return list(recorder.states(per_point=per_point, seed=1, first=end))


def contents(states: list[CrashState], path: str) -> set[bytes | None]:
    return {state.files[path].content if path in state.files else None for state in states}


def test_what_was_there_before_is_durable(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_bytes(SOME)
    with CrashRecorder(tmp_path) as recorder:
        pass
    (state,) = last_states(recorder)
    assert state.folders == ["folder"]
    assert state.files["folder/old"].content == SOME


def test_a_file_that_was_not_flushed_may_be_absent_empty_torn_zeros_or_whole(tmp_path: Path) -> None:
    with CrashRecorder(tmp_path) as recorder:
        write(tmp_path / "new", SOME)
    found = contents(last_states(recorder), "new")
    assert {
        None,
        b"",
        SOME,
        bytes(len(SOME)),
        SOME[:4096] + bytes(4096),
        bytes(4096) + SOME[4096:],
        SOME[:4096],
    } <= found
    assert SOME[:512] + bytes(4096 - 512) in found


def test_bytes_that_were_flushed_are_there_whenever_the_name_is(tmp_path: Path) -> None:
    with CrashRecorder(tmp_path) as recorder:
        write(tmp_path / "new", SOME, flush=True)
    assert contents(last_states(recorder), "new") == {None, SOME}


def test_a_name_is_durable_once_its_directory_was_flushed(tmp_path: Path) -> None:
    with CrashRecorder(tmp_path) as recorder:
        os.mkdir(tmp_path / "folder")
        write(tmp_path / "folder" / "new", SOME, flush=True)
        flush_folder(tmp_path / "folder")
        lost = contents(last_states(recorder), "folder/new")
        flush_folder(tmp_path)
    assert lost == {None, SOME}, "the folder's own name was not flushed"
    assert contents(last_states(recorder), "folder/new") == {SOME}


def test_a_replaced_file_is_the_old_one_or_the_new_one_and_never_absent(tmp_path: Path) -> None:
    (tmp_path / "name").write_bytes(b"old")
    with CrashRecorder(tmp_path) as recorder:
        write(tmp_path / "temp", b"new", flush=True)
        os.rename(tmp_path / "temp", tmp_path / "name")
    states = last_states(recorder)
    assert contents(states, "name") == {b"old", b"new"}


def test_a_rename_within_a_directory_loses_the_file_in_no_state(tmp_path: Path) -> None:
    (tmp_path / "before").write_bytes(SOME)
    with CrashRecorder(tmp_path) as recorder:
        os.rename(tmp_path / "before", tmp_path / "after")
    assert all(state.files for state in last_states(recorder))
    assert {frozenset(state.files) for state in last_states(recorder)} >= {frozenset(["before"]), frozenset(["after"])}


def test_a_rename_between_directories_may_be_seen_half(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "file").write_bytes(SOME)
    with CrashRecorder(tmp_path) as recorder:
        os.rename(tmp_path / "a" / "file", tmp_path / "b" / "file")
    seen = {frozenset(state.files) for state in last_states(recorder)}
    assert seen == {frozenset(), frozenset(["a/file"]), frozenset(["b/file"]), frozenset(["a/file", "b/file"])}


def test_a_removed_file_may_come_back_until_its_directory_is_flushed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(SOME)
    with CrashRecorder(tmp_path) as recorder:
        os.unlink(tmp_path / "file")
        assert contents(last_states(recorder), "file") == {None, SOME}
        flush_folder(tmp_path)
    assert contents(last_states(recorder), "file") == {None}


def test_a_flush_covers_what_came_before_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def slow_fsync(fd: int) -> None:
        write(tmp_path / "during", SOME, flush=True)  # as another thread does
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    with CrashRecorder(tmp_path) as recorder:
        write(tmp_path / "before", SOME, flush=True)
        flush_folder(tmp_path)
    states = last_states(recorder)
    assert contents(states, "before") == {SOME}
    assert contents(states, "during") == {None, SOME}


def test_an_inode_that_is_used_again_is_another_file(tmp_path: Path) -> None:
    with CrashRecorder(tmp_path) as recorder:
        write(tmp_path / "first", b"1", flush=True)
        flush_folder(tmp_path)
        os.unlink(tmp_path / "first")
        write(tmp_path / "second", b"2", flush=True)
    found = {(state.files["first"].content if "first" in state.files else None) for state in last_states(recorder)}
    assert found == {None, b"1"}


def other_calls(folder: Path) -> None:
    fd = os.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, b"one ")
    os.write(fd, b"two")
    os.pwrite(fd, b"X", 0)
    os.ftruncate(fd, 6)
    os.posix_fallocate(fd, 0, 10)
    os.fsync(fd)
    os.close(fd)
    os.link(folder / "file", folder / "link")
    os.replace(folder / "link", folder / "other")
    fd = os.open(folder / "file", os.O_WRONLY | os.O_TRUNC)
    os.close(fd)
    os.makedirs(folder / "x" / "y")
    os.rmdir(folder / "x" / "y")


def relative_calls(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.mkdir("x", dir_fd=fd)
    inner = os.open("x", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
    write_fd = os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fd)
    os.write(write_fd, b"abc")
    os.close(write_fd)
    os.rename("file", "moved", src_dir_fd=fd, dst_dir_fd=inner)
    os.truncate(folder / "x" / "moved", 2)
    os.close(inner)
    os.close(fd)


@pytest.mark.parametrize("calls", [other_calls, relative_calls])
def test_the_newest_state_is_what_the_calls_have_left(tmp_path: Path, calls: Callable[[Path], None]) -> None:
    watched, built = tmp_path / "watched", tmp_path / "built"
    watched.mkdir()
    built.mkdir()
    with CrashRecorder(watched) as recorder:
        calls(watched)
        for folder in (watched, watched / "x"):
            flush_folder(folder)
        for path in (path for path in watched.rglob("*") if path.is_file()):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    (state,) = last_states(recorder)
    state.build(built)

    def listing(root: Path) -> dict[str, tuple[bytes, int]]:
        return {
            str(path.relative_to(root)): (path.read_bytes(), path.stat().st_nlink) if path.is_file() else (b"", 0)
            for path in root.rglob("*")
        }

    assert listing(built) == listing(watched)


def test_notes_come_with_the_states_after_them(tmp_path: Path) -> None:
    with CrashRecorder(tmp_path) as recorder:
        write(tmp_path / "file", b"1")
        recorder.note("written")
    states = list(recorder.states(per_point=4, seed=1))
    assert {state.notes for state in states if state.at < len(recorder.events)} == {()}
    assert {state.notes for state in states if state.at == len(recorder.events)} == {("written",)}


def test_the_same_seed_gives_the_same_states(tmp_path: Path) -> None:
    with CrashRecorder(tmp_path) as recorder:
        for number in range(6):
            write(tmp_path / str(number), SOME)
    runs = [[state.digest() for state in recorder.states(per_point=5, seed=seed)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
