"""Which vLLM engines are served, and which are refused when they start: by name, with what to do.

A refusal says so once, at the start, in the words of vLLM's own flags. What is refused here is never tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tierkv.errors import UnsupportedEngine, UnsupportedModel

SERVED_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")
"""Exactly these classes: a class derived from one of them keeps something else."""
SERVED_LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Those in which the bytes of one block of one layer lie together."""
DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")

_REASONS = {
    "MLAAttentionSpec": "latent attention (MLA), of which no test has shown yet that it is served rightly",
    "MambaSpec": "recurrent layers (Mamba, linear attention): their state is not made of blocks of tokens",
    "ChunkedLocalAttentionSpec": "chunked local attention: its blocks are forgotten chunk by chunk",
    "CrossAttentionSpec": "cross attention: its KV depends on the encoder's input",
    "EncoderOnlyAttentionSpec": "encoder attention: the KV of a token depends on the tokens behind it",
    "SinkFullAttentionSpec": "attention sinks in blocks of their own",
}


def check_engine(vllm_config: Any, kv_cache_config: Any, *, block_tokens: int | None = None) -> None:
    """UnsupportedEngine or UnsupportedModel unless every block of this engine can be served rightly.

    `block_tokens` is what the operator asked for in the extra configuration, if anything. Asked in the scheduler and in
    each worker.
    """
    _check_transfer(vllm_config.kv_transfer_config)
    _check_model(vllm_config)
    _check_parallel(vllm_config.parallel_config)
    _check_layout(kv_layout(vllm_config, kv_cache_config))
    _check_groups(kv_cache_config, vllm_config.cache_config.block_size)
    _check_block_size(vllm_config.cache_config, kv_cache_config, block_tokens)


def layer_specs(group: Any) -> Iterator[Any]:
    """The specs of a group's layers. The scheduler's copy of a group of differing layers has one of them only."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    yield from inner.values() if inner else [group.kv_cache_spec]


def kv_layout(vllm_config: Any, kv_cache_config: Any) -> str:
    """Name of the physical order of the axes, in vLLM's letters: layer, block, head, (toke)n, content."""
    return str(kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout)


def _check_transfer(config: Any) -> None:
    if config.kv_role != "kv_both":
        raise UnsupportedEngine(f'kv_role is "{config.kv_role}": this connector stores and loads; set "kv_both"')
    if config.kv_load_failure_policy != "recompute":
        raise UnsupportedEngine(
            f'kv_load_failure_policy is "{config.kv_load_failure_policy}", with which a failed load ends the request: '
            'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'
        )
    if config.enable_permute_local_kv:
        raise UnsupportedEngine("enable_permute_local_kv rewrites blocks in place: leave it out")


def _check_model(vllm_config: Any) -> None:
    model = vllm_config.model_config
    if model.is_encoder_decoder:
        raise UnsupportedModel("an encoder-decoder model: its decoder's KV depends on the encoder's input")
    if vllm_config.diffusion_config is not None or getattr(model, "is_diffusion", False):
        raise UnsupportedModel("a diffusion language model: the KV of a token depends on the tokens behind it")
    if vllm_config.attention_config.use_non_causal:
        raise UnsupportedModel("non-causal attention: the KV of a token depends on the tokens behind it")
    if not vllm_config.cache_config.enable_prefix_caching:
        raise UnsupportedEngine(
            "vLLM's own prefix caching is off: start without --no-enable-prefix-caching. If that was not given, vLLM "
            "has put it off itself, since it can't compute behind a cached prefix with this model and backend"
        )
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        raise UnsupportedEngine(
            "--kv-sharing-fast-prefill skips tokens in layers that share KV: start without it to use this cache"
        )
    draft = vllm_config.speculative_config
    if draft is not None and draft.method not in DRAFTS_WITHOUT_KV:
        raise UnsupportedEngine(
            f"speculative decoding with method {draft.method!r}: the draft model's KV is not in the cached blocks; "
            f"methods that need no draft model ({', '.join(DRAFTS_WITHOUT_KV)}) are served"
        )


def _check_parallel(config: Any) -> None:
    for name, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(config, name, 1) > 1:
            raise UnsupportedEngine(
                f"{flag} is {getattr(config, name)}: a block would lie on several ranks; only 1 is served"
            )


def _check_layout(order: str) -> None:
    if order not in SERVED_LAYOUTS:
        raise UnsupportedEngine(
            f"KV cache layout {order}: a block of a layer does not lie in one piece; served are "
            f"{', '.join(SERVED_LAYOUTS)} (VLLM_KV_CACHE_LAYOUT)"
        )


def _check_groups(kv_cache_config: Any, block_size: int) -> None:
    if not kv_cache_config.kv_cache_groups:
        raise UnsupportedModel("this model has no KV cache")
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        where = f"cache group {index} ({group.layer_names[0]}, ...)"
        if getattr(group, "is_eagle_group", False):
            raise UnsupportedEngine(f"{where} belongs to a draft model: its weights are not in the identity")
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            raise UnsupportedEngine(f"{where} is kept from connectors by vLLM")
        for spec in layer_specs(group):
            _check_spec(spec, where)
            if spec.block_size != block_size:
                raise UnsupportedEngine(
                    f"{where} has blocks of {spec.block_size} tokens, and others of {block_size}: only equal ones are "
                    "served"
                )


def _check_spec(spec: Any, where: str) -> None:
    kind = type(spec).__name__
    if kind not in SERVED_SPECS:
        reason = _REASONS.get(kind, f"a kind of cache that is not known ({kind})")
        raise UnsupportedModel(f"{where} has {reason}")
    if getattr(spec, "attention_chunk_size", None) is not None:
        raise UnsupportedModel(f"{where} has {_REASONS['ChunkedLocalAttentionSpec']}")
    if getattr(spec, "non_causal", False):
        raise UnsupportedModel(f"{where} is not causal: the KV of a token depends on the tokens behind it")
    if spec.page_size_padded is not None and spec.page_size_padded != spec.unpadded_page_size_bytes:
        raise UnsupportedEngine(f"{where} has padded pages ({spec.page_size_padded} bytes)")
    if spec.tokens_per_state != 1:
        raise UnsupportedModel(f"{where} keeps one state for {spec.tokens_per_state} tokens")


def _check_block_size(cache_config: Any, kv_cache_config: Any, wanted: int | None) -> None:
    block_size = cache_config.block_size
    if wanted is not None and wanted != block_size:
        raise UnsupportedEngine(
            f"block_tokens is {wanted}, and vLLM's blocks have {block_size} tokens: start it with "
            f"--block-size {wanted}, or leave block_tokens out"
        )
    hashed = getattr(kv_cache_config, "hash_block_size", None)
    if hashed is not None and block_size % hashed:
        raise UnsupportedEngine(
            f"vLLM hashes every {hashed} tokens, which does not divide its blocks of {block_size}: leave "
            "--prefix-match-unit out"
        )
