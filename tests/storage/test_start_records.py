"""Records of starts on disk: whole or absent, bounded, and never a reason to fail."""

from __future__ import annotations

import os

from tierkv.core.starts import LastEnd, Start, StartKind, Window
from tierkv.storage.directory import DataDirectory
from tierkv.storage.start_records import MAX_STARTS, prune_starts, read_starts, write_start

MOMENT = 1_700_000_000_000


def start(number: int, kind: StartKind = StartKind.NODE, **changes: object) -> Start:
    values = {"number": number, "kind": kind, "began": number / 1_000, "last_end": LastEnd.CLEAN}
    return Start(**(values | changes))


def test_what_was_written_is_read_the_oldest_first(directory: DataDirectory) -> None:
    windows = (Window(0.0, 5.0, 100, {"host": 60, "nvme": 20}, 7, [0, 3], 0.25, 120.0, 30.0),)
    new = start(MOMENT + 5, windows=windows, before=windows[0], is_ready=True, ready_seconds=1.5)
    old = start(MOMENT, StartKind.ENGINE, group="0a1b2c3d4e5f")
    write_start(directory, new)
    write_start(directory, old)
    assert read_starts(directory) == [old, new]


def test_a_record_takes_the_place_of_the_one_before(directory: DataDirectory) -> None:
    write_start(directory, start(MOMENT))
    write_start(directory, start(MOMENT, ended=True))
    assert [one.ended for one in read_starts(directory)] == [True]
    assert len(os.listdir(directory.path / "starts")) == 1


def test_the_oldest_go_when_there_are_many_and_engines_take_no_place_of_the_nodes(directory: DataDirectory) -> None:
    for number in range(MAX_STARTS + 3):
        write_start(directory, start(MOMENT + number, StartKind.ENGINE))
    write_start(directory, start(MOMENT))
    write_start(directory, start(MOMENT + 1, StartKind.FRONT))
    prune_starts(directory)
    kept = read_starts(directory)
    assert len(kept) == MAX_STARTS + 2
    assert min(one.number for one in kept if one.kind is StartKind.ENGINE) == MOMENT + 3


def test_what_is_torn_empty_of_another_format_or_misnamed_is_left_out_and_left_alone(directory: DataDirectory) -> None:
    write_start(directory, start(MOMENT))
    folder = directory.path / "starts"
    whole = (folder / f"{MOMENT}-node.json").read_bytes()
    (folder / f"{MOMENT + 1}-node.json").write_bytes(whole[: len(whole) // 2])
    (folder / f"{MOMENT + 2}-node.json").write_bytes(b"")
    (folder / f"{MOMENT + 3}-node.json").write_bytes(whole.replace(b'"format":1', b'"format":2'))
    (folder / f"{MOMENT + 4}-front.json").write_bytes(whole)
    (folder / f"{MOMENT + 5}-node.json").symlink_to(folder / f"{MOMENT}-node.json")
    (folder / "notes.txt").write_bytes(b"an admin's")
    assert [one.number for one in read_starts(directory)] == [MOMENT]
    prune_starts(directory)
    assert len(os.listdir(folder)) == 7


def test_a_directory_of_an_earlier_release_has_none(directory: DataDirectory) -> None:
    (directory.path / "starts").rmdir()
    assert read_starts(directory) == []
