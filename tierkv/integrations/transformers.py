"""Prefix reuse for decoder models of the transformers library.

    from tierkv.client import connect
    from tierkv.integrations.transformers import PrefixCache, load_model

    with connect() as client:
        cache = PrefixCache(load_model("path/to/model"), client)
        result = cache.generate(input_ids, max_new_tokens=64)
        print(result.new_tokens, result.use.reused_tokens, result.time_to_first_token_seconds)

A request takes the longest prefix of its prompt that the node has, copies it into a cache of the library's own class,
lets the library compute the rest, and gives the new full blocks to the node: those of the prompt once the first
token is out, those of the answer while it grows. Nothing is patched; the model object stays as it is.

Whatever happens to the node, the request is answered, at worst by computing all of it (`reason` and `fault` of
`result.use` say what was amiss). What can't be served rightly is refused with UnsupportedModel.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from tierkv.client import Client, DevicePool, Group, Sealed
from tierkv.core.identity import Identity
from tierkv.errors import ConfigError
from tierkv.integrations.connector.codec_choice import CodecChoice, choose_codec
from tierkv.integrations.connector.fence import Fence
from tierkv.integrations.connector.plan import GroupSpec
from tierkv.integrations.connector.transfer import open_group
from tierkv.integrations.kv_blocks import BlockShape, shape_of
from tierkv.integrations.model_identity import identity_of
from tierkv.integrations.model_loading import LoadedModel, WeightsMark, load_model
from tierkv.integrations.request import CacheUse, Request, RequestSettings, TokenWatch
from tierkv.integrations.supported import (
    check_generation,
    check_model,
    check_state,
    check_tokens,
    device_of,
    forward,
    probe,
)

__all__ = ["PrefixCache", "PrefillResult", "GenerateResult", "CacheUse", "LoadedModel", "load_model"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """`cache` holds the KV of the whole prompt and is the caller's; `logits` are those of its last token, [1,
    vocabulary]. `prefill_seconds` counts from the call until the logits are there; storing comes after it."""

    cache: DynamicCache
    logits: torch.Tensor
    prefill_seconds: float
    use: CacheUse


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """`sequences` is [1, prompt and answer], `output` whatever the library's `generate` returned, `cache` the KV of all
    tokens but the last and the caller's. Times count from the call; `total_seconds` includes storing."""

    sequences: torch.Tensor
    new_tokens: list[int]
    output: Any
    cache: DynamicCache
    time_to_first_token_seconds: float
    total_seconds: float
    use: CacheUse


