from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.integrations.vllm.engine import BLOCK_TOKENS, full_attention, kv_config, transfer
from tierkv.errors import UnsupportedEngine, UnsupportedModel
from tierkv.integrations.vllm.supported import SERVED_SPECS, check_engine

HEADS: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": torch.float32,
}


def sliding(**changed: Any) -> Any:
    return SlidingWindowSpec(**(HEADS | {"sliding_window": 64} | changed))


def uniform(*specs: Any) -> Any:
    return UniformTypeKVCacheSpecs(
        block_size=BLOCK_TOKENS, kv_cache_specs={f"model.layers.{index}": spec for index, spec in enumerate(specs)}
    )


@pytest.mark.parametrize(
    "specs",
    [
        [full_attention()],
        [full_attention(sliding_window=64)],
        [full_attention(), sliding()],
        [uniform(full_attention(), full_attention(num_kv_heads=2))],
    ],
    ids=["full", "full for a window", "full and sliding", "differing layers"],
)
def test_attention_that_is_made_of_blocks_is_served(plain_config: Any, specs: list[Any]) -> None:
    check_engine(plain_config, kv_config(*specs))


REFUSED_SPECS: dict[str, tuple[Any, str]] = {
    "recurrent": (
        MambaSpec(block_size=BLOCK_TOKENS, shapes=((4, 4),), dtypes=(torch.float32,)),
        "recurrent layers",
    ),
    "chunked": (ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64), "chunked local attention"),
    "cross": (CrossAttentionSpec(**HEADS), "cross attention"),
    "encoder": (EncoderOnlyAttentionSpec(**HEADS), "encoder attention"),
    "sinks": (SinkFullAttentionSpec(**HEADS, sink_len=4), "attention sinks"),
    "recurring window": (RSWASpec(**HEADS, rswa_window=64), "not known (RSWASpec)"),
    "hidden states": (HiddenStateCacheSpec(**HEADS), "not known (HiddenStateCacheSpec)"),
    "latent window": (SlidingWindowMLASpec(**HEADS, sliding_window=64), "not known (SlidingWindowMLASpec)"),
    "latent": (MLAAttentionSpec(**HEADS), "latent attention (MLA)"),
    "chunked in one group with full": (full_attention(attention_chunk_size=64), "chunked local attention"),
    "not causal": (full_attention(non_causal=True), "not causal"),
    "compressed": (full_attention(tokens_per_state=4), "one state for 4 tokens"),
    "one of many": (uniform(full_attention(), full_attention(non_causal=True)), "not causal"),
}


@pytest.mark.parametrize("name", sorted(REFUSED_SPECS))
def test_other_caches_are_refused_by_name(plain_config: Any, name: str) -> None:
    spec, reason = REFUSED_SPECS[name]
    with pytest.raises(UnsupportedModel) as refused:
        check_engine(plain_config, kv_config(spec))
    assert reason in str(refused.value)
    assert "cache group 0 (model.layers.0" in str(refused.value)


def all_specs(kind: type) -> set[type]:
    return {kind}.union(*(all_specs(derived) for derived in kind.__subclasses__()))


def test_the_served_kinds_of_cache_are_named_as_vllm_names_them() -> None:
    served = {kind.__name__ for kind in all_specs(KVCacheSpec)} & set(SERVED_SPECS)
    assert served == set(SERVED_SPECS)


def test_padded_pages_are_refused(plain_config: Any) -> None:
    spec = full_attention()
    check_engine(plain_config, kv_config(full_attention(page_size_padded=spec.page_size_bytes)))
    with pytest.raises(UnsupportedEngine, match="padded pages"):
        check_engine(plain_config, kv_config(full_attention(page_size_padded=2 * spec.page_size_bytes)))


def test_groups_with_blocks_of_different_sizes_are_refused(plain_config: Any) -> None:
    with pytest.raises(UnsupportedEngine, match=r"cache group 1 .* has blocks of 64 tokens, and others of 32"):
        check_engine(plain_config, kv_config(full_attention(), sliding(block_size=64)))


def test_a_model_without_a_cache_is_refused(plain_config: Any, kv_cache_config: Any) -> None:
    kv_cache_config.kv_cache_groups = []
    with pytest.raises(UnsupportedModel, match="no KV cache"):
        check_engine(plain_config, kv_cache_config)


