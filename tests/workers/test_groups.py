from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.storage.samples import FINGERPRINT, identity
from tierkv.core.instructions import OpenNamespace
from tierkv.errors import StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.namespace import IDENTITY_FILE
from tierkv.workers.groups import Groups

IDENTITY = identity()
GROUP = IDENTITY.group_key()
OPENED = OpenNamespace(group=GROUP, identity=IDENTITY, model_name="small")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[DataDirectory]:
    with DataDirectory.open(tmp_path / "data") as opened:
        yield opened


def words(directory: DataDirectory) -> Path:
    return directory.path / "models" / FINGERPRINT / GROUP.hex() / IDENTITY_FILE


def test_a_group_that_was_opened_is_put_on_disk_by_the_first_who_needs_it(directory: DataDirectory) -> None:
    groups = Groups(directory)
    groups.open(OPENED)
    assert groups.look_up(FINGERPRINT, GROUP) == IDENTITY
    assert not words(directory).exists()
    assert groups.make(FINGERPRINT, GROUP) == IDENTITY
    assert words(directory).exists()
    words(directory).unlink()
    assert groups.make(FINGERPRINT, GROUP) == IDENTITY  # looked at once


def test_a_group_on_disk_is_known_without_being_opened(directory: DataDirectory) -> None:
    before = Groups(directory)
    before.open(OPENED)
    before.make(FINGERPRINT, GROUP)
    assert Groups(directory).make(FINGERPRINT, GROUP) == IDENTITY
    assert Groups(directory).look_up(FINGERPRINT, GROUP) == IDENTITY


def test_a_group_that_is_nowhere_is_none(directory: DataDirectory) -> None:
    groups = Groups(directory)
    assert groups.make(FINGERPRINT, GROUP) is None
    assert groups.look_up(FINGERPRINT, GROUP) is None


def test_a_group_is_not_that_of_another_model(directory: DataDirectory) -> None:
    groups = Groups(directory)
    groups.open(OPENED)
    other = "cd" * 32
    assert groups.look_up(other, GROUP) is None
    assert groups.make(other, GROUP) is None
    groups.make(FINGERPRINT, GROUP)
    assert groups.make(other, GROUP) is None


def test_words_that_were_spoiled_are_written_again(directory: DataDirectory) -> None:
    first = Groups(directory)
    first.open(OPENED)
    first.make(FINGERPRINT, GROUP)
    words(directory).write_bytes(b"{}")
    second = Groups(directory)
    second.open(OPENED)
    assert second.make(FINGERPRINT, GROUP) == IDENTITY
    assert msgspec.json.decode(words(directory).read_bytes())["group"] == GROUP.hex()


def test_a_group_that_cannot_be_made_is_tried_again(directory: DataDirectory) -> None:
    groups = Groups(directory)
    groups.open(OPENED)
    blocking = directory.path / "models" / FINGERPRINT
    blocking.write_text("in the way")
    with pytest.raises(StorageError):
        groups.make(FINGERPRINT, GROUP)
    blocking.unlink()
    assert groups.make(FINGERPRINT, GROUP) == IDENTITY
