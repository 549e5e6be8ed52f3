"""What the identities of all engines are made with: a digest over settings, an epoch, and remembered digests.

A digest over settings is made of all that isn't known not to matter: an unknown setting counts as mattering. It costs a
hit where two settings are in truth the same, and never a wrong block.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from tierkv.client.endpoint import DATA_DIR_VARIABLE
from tierkv.errors import DataDirectoryError, IdentityError
from tierkv.storage.digests import DigestMemory
from tierkv.storage.directory import DataDirectory

log = logging.getLogger(__name__)

HF_DOES_NOT_MATTER = frozenset(
    {
        # names and bookkeeping of whoever saved the files
        "_name_or_path",
        "_model_name_or_path",
        "name_or_path",
        "transformers_version",
        # what a forward pass hands back beside the KV
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
        # training only
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
"""Settings in a Hugging Face configuration that no KV depends on."""


def random_epoch() -> str:
    """An epoch for weights without files: no other process, and no later run, makes the same identity."""
    return secrets.token_hex(16)


def digest_settings(settings: Mapping[str, Any], does_not_matter: Set[str]) -> str:
    """64 hex digits over every setting whose name isn't in `does_not_matter`. IdentityError for a value of a kind of
    which no two can be told apart."""
    return blake3(_canonical({name: settings[name] for name in settings if name not in does_not_matter})).hexdigest()


def element_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def digest_memory(data_dir: str | os.PathLike[str] | None) -> Iterator[DigestMemory | None]:
    """Digests of unchanged files, remembered in a node's data directory (else that of TIERKV_DATA_DIR). None where
    there is no data directory to remember anything in; then all is hashed."""
    chosen = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if not chosen:
        yield None
        return
    try:
        directory = DataDirectory.open(Path(chosen), create=False, writable=False)
    except DataDirectoryError as error:
        log.info("digests of weight files are not remembered: %s", error)
        yield None
        return
    with directory:
        yield DigestMemory(directory)


def _canonical(value: Any) -> bytes:
    return json.dumps(_tagged(value, "config"), separators=(",", ":"), ensure_ascii=True).encode()


def _tagged(value: Any, where: str) -> list[Any]:
    """A form in which no two values look alike: 1, 1.0, True and "1" differ, and so do None and a missing key."""
    if isinstance(value, enum.Enum):  # before the numbers and texts that some enums are
        return ["enum", type(value).__qualname__, value.name]
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [
            [field.name, _tagged(getattr(value, field.name), f"{where}.{field.name}")] for field in _fields(value)
        ]
        return ["record", type(value).__qualname__, *fields]
    raise IdentityError(f"{where} holds a {type(value).__name__}, of which no digest can be made")


def _fields(value: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(value)
