"""The fingerprint of the files that this engine loaded its weights from, made while it already serves.

A connector is made after the weights were loaded, so nobody looked at the files before. What proves that they are the
ones that were loaded is that nothing of them changed since this process started (`file_proof`), nor while they were
read. Without that proof the engine keeps its cache to itself: a random epoch, nothing for another process or a later
run.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.core.instructions import ManifestEntry
from tierkv.errors import IdentityError, WeightsChanged
from tierkv.integrations.file_proof import find_change, process_started_ns
from tierkv.integrations.identity_common import digest_memory, random_epoch
from tierkv.storage.manifest import WeightManifest, fingerprint_model
from tierkv.storage.weight_files import stat_signature

LOADED_FROM_FILES = frozenset({"auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes"})
"""Load formats that read the weight files of the model's folder, and nothing else."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What is known of an engine's weights. Either a `fingerprint` (64 hex digits), or a random `epoch` and the
    `problem` that is the reason. `settings` is a digest of settings that lie beside the weights; empty for none."""

    name: str
    fingerprint: str = ""
    settings: str = ""
    manifest: tuple[ManifestEntry, ...] = ()
    epoch: str = ""
    problem: str = ""

    @property
    def is_persistent(self) -> bool:
        return not self.epoch


class ModelFingerprint:
    """Makes `Weights` in a thread of its own. Until it is done `result` is None, and requests bypass the cache.

    `started_ns` is when this process started. `close` joins the thread; hashing can't be interrupted within a file.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        started_ns: int | None = None,
        done: Callable[[Weights], None] | None = None,
    ) -> None:
        self._vllm_config = vllm_config
        self._data_dir = data_dir
        self._started_ns = process_started_ns() if started_ns is None else started_ns
        self._done = done
        self._result: Weights | None = None
        self._thread = threading.Thread(target=self._run, name="tierkv-fingerprint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> Weights | None:
        self._thread.join(timeout_seconds)
        return self._result

    def close(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def result(self) -> Weights | None:
        """None until known."""
        return self._result

    @property
    def problem(self) -> str:
        """Why the cache is kept to this process; empty while that isn't known, and when it is not so."""
        return self._result.problem if self._result is not None else ""

    def _run(self) -> None:
        weights = find_weights(self._vllm_config, data_dir=self._data_dir, started_ns=self._started_ns)
        if weights.problem:
            log.warning(
                "%s; this engine's cache is kept in memory only, and not shared with other processes", weights.problem
            )
        self._result = weights
        if self._done is not None:
            self._done(weights)


def find_weights(vllm_config: Any, *, data_dir: str | os.PathLike[str] | None, started_ns: int) -> Weights:
    """The weights of an engine whose process started at `started_ns`, by reading its files."""
    model = vllm_config.model_config
    name = Path(str(model.model)).name
    try:
        manifest = _fingerprint(vllm_config, data_dir, started_ns)
    except IdentityError as error:
        return Weights(name=name, epoch=random_epoch(), problem=str(error))
    return Weights(name=name, fingerprint=manifest.fingerprint, manifest=manifest.entries)


def _fingerprint(vllm_config: Any, data_dir: str | os.PathLike[str] | None, started_ns: int) -> WeightManifest:
    root = locate_model(vllm_config)
    names = tuple(named.name for named in stat_signature(root)) if root.is_dir() else ()
    with digest_memory(data_dir) as memory:
        manifest = fingerprint_model(root, memory)
    changed = find_change(root, names, before_ns=started_ns)
    if changed is not None:
        raise WeightsChanged(
            f"{changed}, after or just before this engine started, so that nobody knows whether the files are those "
            "that it loaded: restart the engine"
        )
    return manifest


def locate_model(vllm_config: Any) -> Path:
    """The folder or the single file that the weights were loaded from. IdentityError when there is none."""
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in LOADED_FROM_FILES:
        raise IdentityError(f"load format {load_format!r}: the weights were not read from the files of a folder")
    path = Path(str(vllm_config.model_config.model))
    if not path.exists():
        raise IdentityError(f"{path} is no folder on this machine")
    return path
