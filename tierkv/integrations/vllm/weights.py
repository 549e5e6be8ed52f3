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
from tierkv.integrations.vllm.running_code import code_settings, file_digests, quantization_files
from tierkv.integrations.vllm.settings import config_digest, settings_of
from tierkv.storage.manifest import Progress, fingerprint_model

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

    `started_ns` is when this process started (wall clock). `known` is called in that thread before `result` is there.
    `close` ends the reading and joins the thread.
    """

    def __init__(
        self,
        vllm_config: Any,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        started_ns: int | None = None,
        known: Callable[[Weights], None] = lambda weights: None,
    ) -> None:
        self._known = known
        self._vllm_config = vllm_config
        self._data_dir = data_dir
        self._started_ns = process_started_ns() if started_ns is None else started_ns
        self._closing = threading.Event()
        self._result: Weights | None = None
        self._thread = threading.Thread(target=self._run, name="tierkv-fingerprint", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> Weights | None:
        self._thread.join(timeout_seconds)
        return self._result

    def close(self) -> None:
        self._closing.set()
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
        weights = find_weights(
            self._vllm_config, data_dir=self._data_dir, started_ns=self._started_ns, progress=self._stop_if_closing
        )
        if weights.problem and not self._closing.is_set():
            log.warning(
                "%s; this engine's cache is kept in memory only, and not shared with other processes", weights.problem
            )
        elif not weights.problem:
            log.info(
                "tierkv: weights of %s are read (%s...): the cache is in use", weights.name, weights.fingerprint[:12]
            )
        self._known(weights)
        self._result = weights

    def _stop_if_closing(self, done_bytes: int, total_bytes: int, name: str) -> None:
        if self._closing.is_set():
            raise IdentityError(f"the engine ended while {name} was read")


def find_weights(
    vllm_config: Any,
    *,
    data_dir: str | os.PathLike[str] | None,
    started_ns: int,
    progress: Progress | None = None,
) -> Weights:
    """The weights of an engine whose process started at `started_ns`, by reading its files."""
    name = str(vllm_config.model_config.model).rstrip("/").rpartition("/")[2]
    try:
        settings = _settings_beside(vllm_config)
        model = locate_model(vllm_config)
        side_files = quantization_files(vllm_config, model.root)
        with digest_memory(data_dir) as memory:
            manifest = fingerprint_model(model.root, memory, progress)
        settings |= file_digests(model.root, side_files)
        _check_unchanged(model, (*(named.name for named in manifest.signature), *side_files), started_ns)
    except IdentityError as error:
        return Weights(name=name, epoch=random_epoch(), problem=str(error))
    return Weights(
        name=name,
        fingerprint=manifest.fingerprint,
        settings=config_digest(settings) if settings else "",
        manifest=manifest.entries,
    )


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """`root` is a folder, or one weight file; `choices` are files that say which folder it is (a hub's reference to its
    newest revision)."""

    root: Path
    choices: tuple[Path, ...] = ()


def locate_model(vllm_config: Any) -> ModelPlace:
    """Where the weights were loaded from. IdentityError when that is no place on this machine."""
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in LOADED_FROM_FILES:
        raise IdentityError(f"load format {load_format!r}: the weights were not read from files of a folder")
    if vllm_config.model_config.model_weights:
        raise IdentityError("the weights were not read from files: the model lies in an object store")
    path = Path(str(vllm_config.model_config.model))
    return ModelPlace(path) if path.exists() else _locate_snapshot(vllm_config)


def _settings_beside(vllm_config: Any) -> dict[str, Any]:
    """Settings that are not in vLLM's configuration. IdentityError for an engine of which no identity can be made that
    holds while it runs."""
    config_digest(settings_of(vllm_config))
    if vllm_config.weight_transfer_config is not None:
        raise IdentityError("the weights may be replaced while the engine runs (weight_transfer_config)")
    extension = vllm_config.parallel_config.worker_extension_cls
    if extension:
        raise IdentityError(f"workers are extended by {extension}, which may change the weights (worker_extension_cls)")
    return code_settings(vllm_config)


def _locate_snapshot(vllm_config: Any) -> ModelPlace:
    """Of a model that is named as a hub names it, the folder in the local cache that vLLM loads from."""
    import huggingface_hub  # noqa: PLC0415 - heavy, and only there in an engine

    name, revision = str(vllm_config.model_config.model), vllm_config.model_config.revision or "main"
    cache = vllm_config.load_config.download_dir or huggingface_hub.constants.HF_HUB_CACHE
    try:
        snapshot = huggingface_hub.snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    except (OSError, ValueError) as error:  # what the library raises for what it doesn't have, or is no name
        raise IdentityError(f"{name!r} is neither a folder here nor a model in {cache}") from error
    reference = Path(cache) / f"models--{name.replace('/', '--')}" / "refs" / revision
    return ModelPlace(Path(snapshot), (reference,) if reference.exists() else ())


def _check_unchanged(model: ModelPlace, names: tuple[str, ...], started_ns: int) -> None:
    changed = find_change(model.root, names if model.root.is_dir() else (), before_ns=started_ns)
    for choice in model.choices:
        changed = changed or find_change(choice, (), before_ns=started_ns)
    if changed is not None:
        raise WeightsChanged(
            f"{changed}, after or just before this engine started, so that nobody knows whether the files are those "
            "that it loaded: restart the engine"
        )
