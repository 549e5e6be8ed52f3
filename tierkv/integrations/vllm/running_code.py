"""Which code computes the KV, where it isn't vLLM's own of a known release.

A class from a plugin, or code shipped with the weights, may change without any setting changing. Its source could be
anywhere, so such an engine has no identity that another process could make.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blake3 import blake3

from tierkv.errors import IdentityError, WeightsUnreadable

TRANSFORMERS_BACKEND = "Transformers"


def code_settings(vllm_config: Any) -> dict[str, Any]:
    """What of the running code isn't told by vLLM's release. IdentityError when that can't be said."""
    model = vllm_config.model_config
    architecture = str(model.architecture)
    module = _module_of(model.registry, architecture)
    if not module.startswith("vllm."):
        raise IdentityError(f"the class of {architecture} comes from {module}: code from outside has no release")
    if not architecture.startswith(TRANSFORMERS_BACKEND):
        return {}
    shipped = getattr(model.hf_config, "auto_map", None) or {}
    if any(name.startswith("AutoModel") for name in shipped):
        raise IdentityError("the model runs code that is shipped with its weights")
    import transformers  # noqa: PLC0415 - heavy, and only there in an engine

    return {"transformers": ".".join(transformers.__version__.split(".")[:2])}


def quantization_files(vllm_config: Any, root: Path) -> tuple[str, ...]:
    """Names of the files beside the weights from which vLLM reads how they are quantized."""
    method = vllm_config.model_config.quantization
    if method is None or not root.is_dir():
        return ()
    from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: PLC0415

    if getattr(vllm_config.model_config.hf_config, "quantization_config_file", None) is not None:
        raise IdentityError("the quantization is described by a file elsewhere (quantization_config_file)")
    kind = get_quantization_config(method)
    if not kind.__module__.startswith("vllm."):
        raise IdentityError(f"quantization {method!r} comes from {kind.__module__}, from outside of vLLM")
    return tuple(sorted(name for name in kind.get_config_filenames() if (root / name).is_file()))


def file_digests(root: Path, names: tuple[str, ...]) -> dict[str, str]:
    """BLAKE3 of small files. WeightsUnreadable."""
    try:
        return {name: blake3((root / name).read_bytes()).hexdigest() for name in names}
    except OSError as error:
        raise WeightsUnreadable(f"{error.filename} can't be read: {error.strerror}") from error


def _module_of(registry: Any, architecture: str) -> str:
    registered = registry.models.get(architecture)
    if registered is None:
        raise IdentityError(f"vLLM's registry does not know {architecture}")
    lazy = getattr(registered, "module_name", None)
    return str(lazy if lazy is not None else registered.model_cls.__module__)