class PrefixCache:
    """One model under one identity, for one request at a time.

    Making it proves on the model that blocks can serve it (UnsupportedModel otherwise) and makes the identity
    (IdentityError if it can't be made); it needs no node, but one that answers is asked which codec this model's blocks
    are stored with, and without its word they are stored as they are (`codec` says why). `salt` parts tenants.
    `adapter` is the fingerprint of the adapter's files if one is loaded. `load_deadline_seconds` is the longest that a
    request waits for blocks to come from NVMe. While an answer grows its blocks are stored `store_every_blocks` at a
    time, and the rest at its end. `device` is whose pool in the node blocks are copied from and to, as far as it has
    them: "auto" is the model's GPU, "none" no pool, "cpu" one in host memory (for a model on the CPU, to try it out).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        client: Client,
        *,
        block_tokens: int = 16,
        salt: str = "",
        adapter: str = "",
        adapter_name: str = "",
        load_deadline_seconds: float = 2.0,
        store_deadline_seconds: float = 1.0,
        store_every_blocks: int = 4,
        device: str = "auto",
    ) -> None:
        self._model = loaded.model
        check_model(self._model, adapter=adapter)
        shape = shape_of(probe(self._model), block_tokens)
        self._mark = loaded.mark
        self._codec_choice = choose_codec(client, loaded.weights if not loaded.epoch else "", adapter, shape.kv_shape)
        codec = self._codec_choice.codec
        self._identity = identity_of(
            self._model, shape, weights=loaded.weights, adapter=adapter, salt=salt, epoch=loaded.epoch, codec=codec
        )
        self._store_every_blocks = store_every_blocks
        spec = GroupSpec(
            identity=self._identity,
            model_name=loaded.name,
            adapter_name=adapter_name,
            manifest=loaded.manifest,
            kv_shape=None if codec is None else shape.kv_shape,
        )
        self._settings = RequestSettings(
            group=open_group(client, spec, block_bytes=shape.block_bytes),
            shape=shape,
            config=self._model.config,
            fence=Fence(),
            load_deadline_seconds=load_deadline_seconds,
            store_deadline_seconds=store_deadline_seconds,
            device=device_of(self._model),
            pool=_pool_of(client, device_of(self._model), device),
        )

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def codec(self) -> CodecChoice:
        """How the node wants this model's blocks, which it was asked for once."""
        return self._codec_choice

    @property
    def group(self) -> Group:
        return self._settings.group

    @property
    def shape(self) -> BlockShape:
        return self._settings.shape

    def prefill(self, input_ids: torch.Tensor, *, request_name: str = "") -> PrefillResult:
        """The KV and the last logits of a prompt, [tokens] or [1, tokens]: what is cached is loaded, the rest computed
        and stored. `request_name` is your id of the request, by which `tierkv why` finds it."""
        started = time.perf_counter()
        request = self._begin(check_tokens(input_ids), request_name)
        with torch.no_grad():
            logits = forward(self._model, request.tokens, request.cache)
        ended = time.perf_counter()
        request.computed(ended - request.loaded_at)
        request.store()
        request.seal()
        return PrefillResult(cache=request.cache, logits=logits, prefill_seconds=ended - started, use=request.use)

    def generate(self, input_ids: torch.Tensor, *, request_name: str = "", **options: Any) -> GenerateResult:
        """The library's `generate` with the same options, for one prompt, [tokens] or [1, tokens].

        Beam search, assisted decoding, padded prompts and inputs besides the tokens are refused (UnsupportedModel). A
        `streamer` gets each token before anything is stored. `request_name` is your id of the request, by which
        `tierkv why` finds it.
        """
        started = time.perf_counter()
        tokens = check_tokens(input_ids).to(device_of(self._model))
        check_generation(self._model, options)
        request = self._begin(tokens, request_name)
        watch = TokenWatch(request, options.get("streamer"), self._store_every_blocks)
        # The mask covers the cached tokens too: without it the library computes the whole prompt behind them.
        ours = {"attention_mask": torch.ones_like(tokens), "past_key_values": request.cache, "streamer": watch}
        output = self._model.generate(tokens, **(options | ours))
        sequences: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
        request.check_length()
        request.store()
        request.seal()
        ended = time.perf_counter()
        return GenerateResult(
            sequences=sequences,
            new_tokens=sequences[0, tokens.shape[1] :].tolist(),
            output=output,
            cache=request.cache,
            time_to_first_token_seconds=(watch.first_token_at or ended) - started,
            total_seconds=ended - started,
            use=request.use,
        )

    def flush(self, input_ids: torch.Tensor, *, deadline_seconds: float = 30.0) -> Sealed:
        """Wait until the cached blocks of a prompt are on disk for good, can't be, or the deadline is up."""
        tokens = check_tokens(input_ids)[0].cpu().numpy()
        return self.group.seal(tokens, wait="flushed", deadline_seconds=deadline_seconds)

    def _begin(self, tokens: torch.Tensor, name: str) -> Request:
        check_state(self._model)
        request = Request(self._settings, tokens, name)
        if self._mark != WeightsMark.of(self._model):
            request.bypass("the weights in memory are not those that were fingerprinted: the cache is not used")
            log.warning("%s", request.use.fault)
        request.load()
        return request


def _pool_of(client: Client, model: torch.device, wanted: str) -> DevicePool | None:
    """None where blocks are to go by way of host memory."""
    if wanted == "none" or (wanted == "auto" and model.type != "cuda"):
        return None
    here = "cpu" if model.type == "cpu" else f"{model.type}:{model.index or 0}"
    if wanted not in ("auto", here):
        raise ConfigError("device", f"{wanted!r}, but the model is on {here}: a pool of another device is no use to it")
    return client.map_device(here)
