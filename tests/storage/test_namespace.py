from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.storage.samples import FINGERPRINT, identity
from tierkv.core.instructions import ManifestEntry, OpenNamespace
from tierkv.storage.directory import DataDirectory
from tierkv.storage.namespace import read_identity, read_model, write_namespace

IDENTITY = identity()
GROUP = IDENTITY.group_key()
ENTRY = ManifestEntry("model.safetensors", 123, "cd" * 32)
OPENED = OpenNamespace(GROUP, IDENTITY, "some/model", (ENTRY,))


def model_path(directory: DataDirectory) -> Path:
    return directory.path / "models" / FINGERPRINT / "model.json"


def identity_path(directory: DataDirectory) -> Path:
    return directory.path / "models" / FINGERPRINT / GROUP.hex() / "identity.json"


def test_a_group_is_found_as_it_was_opened(directory: DataDirectory) -> None:
    write_namespace(directory, OPENED)
    found = read_identity(directory, FINGERPRINT, GROUP)
    assert found is not None
    assert (found.identity, found.model_name, found.group) == (IDENTITY, "some/model", GROUP.hex())
    model = read_model(directory, FINGERPRINT)
    assert model is not None
    assert [(file.name, file.size, file.digest) for file in model.files] == [("model.safetensors", 123, "cd" * 32)]


def test_people_can_read_both_files(directory: DataDirectory) -> None:
    write_namespace(directory, OPENED)
    assert json.loads(model_path(directory).read_text())["model_name"] == "some/model"
    assert json.loads(identity_path(directory).read_text())["identity"]["layout"]["dtype"] == "bfloat16"
    assert identity_path(directory).stat().st_mode & 0o777 == 0o600


def test_files_that_are_right_are_not_written_again(directory: DataDirectory) -> None:
    write_namespace(directory, OPENED)
    before = [path(directory).stat().st_ino for path in (model_path, identity_path)]
    write_namespace(directory, OPENED)
    assert [path(directory).stat().st_ino for path in (model_path, identity_path)] == before


def test_what_was_never_written_is_not_found(directory: DataDirectory) -> None:
    assert read_identity(directory, FINGERPRINT, GROUP) is None
    assert read_model(directory, FINGERPRINT) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xff", b"[" * 100_000, b"null", b'{"group": 1}'])
def test_garbage_is_not_believed_and_is_written_over(directory: DataDirectory, content: bytes) -> None:
    write_namespace(directory, OPENED)
    for path in (model_path, identity_path):
        path(directory).write_bytes(content)
    assert read_identity(directory, FINGERPRINT, GROUP) is None
    assert read_model(directory, FINGERPRINT) is None
    write_namespace(directory, OPENED)
    assert read_identity(directory, FINGERPRINT, GROUP) is not None
    assert read_model(directory, FINGERPRINT) is not None


def test_an_identity_of_another_group_is_not_believed(directory: DataDirectory) -> None:
    write_namespace(directory, OPENED)
    text = identity_path(directory).read_text().replace("bfloat16", "float16")
    identity_path(directory).write_text(text)
    assert read_identity(directory, FINGERPRINT, GROUP) is None


def test_a_model_file_of_another_model_is_not_believed(directory: DataDirectory) -> None:
    write_namespace(directory, OPENED)
    model_path(directory).write_text(model_path(directory).read_text().replace(FINGERPRINT, "00" * 32))
    assert read_model(directory, FINGERPRINT) is None


def test_a_link_is_not_followed_and_a_fifo_not_waited_for(directory: DataDirectory, tmp_path: Path) -> None:
    write_namespace(directory, OPENED)
    identity_path(directory).rename(tmp_path / "outside")
    identity_path(directory).symlink_to(tmp_path / "outside")
    assert read_identity(directory, FINGERPRINT, GROUP) is None
    identity_path(directory).unlink()
    os.mkfifo(identity_path(directory))
    assert read_identity(directory, FINGERPRINT, GROUP) is None


def test_a_file_too_large_to_be_one_is_not_read(directory: DataDirectory) -> None:
    write_namespace(directory, OPENED)
    os.truncate(identity_path(directory), 2**40)
    assert read_identity(directory, FINGERPRINT, GROUP) is None
