"""Pins on disk: written whole, found again, and a damaged one costs no other."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from tests.faults.system_calls import inject
from tierkv.core.instructions import PinRecord
from tierkv.core.reasons import Reason
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.pin_record import MAX_RECORD_BYTES, read_pins, remove_pin, write_pin


def record(number: int = 1, **changes: object) -> PinRecord:
    made = PinRecord(
        pin=bytes([number]) * 16,
        fingerprint="0f" * 32,
        group=b"g" * 32,
        keys=b"k" * 64,
        blocks=2,
        block_tokens=16,
        block_bytes=4096,
        owner="ann",
        tier="host",
        made=100.0 + number,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def directory(tmp_path: Path):
    with DataDirectory.open(tmp_path / "data") as opened:
        yield opened


def test_a_pin_is_found_as_it_was_written_and_the_oldest_comes_first(directory: DataDirectory) -> None:
    old, young = record(2, made=1.0), record(1, until=99.0, purged=3.0)
    write_pin(directory, young)
    write_pin(directory, old)
    assert read_pins(directory) == ([old, young], 0)
    changed = msgspec.structs.replace(old, purged=5.0)
    write_pin(directory, changed)
    assert read_pins(directory) == ([changed, young], 0)


def test_a_removed_pin_is_not_found_and_may_be_removed_again(directory: DataDirectory) -> None:
    write_pin(directory, record())
    remove_pin(directory, record().pin)
    remove_pin(directory, record().pin)
    assert read_pins(directory) == ([], 0)


@pytest.mark.parametrize("damage", ["cut", "flipped", "renamed", "newer", "huge", "folder", "no record"])
def test_a_record_that_is_none_is_counted_and_left_and_the_others_are_found(
    directory: DataDirectory, damage: str
) -> None:
    write_pin(directory, record(1))
    write_pin(directory, record(2))
    path = directory.path / "pins" / record(2).pin.hex()
    raw = path.read_bytes()
    if damage == "cut":
        path.write_bytes(raw[:-1])
    elif damage == "flipped":
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif damage == "renamed":
        path.rename(path.with_name("ab" * 16))
    elif damage == "newer":
        from tierkv.storage.checked_file import write_checked

        write_checked(directory, ("pins",), path.name, msgspec.msgpack.encode({"record": record(2), "format": 2}))
    elif damage == "huge":
        path.write_bytes(raw + bytes(MAX_RECORD_BYTES))
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        from tierkv.storage.checked_file import write_checked

        write_checked(directory, ("pins",), path.name, b"\x01")
    assert read_pins(directory) == ([record(1)], 1)
    assert len(list((directory.path / "pins").iterdir())) == 2


def test_names_that_are_not_ours_are_left_alone(directory: DataDirectory) -> None:
    (directory.path / "pins" / "notes.txt").write_text("mine")
    assert read_pins(directory) == ([], 0)


def test_a_disk_that_does_not_answer_now_costs_the_pins_and_not_the_start(directory: DataDirectory) -> None:
    write_pin(directory, record())
    with inject(errno.EIO, "listdir", times=1):
        assert read_pins(directory) == ([], 1)
    with inject(errno.EIO, "read", times=1):
        assert read_pins(directory) == ([], 1)


def test_a_write_that_fails_leaves_the_older_record(directory: DataDirectory) -> None:
    write_pin(directory, record())
    with inject(errno.ENOSPC, "write", times=1), pytest.raises(StorageError):
        write_pin(directory, record(owner="bob"))
    assert read_pins(directory) == ([record()], 0)


def test_where_nothing_may_be_changed_no_record_is_written_or_removed(directory: DataDirectory) -> None:
    write_pin(directory, record())
    with DataDirectory.open(directory.path, read_only=True) as reader:
        for change in (lambda: write_pin(reader, record(2)), lambda: remove_pin(reader, record().pin)):
            with pytest.raises(StorageError) as raised:
                change()
            assert raised.value.reason == Reason.READ_ONLY
        assert read_pins(reader) == ([record()], 0)