@pytest.mark.parametrize("mark", ["is_eagle_group", "host_resident"])
def test_groups_that_are_not_of_the_model_s_own_are_refused(plain_config: Any, kv_cache_config: Any, mark: str) -> None:
    setattr(kv_cache_config.kv_cache_groups[0], mark, True)
    with pytest.raises(UnsupportedEngine, match="cache group 0"):
        check_engine(plain_config, kv_cache_config)


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"kv_role": "kv_producer"}, 'set "kv_both"'),
        ({"kv_load_failure_policy": "fail"}, 'add "kv_load_failure_policy": "recompute" to --kv-transfer-config'),
        ({"enable_permute_local_kv": True}, "leave it out"),
    ],
    ids=["role", "policy", "permute"],
)
def test_a_connector_that_is_asked_for_wrongly_is_told_what_to_set(
    vllm_config: Any, kv_cache_config: Any, changed: dict[str, Any], advice: str
) -> None:
    vllm_config.kv_transfer_config = transfer(**changed)
    with pytest.raises(UnsupportedEngine) as refused:
        check_engine(vllm_config, kv_cache_config)
    assert advice in str(refused.value)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_by_its_flag(vllm_config: Any, kv_cache_config: Any, name: str) -> None:
    setattr(vllm_config.parallel_config, name, 2)
    with pytest.raises(UnsupportedEngine, match=f"--{name.replace('_', '-')} is 2"):
        check_engine(vllm_config, kv_cache_config)


def test_an_engine_that_does_not_reuse_prefixes_is_refused(vllm_config: Any, kv_cache_config: Any) -> None:
    """vLLM puts it off where it would compute wrongly behind a prefix: with its reference kernels for latent attention,
    for example. A connector is made all the same."""
    vllm_config.cache_config.enable_prefix_caching = False
    with pytest.raises(UnsupportedEngine, match="start without --no-enable-prefix-caching"):
        check_engine(vllm_config, kv_cache_config)


def test_fast_prefill_with_shared_kv_is_refused(vllm_config: Any, kv_cache_config: Any) -> None:
    vllm_config.cache_config.kv_sharing_fast_prefill = True
    with pytest.raises(UnsupportedEngine, match="--kv-sharing-fast-prefill"):
        check_engine(vllm_config, kv_cache_config)


class Draft:
    def __init__(self, method: str) -> None:
        self.method = method


@pytest.mark.parametrize(("method", "served"), [("ngram", True), ("suffix", True), ("eagle3", False), ("mtp", False)])
def test_speculation_is_served_where_it_needs_no_draft_model(
    vllm_config: Any, kv_cache_config: Any, method: str, served: bool
) -> None:
    vllm_config.speculative_config = Draft(method)
    if served:
        check_engine(vllm_config, kv_cache_config)
        return
    with pytest.raises(UnsupportedEngine, match=f"method '{method}'"):
        check_engine(vllm_config, kv_cache_config)


def test_an_encoder_decoder_model_is_refused(vllm_config: Any, kv_cache_config: Any) -> None:
    vllm_config.model_config.__dict__["is_encoder_decoder"] = True
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        check_engine(vllm_config, kv_cache_config)


@pytest.mark.parametrize("name", ["use_non_causal"])
def test_attention_that_looks_ahead_is_refused(vllm_config: Any, kv_cache_config: Any, name: str) -> None:
    setattr(vllm_config.attention_config, name, True)
    with pytest.raises(UnsupportedModel, match="non-causal"):
        check_engine(vllm_config, kv_cache_config)


@pytest.mark.parametrize(
    ("layout", "served"), [("LBHNC", True), ("LBNHC", True), ("BLNHC", True), ("LHBNC", False), ("BHLNC", False)]
)
def test_only_layouts_with_a_block_in_one_piece_are_served(plain_config: Any, layout: str, served: bool) -> None:
    if served:
        check_engine(plain_config, kv_config(layout=layout))
        return
    with pytest.raises(UnsupportedEngine, match=f"KV cache layout {layout}"):
        check_engine(plain_config, kv_config(layout=layout))


def test_an_engine_with_another_block_size_than_asked_for_is_refused(plain_config: Any, kv_cache_config: Any) -> None:
    check_engine(plain_config, kv_cache_config, block_tokens=BLOCK_TOKENS)
    with pytest.raises(UnsupportedEngine, match="start it with --block-size 48, or leave block_tokens out"):
        check_engine(plain_config, kv_cache_config, block_tokens=48)


@pytest.mark.parametrize(("hashed", "served"), [(8, True), (32, True), (None, True), (24, False), (64, False)])
def test_hashes_must_fall_on_the_ends_of_blocks(plain_config: Any, hashed: int | None, served: bool) -> None:
    config = kv_config(hash_block_size=hashed)
    if served:
        check_engine(plain_config, config)
        return
    with pytest.raises(UnsupportedEngine, match=f"hashes every {hashed} tokens"):
        check_engine(plain_config, config)
