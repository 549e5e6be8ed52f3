"""The identity of a loaded transformers model: what makes its KV bytes what they are.

    weights   fingerprint of the weight files, made by reading them (tierkv.storage.manifest)
    config    digest of the model's settings, less those listed in DOES_NOT_MATTER, and of what the running process
              adds to them: attention implementation, element types of the parameters, precision of fp32 products,
              the class, and for classes from outside of the library the source they were made from
    layout    element type, bytes, axes and tokens of a block, and the engine: library release (major.minor),
              attention implementation and device type

Not in it, on purpose: the number of threads, the release of torch and the processor's instruction set. They decide how
sums are rounded, not what is summed; two machines of one fleet would otherwise never share a block. The library's
release is in it because it decides what is computed.
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from blake3 import blake3

from tierkv.core.identity import Identity, Layout
from tierkv.errors import IdentityError
from tierkv.integrations.kv_blocks import AXES, BlockShape

LAYOUT_VERSION = "v1"

DOES_NOT_MATTER = frozenset(
    {
        # names and bookkeeping of whoever saved the files
        "_name_or_path",
        "_model_name_or_path",
        "name_or_path",
        "transformers_version",  # of the release that saved the file; the running one is in the layout
        "architectures",  # the class that runs is in the digest instead
        # what the forward pass hands back beside the KV
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_return_dict",
        # heads and losses behind the last layer
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "classifier_dropout",
        "router_aux_loss_coef",
        # when generation begins and ends (pad_token_id stays in: some models derive positions from it)
        "bos_token_id",
        "eos_token_id",
        "unk_token_id",
        # training only: a model in training mode is refused
        "initializer_range",
        "initializer_factor",
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout",
        "layerdrop",
        "gradient_checkpointing",
    }
)


def identity_of(
    model: Any,
    shape: BlockShape,
    *,
    weights: str,
    adapter: str = "",
    salt: str = "",
    epoch: str = "",
) -> Identity:
    """The identity under which KV of `model`, in blocks of `shape`, is stored.

    `weights` and `adapter` are fingerprints of file contents; `epoch` is for a model whose weights no file holds (see
    `random_epoch`). IdentityError when a setting can't be told apart from another.
    """
    return Identity(
        weights=weights,
        config=config_digest(settings_of(model)),
        layout=Layout(
            dtype=_element_type(shape.dtype),
            block_bytes=(shape.block_bytes,),
            axes=AXES,
            block_tokens=shape.block_tokens,
            engine=engine_name(model),
        ),
        adapter=adapter,
        salt=salt,
        epoch=epoch,
    )


def random_epoch() -> str:
    """An epoch for weights without files: no other process, and no later run, makes the same identity."""
    return secrets.token_hex(16)


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
    settings["running element types"] = sorted({_element_type(tensor.dtype) for tensor in model.parameters()})
    settings["running fp32 products"] = torch.get_float32_matmul_precision()
    settings["running foreign code"] = _foreign_code(model)
    return settings


def config_digest(settings: dict[str, Any]) -> str:
    """64 hex digits over every setting that isn't known not to matter. An unknown one counts as mattering."""
    return blake3(_canonical({name: settings[name] for name in settings if name not in DOES_NOT_MATTER})).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(_tagged(value, "config"), separators=(",", ":"), ensure_ascii=True).encode()


def _tagged(value: Any, where: str) -> list[Any]:
    """A form in which no two values look alike: 1, 1.0, True and "1" differ, and so do None and a missing key."""
    match value:
        case None:
            return ["none"]
        case bool():
            return ["bool", int(value)]
        case int():
            return ["int", str(value)]
        case float():
            return ["float", repr(value)]
        case str():
            return ["text", value]
        case list() | tuple():
            return ["list", *(_tagged(item, f"{where}[{index}]") for index, item in enumerate(value))]
        case set() | frozenset():
            return ["set", *sorted(_tagged(item, where) for item in value)]
        case dict():
            pairs = [[_tagged(key, where), _tagged(item, f"{where}.{key}")] for key, item in value.items()]
            return ["map", *sorted(pairs, key=lambda pair: json.dumps(pair[0]))]
        case torch.dtype():
            return ["dtype", str(value)]
        case _:
            raise IdentityError(f"{where} holds a {type(value).__name__}, of which no digest can be made")


def _element_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
