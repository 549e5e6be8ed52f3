"""Verdicts of evals: `verdicts/<weights>-<adapter or none>-<codec>.json`, whole or absent.

A verdict says of which weights, which adapter and which codec it is, by their digests, and what was measured on which
prompts. `digest` is BLAKE3 over all of the rest: one that was edited is void, and so is one under another's name.
Whether it lets the codec be used is decided when it is read, by the limits in force then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from tierkv.core.codec_gate import MAX_PROBLEM, JudgedModel
from tierkv.core.eval_results import Measured, Thresholds, why_failed
from tierkv.errors import ForeignFile, StorageError
from tierkv.storage.directory import DataDirectory
from tierkv.storage.extent_header import open_regular
from tierkv.storage.names import VERDICTS
from tierkv.storage.system_calls import call
from tierkv.storage.temp_file import write_small_file

FORMAT = 1
MAX_VERDICT_BYTES = 2**20
VERDICT_ROOM = 2**16  # more than one with every length and depth takes
NO_ADAPTER = "none"

_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64}|none)-([a-z0-9_]{1,32})\.json")
_PROBE = "probe"
_MAGIC = b"tierkv verdict 1"


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`weights` and `adapter` (empty for none) are fingerprints, `prompts` the digest of the prompts' tokens. `limits`
    were in force when it was made, `made` is when (seconds since 1970). `versions` of what ran the model."""

    weights: str
    codec: str
    model_name: str
    made: float
    prompts: str
    block_tokens: int
    long_context: bool
    limits: Thresholds
    measured: Measured
    adapter: str = ""
    versions: dict[str, str] = {}
    format: int = FORMAT
    digest: str = ""

    @property
    def file(self) -> str:
        return f"{self.weights}-{self.adapter or NO_ADAPTER}-{self.codec}.json"

    def sealed(self) -> Verdict:
        return msgspec.structs.replace(self, digest=self.compute_digest())

    def compute_digest(self) -> str:
        fields = msgspec.to_builtins(msgspec.structs.replace(self, digest=""))
        return blake3(_MAGIC + json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Void:
    """A file under the name of a verdict that is none. `problem` names it and says what to do."""

    weights: str
    adapter: str
    codec: str
    problem: str


def write_verdict(directory: DataDirectory, verdict: Verdict) -> None:
    """In the place of what was there for the same weights, adapter and codec. Durable when it returns. Raises
    StorageError."""
    sealed = verdict.sealed()
    write_small_file(directory, (VERDICTS,), sealed.file, msgspec.json.format(msgspec.json.encode(sealed)) + b"\n")


def require_room(directory: DataDirectory) -> None:
    """Prove that a verdict could be written now, by a file of the room that one takes, under a name that is none, which
    goes at once. Raises StorageError."""
    write_small_file(directory, (VERDICTS,), _PROBE, bytes(VERDICT_ROOM))
    with directory.folder((VERDICTS,)) as folder_fd, contextlib.suppress(FileNotFoundError):
        os.unlink(_PROBE, dir_fd=folder_fd)  # another eval may have had the same


def read_verdicts(directory: DataDirectory) -> list[Verdict | Void]:
    """By name. What has not a name of ours is left alone. Raises StorageError when the folder can't be read."""
    try:
        with directory.folder((VERDICTS,)) as folder_fd:
            names = sorted(filter(_NAME.fullmatch, call("listdir", os.listdir, folder_fd)))
            return [_read(directory, folder_fd, name) for name in names]
    except StorageError as error:
        if error.errno_name != "ENOENT":
            raise
        return []  # made by an earlier release


def judge(found: Verdict | Void, limits: Thresholds) -> JudgedModel:
    """By the limits in force, whatever they were when the eval was run."""
    problem = found.problem if isinstance(found, Void) else why_failed(found.measured, limits)
    return JudgedModel(found.weights, found.adapter, found.codec, problem[:MAX_PROBLEM])


def _read(directory: DataDirectory, folder_fd: int, name: str) -> Verdict | Void:
    weights, adapter, codec = re.split("-", name.removesuffix(".json"))
    adapter = "" if adapter == NO_ADAPTER else adapter

    def void(problem: str) -> Void:
        path = directory.path / VERDICTS / name
        return Void(weights, adapter, codec, f"{path} is void: {problem}")

    try:
        with open_regular(folder_fd, name) as (fd, _):
            content = call("read", os.read, fd, MAX_VERDICT_BYTES + 1)
        verdict = msgspec.json.decode(content, type=Verdict)
    except StorageError as error:
        return void(f"it can't be read: {error}")
    except ForeignFile as error:
        return void(str(error))
    except (msgspec.DecodeError, RecursionError) as error:
        return void(f"it is no verdict of this release ({error})")
    if verdict.format != FORMAT:
        return void(f"it is of format {verdict.format}, and this release reads {FORMAT}")
    if verdict.digest != verdict.compute_digest():
        return void("it was changed after it was written")
    if verdict.file != name:
        return void(f"it is the verdict {verdict.file}")
    return verdict
