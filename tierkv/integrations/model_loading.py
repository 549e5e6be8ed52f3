"""Load a model and know what was loaded: stat, load, hash, and the same stat again.

Whoever changes a weight file between loading and hashing would make the cache say that old KV belongs to new weights.
So the stat from before loading must be the one after hashing; otherwise the model is served under an identity that
no other process and no later run can make, and nothing of it is written to disk.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from tierkv.core.instructions import ManifestEntry
from tierkv.errors import ConfigError, IdentityError
from tierkv.integrations.identity_common import digest_memory, random_epoch
from tierkv.storage.manifest import Progress, fingerprint_model, stat_signature

log = logging.getLogger(__name__)

WEIGHTS_FROM_ELSEWHERE = ("state_dict", "subfolder")
CLOCK_NS = time.time_ns


@dataclass(frozen=True, slots=True)
class WeightsMark:
    """Where each parameter lies and how often it was written to: a change in place, or another tensor, shows."""

    parameters: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, model: Any) -> WeightsMark:
        return cls(tuple((tensor.data_ptr(), _count_writes(tensor)) for tensor in model.parameters()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model and the fingerprint of the files it came from. Without one (`problem` says why) `epoch` is random.

    Make it by hand for a model that was loaded in another way, and only if `weights` is the fingerprint of what is in
    its memory. `mark` shows later whether that still holds.
    """

    model: Any
    weights: str
    manifest: tuple[ManifestEntry, ...] = ()
    name: str = ""
    epoch: str = ""
    problem: str = ""
    mark: WeightsMark = field(init=False)

    def __post_init__(self) -> None:
        if not self.weights and not self.epoch:
            raise ConfigError("weights", "empty; without a fingerprint an epoch is needed (random_epoch)")
        object.__setattr__(self, "mark", WeightsMark.of(self.model))


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    data_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> LoadedModel:
    """The causal language model in the folder `path`, in evaluation mode, with its fingerprint.

    `settings` go to the library's `from_pretrained`. Reading the weights once more takes about a second for each few
    gigabytes; with `data_dir` (else TIERKV_DATA_DIR), the data directory of the node on this machine, digests of
    unchanged files are remembered there. `progress(bytes done, bytes in all, file)` is told how hashing gets on.
    """
    for name in WEIGHTS_FROM_ELSEWHERE:
        if settings.get(name):
            raise ConfigError(name, "the weights would come from elsewhere than the files that are fingerprinted")
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError("path", f"{folder} is no folder with a model; models are not fetched from a hub")
    try:
        before = stat_signature(folder)
    except IdentityError as error:
        model = _load(folder, dtype, settings)
        return _without_fingerprint(model, folder, error)
    model = _load(folder, dtype, settings)
    try:
        with digest_memory(data_dir) as memory:
            manifest = fingerprint_model(folder, memory, progress, loaded=before, clock_ns=CLOCK_NS)
    except IdentityError as error:
        return _without_fingerprint(model, folder, error)
    return LoadedModel(model=model, weights=manifest.fingerprint, manifest=manifest.entries, name=folder.resolve().name)


def _count_writes(tensor: Any) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)  # inference tensors don't count


def _load(folder: Path, dtype: Any, settings: dict[str, Any]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **settings)
    return model.eval()


def _without_fingerprint(model: Any, folder: Path, error: IdentityError) -> LoadedModel:
    log.warning("%s; the cache of this model is not kept on disk and not shared with other processes", error)
    return LoadedModel(model=model, weights="", name=folder.resolve().name, epoch=random_epoch(), problem=str(error))
