"""What of a vLLM request enters the keys of its blocks, or why it goes without the cache.

Tokens are hashed into keys; media enter the keys of the blocks that they touch; salt and adapter enter the identity.
What can't be told by content, and whatever is not known here, makes the request bypass the cache: never a guess.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.core.codec import KVShape
from tierkv.core.identity import Identity
from tierkv.core.instructions import ManifestEntry
from tierkv.core.keys import NO_EXTRAS
from tierkv.core.reasons import Reason
from tierkv.integrations.connector.codec_choice import CodecChoice
from tierkv.integrations.vllm.adapters import Adapters
from tierkv.integrations.vllm.bypass import Bypass, BypassReason
from tierkv.integrations.vllm.codecs import Codecs
from tierkv.integrations.vllm.identity import EngineIdentity
from tierkv.integrations.vllm.weights import ModelFingerprint

__all__ = ["BypassReason", "Bypass", "CacheableRequest", "RequestReader", "media_extras"]

KNOWN_ATTRIBUTES = frozenset(
    {
        # judged below
        "prompt_token_ids",
        "_all_token_ids",
        "all_token_ids",
        "prompt_embeds",
        "prompt_is_token_ids",
        "_prompt_embeds_per_block_hashes",
        "lora_request",
        "cache_salt",
        "mm_features",
        "pooling_params",
        "resumable",
        "streaming_queue",
        # how it is scheduled, sampled, told and sent; none of it changes what is computed for a token
        "request_id",
        "client_index",
        "priority",
        "sampling_params",
        "structured_output_request",
        "arrival_time",
        "status",
        "events",
        "stop_reason",
        "kv_transfer_params",
        "ec_transfer_params",
        "max_tokens",
        "kv_cache_report_mode",
        "num_prompt_tokens",
        "_output_token_ids",
        "output_token_ids",
        "num_output_placeholders",
        "num_stale_output_tokens",
        "drop_stale_output",
        "num_in_flight_tokens",
        "next_decode_eligible_step",
        "last_sched_seq",
        "spec_token_ids",
        "num_computed_tokens",
        "trace_headers",
        "session_id",
        "kv_hints",
        "is_prefill_chunk",
        "shared_prefix_boundary",
        "replay_start",
        "num_nans_in_logits",
        "num_preemptions",
        "prefill_stats",
        "spec_decode_metrics",
        "block_hashes",
        "_block_hasher",
        "skip_reading_prefix_cache",
        "abort_immediately",
    }
)
"""Of a request in the tested versions. Another one that is set makes the request bypass the cache."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheableRequest:
    """`tokens` is vLLM's own view of all tokens so far, which grows as the answer does. `extras` are the inputs besides
    tokens of blocks by their number, for `KeyChain.extend`. `may_load` is False where vLLM wants every token computed;
    what is computed may be stored all the same. `kv_shape` where the identity names a codec; `uncoded` says why it does
    not, though the node has one."""

    identity: Identity
    tokens: Sequence[int]
    extras: Mapping[int, Sequence[bytes]]
    may_load: bool
    model_name: str
    manifest: tuple[ManifestEntry, ...] = ()
    adapter_name: str = ""
    kv_shape: KVShape | None = None
    uncoded: Reason | None = None


class RequestReader:
    """Reads the requests of one engine. Never waits for anything."""

    def __init__(
        self, engine: EngineIdentity, fingerprint: ModelFingerprint, adapters: Adapters, codecs: Codecs
    ) -> None:
        self._engine = engine
        self._codecs = codecs
        self._fingerprint = fingerprint
        self._adapters = adapters

    def read(self, request: Any) -> CacheableRequest | Bypass:
        refused = _refuse(request)
        if refused is not None:
            return refused
        weights = self._fingerprint.result
        if weights is None:
            return Bypass(BypassReason.WEIGHTS_PENDING)
        adapter = self._read_adapter(request.lora_request)
        if isinstance(adapter, Bypass):
            return adapter
        extras = media_extras(request.mm_features, self._engine.layout.block_tokens)
        if isinstance(extras, Bypass):
            return extras
        choice = (
            CodecChoice() if self._engine.epoch or weights.epoch else self._codecs.find(weights.fingerprint, adapter)
        )
        if choice is None:
            return Bypass(BypassReason.CODEC_PENDING)
        identity = self._engine.for_request(weights, salt=request.cache_salt or "", adapter=adapter, codec=choice.codec)
        return CacheableRequest(
            identity=identity,
            tokens=request.all_token_ids,
            extras=extras,
            may_load=not request.skip_reading_prefix_cache,
            model_name=weights.name,
            manifest=weights.manifest if identity.is_persistent else (),
            adapter_name=request.lora_request.lora_name if request.lora_request is not None else "",
            kv_shape=None if choice.codec is None else self._engine.kv_shape,
            uncoded=choice.reason,
        )

    def still_holds(self, request: Any) -> bool:
        """Whether the identity of a request that was cacheable is still right for what it computes from now on: not
        once files of its adapter changed, which vLLM may load again at any time between two steps. To be asked before
        something is loaded, and in each step before what it computes is stored."""
        return request.lora_request is None or isinstance(self._read_adapter(request.lora_request), str)

    def _read_adapter(self, lora_request: Any) -> str | Bypass:
        if lora_request is None:
            return ""
        unknown = _unknown_of_adapter(lora_request)
        if unknown:
            return Bypass(BypassReason.UNKNOWN_INPUT, f"adapter with {unknown}")
        return self._adapters.find(lora_request.lora_int_id, lora_request.lora_path)


def media_extras(features: Sequence[Any], block_tokens: int) -> Mapping[int, Sequence[bytes]] | Bypass:
    """For each block that an item of media touches, its digest and where it begins relative to the block's first token
    (i64, negative where it began before), in the order of their places."""
    if not features:
        return NO_EXTRAS
    extras: dict[int, list[bytes]] = {}
    for feature in sorted(features, key=lambda one: (one.mm_position.offset, one.mm_position.length)):
        if not _DIGEST.fullmatch(feature.identifier or ""):
            return Bypass(BypassReason.MEDIA_WITHOUT_DIGEST, f"{feature.modality}")
        offset, length = feature.mm_position.offset, feature.mm_position.length
        encoded = bytes.fromhex(feature.identifier)
        for block in range(offset // block_tokens, -(-(offset + length) // block_tokens)):
            extras.setdefault(block, []).append(
                b"media " + encoded + struct.pack("<qq", offset - block * block_tokens, length)
            )
    return extras


def _refuse(request: Any) -> Bypass | None:
    if request.prompt_embeds is not None or request.prompt_is_token_ids is not None or request.prompt_token_ids is None:
        return Bypass(BypassReason.PROMPT_EMBEDS)
    if request.pooling_params is not None:
        return Bypass(BypassReason.POOLING, str(request.pooling_params.task))
    if request.resumable:
        return Bypass(BypassReason.STREAMED_INPUT)
    attributes = vars(request)
    unknown = [name for name in attributes.keys() - KNOWN_ATTRIBUTES if _is_set(attributes[name])]
    if unknown:
        return Bypass(BypassReason.UNKNOWN_INPUT, ", ".join(sorted(unknown)))
    return None


def _unknown_of_adapter(lora_request: Any) -> str:
    known = {"lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace"}
    return ", ".join(
        name for name in lora_request.__struct_fields__ if name not in known and _is_set(getattr(lora_request, name))
    )


def _is_set(value: Any) -> bool:
    """Whether it says anything. What isn't plain says something."""
    return not (value is None or (isinstance(value, int | float | str | bytes | list | tuple | dict) and not value))
