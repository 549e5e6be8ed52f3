"""The model of an eval, its adapter and its tokens, or a problem in words that an operator can act on."""

from __future__ import annotations

import struct
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from blake3 import blake3
from transformers import AutoTokenizer

import tierkv
from tierkv.config.sizes import human_size
from tierkv.core.codec import BlockCodec, KVShape, codec_of
from tierkv.errors import ConfigError
from tierkv.evaluation.measuring import Haystack
from tierkv.evaluation.messages import EvalPrompt
from tierkv.evaluation.needles import lengths_for, make_facts
from tierkv.integrations.identity_common import digest_memory, element_type
from tierkv.integrations.kv_blocks import BlockShape, shape_of
from tierkv.integrations.model_loading import LoadedModel, load_model
from tierkv.integrations.supported import check_model, probe
from tierkv.node.memory_room import MemoryRoom, memory_room
from tierkv.storage.manifest import fingerprint_adapter
from tierkv.storage.weight_files import stat_signature

WORKING_ROOM = 0.2
"""Of the weights' size, beside them: what a pass through the model needs."""

CONFIG = "config.json"

COPIES_OF_KV = 4
"""The longest prompt is there raw and coded, stored and in a cache."""


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """`adapter` is the fingerprint of its files, empty for none."""

    loaded: LoadedModel
    adapter: str
    shape: BlockShape

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def context_tokens(self) -> int | None:
        """The longest prompt that the model is made for; None where it does not say."""
        length = getattr(self.model.config, "max_position_embeddings", None)
        return int(length) if length else None


def load(
    folder: Path,
    adapter: Path | None,
    *,
    data_dir: str,
    block_tokens: int,
    room: Callable[[], MemoryRoom] = memory_room,
) -> ReadyModel:
    """Raises ConfigError("model" or "adapter"), UnsupportedModel, IdentityError."""
    size = sum(named.stat.size for named in stat_signature(folder))
    if not (folder / CONFIG).is_file():
        raise ConfigError("model", f"{folder} holds no {CONFIG}; name the folder with the model as the engine loads it")
    require_room("model", int(size * (1 + WORKING_ROOM)), f"the weights in {folder} and one pass through them", room())
    try:
        loaded = load_model(folder, data_dir=data_dir or None)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:  # as the library says that it can't
        raise ConfigError("model", f"{folder} can't be loaded: {_said_by(error)}") from error
    if not loaded.weights:
        raise ConfigError("model", f"{loaded.problem}; without a fingerprint no verdict can be kept")
    fingerprint = ""
    if adapter is not None:
        with digest_memory(data_dir or None) as memory:
            fingerprint = fingerprint_adapter(adapter, memory).fingerprint
        _apply(loaded.model, adapter)
    check_model(loaded.model, adapter=fingerprint)
    return ReadyModel(loaded, fingerprint, shape_of(probe(loaded.model), block_tokens))


def require_room(field: str, num_bytes: int, what: str, room: MemoryRoom) -> None:
    if room.num_bytes < num_bytes:
        raise ConfigError(
            field,
            f"{what} take about {human_size(num_bytes)}, and {human_size(room.num_bytes)} of memory are free on "
            f"{room.name}; stop what else uses memory, or run the eval on a larger machine and copy the verdict",
        )


def require_cache_room(ready: ReadyModel, num_tokens: int, room: MemoryRoom) -> None:
    num_bytes = COPIES_OF_KV * num_tokens * ready.shape.block_bytes // ready.shape.block_tokens
    require_room("prompts", num_bytes, f"caches of {num_tokens:,} tokens", room)


def make_codec(name: str, shape: BlockShape) -> BlockCodec:
    """ConfigError where there is none for the element type of the model's cache."""
    element = element_type(shape.dtype)
    if element not in ("bfloat16", "float16", "float32"):
        raise ConfigError("model", f"its cache holds {element}, which {name} does not code")
    return codec_of(
        name,
        KVShape.head_first(
            element=element,  # type: ignore[arg-type]  # it was looked at above
            layers=shape.layers,
            heads=shape.heads,
            tokens=shape.block_tokens,
            dim=shape.head_dim,
        ),
    )


class Tokens:
    """Makes tokens of texts and chats, by the tokenizer in the model's folder. ConfigError("model") without one."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            problem = f"{folder} has no tokenizer that can be used: {_said_by(error)}"
            raise ConfigError("model", problem) from error
        self.special = frozenset(self._tokenizer.all_special_ids)

    def of(self, prompt: EvalPrompt, vocabulary: int) -> list[int]:
        """ConfigError("prompts") for what is no prompt of this model."""
        if prompt.tokens is not None:
            tokens = prompt.tokens
        elif prompt.messages is not None:
            tokens = self._of_chat(prompt)
        else:
            tokens = [int(one) for one in self._tokenizer(prompt.text or "")["input_ids"]]
        if any(not 0 <= token < vocabulary for token in tokens):
            raise ConfigError("prompts", f"line {prompt.line}: a token id is beyond the model's {vocabulary}")
        return tokens

    def bare(self, text: str) -> list[int]:
        """With nothing added."""
        return [int(one) for one in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    @property
    def start(self) -> list[int]:
        """What is put before every text."""
        added = [int(one) for one in self._tokenizer("a")["input_ids"]]
        return added[: added.index(self.bare("a")[0])] if self.bare("a")[0] in added else []

    def _of_chat(self, prompt: EvalPrompt) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"line {prompt.line}: the model's chat template does not take it: {_said_by(error)}"
            raise ConfigError("prompts", problem) from error
        return self.bare(text)


def haystack(tokens: Tokens, prompts: Sequence[list[int]], context: int | None, *, long_context: bool) -> Haystack:
    return Haystack(
        facts=make_facts(tokens.bare),
        hay=[token for prompt in prompts for token in prompt if token not in tokens.special],
        start=tokens.start,
        lengths=lengths_for(context, long_context=long_context),
    )


def digest_of_prompts(prompts: Sequence[list[int]]) -> str:
    """Of their tokens, each framed by its length; in order."""
    digest = blake3(b"tierkv eval prompts 1")
    for prompt in prompts:
        digest.update(struct.pack(f"<Q{len(prompt)}I", len(prompt), *prompt))
    return digest.hexdigest()


def versions() -> dict[str, str]:
    return {"tierkv": tierkv.__version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


def _apply(model: Any, adapter: Path) -> None:
    try:
        model.load_adapter(str(adapter))
    except ImportError as error:
        raise ConfigError("adapter", "it takes the package peft to run one: pip install peft") from error
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise ConfigError("adapter", f"{adapter} does not fit the model: {_said_by(error)}") from error
    model.eval()


def _said_by(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return textwrap.shorten(" ".join(lines), 300, placeholder=" ...") or type(error).__name__
