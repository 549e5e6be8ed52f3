"""What a model's and a group's folder say about themselves in plain words.

    models/<fingerprint>/model.json              name and weight files, for people
    models/<fingerprint>/<group>/identity.json   the identity, from which a node knows its groups at start

An identity.json is believed only if the identity in it has the group's digest. Losing one loses no data: the next
engine that opens the group writes it again.
"""

from __future__ import annotations

import os

import msgspec

from tierkv.core.identity import Identity
from tierkv.core.instructions import ManifestEntry, OpenNamespace
from tierkv.errors import ForeignFile, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import open_regular
from tierkv.storage.names import Parts, group_parts, model_parts
from tierkv.storage.system_calls import call
from tierkv.storage.temp_file import write_small_file

MODEL_FILE, IDENTITY_FILE = "model.json", "identity.json"
MAX_FILE_BYTES = 4 * 2**20


class WeightFile(msgspec.Struct, frozen=True):
    name: str
    size: int
    digest: str


class ModelFile(msgspec.Struct, frozen=True):
    """Content of model.json."""

    fingerprint: str
    model_name: str = ""
    files: tuple[WeightFile, ...] = ()


class IdentityFile(msgspec.Struct, frozen=True):
    """Content of identity.json."""

    group: str
    identity: Identity
    model_name: str = ""


def write_namespace(directory: DataDirectory, opened: OpenNamespace) -> None:
    """Make a group's folder and the two files, unless they are there and right. Durable when it returns.
    Raises StorageError."""
    fingerprint, group = opened.identity.weights, opened.group
    if read_model(directory, fingerprint) is None:
        files = tuple(WeightFile(entry.name, entry.size, entry.digest) for entry in opened.manifest)
        _write(directory, model_parts(fingerprint), MODEL_FILE, ModelFile(fingerprint, opened.model_name, files))
    if read_identity(directory, fingerprint, group) is None:
        content = IdentityFile(group.hex(), opened.identity, opened.model_name)
        _write(directory, group_parts(fingerprint, group), IDENTITY_FILE, content)


def read_opened(directory: DataDirectory, fingerprint: str, group: bytes) -> OpenNamespace | None:
    """What the group's files were made by; None where there is no identity.json of it. Raises StorageError."""
    found, model = read_identity(directory, fingerprint, group), read_model(directory, fingerprint)
    if found is None:
        return None
    manifest = () if model is None else tuple(ManifestEntry(file.name, file.size, file.digest) for file in model.files)
    return OpenNamespace(group, found.identity, found.model_name, manifest)


def read_identity(directory: DataDirectory, fingerprint: str, group: bytes) -> IdentityFile | None:
    """identity.json of a group; None where it is absent, damaged or another group's."""
    raw = _read(directory, group_parts(fingerprint, group), IDENTITY_FILE)
    try:
        found = None if raw is None else msgspec.json.decode(raw, type=IdentityFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if found is None or found.identity.weights != fingerprint or found.identity.group_key() != group:
        return None
    return found


def read_model(directory: DataDirectory, fingerprint: str) -> ModelFile | None:
    """model.json of a model; None where it is absent, damaged or another model's. For people only."""
    raw = _read(directory, model_parts(fingerprint), MODEL_FILE)
    try:
        found = None if raw is None else msgspec.json.decode(raw, type=ModelFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if found is not None and found.fingerprint == fingerprint else None


def _read(directory: DataDirectory, folder: Parts, file: str) -> bytes | None:
    try:
        with directory.folder(folder) as folder_fd, open_regular(folder_fd, file) as (fd, found):
            return call("read", os.read, fd, found.st_size) if found.st_size <= MAX_FILE_BYTES else None
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return None
    except ForeignFile:
        return None


def _write(directory: DataDirectory, folder: Parts, file: str, content: msgspec.Struct) -> None:
    write_small_file(directory, folder, file, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
