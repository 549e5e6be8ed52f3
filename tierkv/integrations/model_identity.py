"""The identity of a loaded transformers model: what makes its KV bytes what they are.

    weights   fingerprint of the weight files, made by reading them (tierkv.storage.manifest)
    config    digest of the model's settings, less those listed in DOES_NOT_MATTER, and of what the running process
              adds to them: attention implementation, element types of the parameters, precision of fp32 products,
              the class, and for classes from outside of the library the source they were made from
    layout    element type, codec, bytes, axes and tokens of a block, and the engine: library release (major.minor),
              attention implementation and device type

Not in it, on purpose: the number of threads, the release of torch and the processor's instruction set. They decide how
sums are rounded, not what is summed; two machines of one fleet would otherwise never share a block. The library's
release is in it because it decides what is computed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from blake3 import blake3

from tierkv.core.codec import BlockCodec, coded_layout
from tierkv.core.identity import Identity, Layout
from tierkv.errors import IdentityError
from tierkv.integrations.identity_common import HF_DOES_NOT_MATTER, digest_settings, element_type
from tierkv.integrations.kv_blocks import AXES, BlockShape

LAYOUT_VERSION = "v1"

DOES_NOT_MATTER = HF_DOES_NOT_MATTER | {"architectures"}  # the class that runs is in the digest instead


def identity_of(
    model: Any,
    shape: BlockShape,
    *,
    weights: str,
    adapter: str = "",
    salt: str = "",
    epoch: str = "",
    codec: BlockCodec | None = None,
) -> Identity:
    """The identity under which KV of `model`, in blocks of `shape`, is stored; coded, where there is a `codec`.

    `weights` and `adapter` are fingerprints of file contents; `epoch` is for a model whose weights no file holds (see
    `random_epoch`). IdentityError when a setting can't be told apart from another.
    """
    layout = Layout(
        dtype=element_type(shape.dtype),
        block_bytes=(shape.block_bytes,),
        axes=AXES,
        block_tokens=shape.block_tokens,
        engine=engine_name(model),
    )
    return Identity(
        weights=weights,
        config=config_digest(settings_of(model)),
        layout=layout if codec is None else coded_layout(layout, codec),
        adapter=adapter,
        salt=salt,
        epoch=epoch,
    )


def engine_name(model: Any) -> str:
    release = ".".join(transformers.__version__.split(".")[:2])
    return f"transformers-{release}/{attention_implementation(model)}/{model.device.type}/{LAYOUT_VERSION}"


def attention_implementation(model: Any) -> str:
    return str(getattr(model.config, "_attn_implementation", None) or "default")


def settings_of(model: Any) -> dict[str, Any]:
    """All that config_digest is to judge: the model's own settings, and under "running ..." what the process adds."""
    settings = dict(model.config.to_dict())
    settings["running attention"] = attention_implementation(model)
    settings["running class"] = type(model).__qualname__
    settings["running element types"] = sorted({element_type(tensor.dtype) for tensor in model.parameters()})
    settings["running fp32 products"] = torch.get_float32_matmul_precision()
    settings["running foreign code"] = _foreign_code(model)
    return settings


def config_digest(settings: dict[str, Any]) -> str:
    """64 hex digits over every setting that isn't known not to matter. An unknown one counts as mattering."""
    return digest_settings(settings, DOES_NOT_MATTER)


def _foreign_code(model: Any) -> list[list[str]]:
    """Module and digest of the source of each class in the model that comes with neither library: code that was shipped
    with the weights, or the user's own, may change without any setting changing."""
    known = sys.stdlib_module_names | {"torch", "transformers"}
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    foreign = sorted(name for name in names if name.split(".")[0] not in known)
    return [[name.split(".")[-1], _source_digest(name)] for name in foreign]


def _source_digest(module_name: str) -> str:
    path = getattr(sys.modules.get(module_name), "__file__", None)
    if path is None:
        raise IdentityError(f"the model uses code of {module_name}, whose source can't be found")
    try:
        return blake3(Path(path).read_bytes()).hexdigest()
    except OSError as problem:
        raise IdentityError(f"the model uses code of {module_name}, whose source can't be read: {problem}") from problem
