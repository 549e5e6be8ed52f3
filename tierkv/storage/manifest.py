"""Fingerprints: what model, what adapter, told by the content of the files and nothing else.

    model     BLAKE3( "tierkv weights 1" | for each weight file, by name: u32 length, name | u64 size | its BLAKE3 )
    adapter   BLAKE3( "tierkv adapter 1" | u64 length, settings that matter (JSON, sorted keys) | files as above )

Little-endian. Paths, owners and times are not in it; names below the folder are. Files are looked at before and after:
what changes meanwhile has no fingerprint.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from tierkv.core.instructions import ManifestEntry
from tierkv.errors import IdentityError, WeightsChanged, WeightsUnreadable
from tierkv.storage.digests import DigestMemory
from tierkv.storage.weight_files import (
    ADAPTER_SETTINGS,
    NamedStat,
    Progress,
    StatSignature,
    find_weight_files,
    hash_file,
    locate,
    stat_file,
    stat_signature,
)

__all__ = ["fingerprint_model", "fingerprint_adapter", "WeightManifest", "stat_signature", "StatSignature", "Progress"]

_MODEL, _ADAPTER = b"tierkv weights 1", b"tierkv adapter 1"
MAX_SETTINGS_BYTES = 2**20

# Settings of an adapter that are known not to change what it computes; whatever is not here counts as mattering.
IGNORED_SETTINGS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "task_type",
    }
)


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """`fingerprint` (hex) of the files in `entries`; `signature` is their stat after hashing, to be compared with the
    one an engine took before loading. `hashed_bytes` were read for it, the rest was remembered."""

    fingerprint: str
    entries: tuple[ManifestEntry, ...]
    signature: StatSignature
    hashed_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.entries)


def fingerprint_model(
    path: str | Path,
    memory: DigestMemory | None = None,
    progress: Progress | None = None,
    *,
    loaded: StatSignature | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
) -> WeightManifest:
    """The manifest of a model's folder, or of a single weight file.

    `loaded` is what `stat_signature` said before an engine loaded the files: if it is given, the files must be the
    same still. Raises IdentityError (nothing there), WeightsUnreadable and WeightsChanged, which name the file.
    """
    return _fingerprint(Path(path), _MODEL, memory, progress, loaded, clock_ns)


def fingerprint_adapter(
    path: str | Path,
    memory: DigestMemory | None = None,
    progress: Progress | None = None,
    *,
    loaded: StatSignature | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
) -> WeightManifest:
    """The manifest of an adapter's folder: its weight files, and its settings (rank, scaling, which modules)."""
    root = Path(path)
    settings = _settings(root)
    start = _ADAPTER + struct.pack("<Q", len(settings)) + settings
    manifest = _fingerprint(root, start, memory, progress, loaded, clock_ns)
    if _settings(root) != settings:
        raise WeightsChanged(f"{root / ADAPTER_SETTINGS} changed while the adapter was read")
    return manifest


def _fingerprint(
    root: Path,
    start: bytes,
    memory: DigestMemory | None,
    progress: Progress | None,
    loaded: StatSignature | None,
    clock_ns: Callable[[], int],
) -> WeightManifest:
    before = stat_signature(root)
    if loaded is not None:
        _refuse_difference(root, loaded, before)
    weights = set(find_weight_files(root))
    files = [named for named in before if named.name in weights]
    reading = _Reading(memory, progress, sum(named.stat.size for named in files), clock_ns)
    entries = tuple(
        ManifestEntry(named.name, named.stat.size, reading.digest(locate(root, named.name), named).hex())
        for named in files
    )
    after = stat_signature(root)
    _refuse_difference(root, before, after)
    return WeightManifest(_digest(start, entries), entries, after, reading.hashed_bytes)


class _Reading:
    """Digests file after file, from memory where it can, and tells how far it is."""

    def __init__(
        self, memory: DigestMemory | None, progress: Progress | None, total_bytes: int, clock_ns: Callable[[], int]
    ) -> None:
        self._memory = memory
        self._progress = progress
        self._total_bytes = total_bytes
        self._clock_ns = clock_ns
        self._done_bytes = 0
        self.hashed_bytes = 0

    def digest(self, path: Path, named: NamedStat) -> bytes:
        known = self._memory.recall(named.stat) if self._memory is not None else None
        if known is not None:
            self._advance(named.stat.size, named.name)
            return known
        started_ns = self._clock_ns()
        digest = hash_file(path, named.stat, lambda count: self._advance(count, named.name))
        self.hashed_bytes += named.stat.size
        if self._memory is not None:
            self._memory.remember(named.stat, digest, started_ns=started_ns)
        return digest

    def _advance(self, num_bytes: int, name: str) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes, name)


def _refuse_difference(root: Path, before: StatSignature, after: StatSignature) -> None:
    if before == after:
        return
    differing = {named.name for named in set(before) ^ set(after)}
    raise WeightsChanged(f"{root}: {', '.join(sorted(differing))} changed between two looks at it")


def _digest(start: bytes, entries: tuple[ManifestEntry, ...]) -> str:
    digest = blake3(start)
    for entry in entries:
        name = entry.name.encode()
        digest.update(struct.pack("<I", len(name)) + name + struct.pack("<Q", entry.size) + bytes.fromhex(entry.digest))
    return digest.hexdigest()


def _settings(root: Path) -> bytes:
    """The adapter's settings that matter, in one form whatever order they are written in."""
    path = root / ADAPTER_SETTINGS
    if not os.path.lexists(path):
        raise IdentityError(f"{path} does not exist; without it the scaling of the adapter is not known")
    stat_file(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SETTINGS_BYTES + 1)
        found = msgspec.json.decode(raw, type=dict[str, Any])
    except OSError as error:
        raise WeightsUnreadable(f"{path} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IdentityError(f"{path} is not a JSON object: {error}") from error
    mattering = {name: value for name, value in found.items() if name not in IGNORED_SETTINGS}
    return json.dumps(mattering, sort_keys=True, separators=(",", ":")).encode()
