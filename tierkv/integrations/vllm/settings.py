"""Which settings of a vLLM engine change the bytes of its KV, and the digest over them.

A setting counts unless it is named here as one that doesn't: a new release may bring new ones. The number of threads,
kernels chosen for speed and sizes of batches are not in it, on purpose: they decide how sums are rounded, not what is
summed. What lies in the files (weights, adapters) is fingerprinted elsewhere.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from tierkv.integrations.identity_common import HF_DOES_NOT_MATTER, digest_settings

LENGTH_FREE_ROPES = frozenset({"default", "linear", "llama3", "yarn", "mrope"})
"""Rope types whose angles at a position do not depend on the longest prompt that the engine was started for."""

MODEL_DOES_NOT_MATTER = frozenset(
    {
        # names and places; content is in the fingerprint, settings are in the effective hf_config
        "model",
        "model_weights",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "skip_tokenizer_init",
        "hf_config_path",
        "hf_overrides",
        "config_format",
        "revision",
        "code_revision",
        "hf_token",
        "served_model_name",
        "trust_remote_code",  # code from outside is told by `running foreign code`
        "hf_config",  # judged on its own
        "hf_text_config",  # a part of it
        "max_model_len",  # judged on its own
        "spec_target_max_model_len",
        "is_submodel_config",
        # the head behind the last layer, sampling, and what is returned
        "word_embeddings_untied_by_checkpoint",
        "return_sampling_mask",
        "max_logprobs",
        "logprobs_mode",
        "use_fp64_gumbel",
        "enable_trace_replay",
        "generation_config",
        "override_generation_config",
        "logits_processors",
        "pooler_config",
        "seed",  # weights made of it (load format "dummy") get an epoch
        # speed and memory
        "enforce_eager",
        "disable_cascade_attn",
        "enable_sleep_mode",
        "sleep_preserve_parameter_names",
        "sleep_mode_backend",
        "sleep_mode_offload_cudagraph",
        "enable_nccl_comm_suspend",
        "enable_cumem_allocator",
        "renderer_num_workers",
        # what may come in; what comes in is judged request by request
        "allowed_local_media_path",
        "allowed_media_domains",
        "enable_prompt_embeds",
        "io_processor_plugin",
        "allow_deprecated_quantization",
    }
)

CACHE_DOES_NOT_MATTER = frozenset(
    {
        # in the layout
        "block_size",
        "user_specified_block_size",
        "_block_size_resolved",
        "kv_cache_layout",
        # how much room there is, and what is kept in it
        "gpu_memory_utilization",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
        "num_gpu_blocks",
        "num_cpu_blocks",
        "effective_attention_block_size",
        "kv_cache_size_tokens",
        "kv_cache_max_concurrency",
        "kv_offloading_size",
        "kv_offloading_backend",
        # how vLLM finds its own blocks again
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "prefix_cache_retention_interval",
        "prefix_match_unit",
        "hash_block_size",
        "cache_hit_alignment_tokens",
        # recurrent layers, which are refused
        "mamba_page_size_padded",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_cache_mode",
        "enable_mamba_shared_prefix_checkpoint",
        "replayssm_buffer_len",
        "use_replayssm",
        "use_kda_recoverssm",
        "is_attention_free",
        # refused where it is on
        "kv_sharing_fast_prefill",
        "swa_bounded_replay",  # works on a kind of group that is refused
    }
)

ATTENTION_DOES_NOT_MATTER = frozenset(
    {
        # the backend that runs is in the layout
        "backend",
        "backend_per_kind",
        "flash_attn_version",
        "use_trtllm_attention",
        # speed and scratch memory
        "flash_attn_max_num_splits_for_cuda_graph",
        "tokenspeed_mla_min_split_kv",
        "tq_max_kv_splits_for_cuda_graph",
        "minimax_m3_msa_decode_backend",
        "mla_prefill_backend",
        "sparse_mla_force_mqa",
        "sparse_mla_prefill_workspace_factor",
        "flex_attn_block_m",
        "flex_attn_block_n",
        "flex_attn_q_block_size",
        "flex_attn_kv_block_size",
    }
)

KERNEL_DOES_NOT_MATTER = frozenset(
    {
        "ir_op_priority",
        "enable_flashinfer_autotune",
        "enable_rocm_segmented_attn_autotune",
        "enable_cutedsl_warmup",
        "enable_jit_warmup",
    }
)

LOAD_DOES_NOT_MATTER = frozenset(
    {
        "download_dir",
        "safetensors_load_strategy",
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
        "device",
        "use_tqdm_on_load",
        "pt_load_map_location",
    }
)

LORA_DOES_NOT_MATTER = frozenset(
    {
        "max_lora_rank",
        "max_loras",
        "fully_sharded_loras",
        "max_cpu_loras",
        "specialize_active_lora",
        "max_lora_cls_labels",
        "default_mm_loras",  # such a request names its adapter
    }
)

ENGINE_DOES_NOT_MATTER = frozenset(
    {
        # judged on their own, here or in `supported`
        "model_config",
        "cache_config",
        "attention_config",
        "kernel_config",
        "load_config",
        "lora_config",
        "parallel_config",
        "device_config",
        "speculative_config",
        "diffusion_config",
        "weight_transfer_config",
        "kv_transfer_config",
        "mamba_config",  # recurrent layers, which are refused
        "quant_config",  # made of the model's settings
        # batches, speed and memory
        "scheduler_config",
        "offload_config",
        "compilation_config",
        "optimization_level",
        "performance_mode",
        # sampling, and what is returned or told
        "aux_output_config",
        "watermark_config",
        "structured_outputs_config",
        "reasoning_config",
        "observability_config",
        "logging_config",
        "profiler_config",
        "kv_events_config",
        # where media are encoded; their digests are in the block keys
        "ec_transfer_config",
        "ec_manager_config",
        "instance_id",
        "shutdown_timeout",
    }
)

_PARTS = (
    ("model", "model_config", MODEL_DOES_NOT_MATTER),
    ("cache", "cache_config", CACHE_DOES_NOT_MATTER),
    ("attention", "attention_config", ATTENTION_DOES_NOT_MATTER),
    ("kernel", "kernel_config", KERNEL_DOES_NOT_MATTER),
    ("load", "load_config", LOAD_DOES_NOT_MATTER),
)


def settings_of(vllm_config: Any) -> dict[str, Any]:
    """All settings of an engine that count, by a name that says where they come from. The same in the scheduler and in
    every worker, and on every machine with the same settings."""
    settings: dict[str, Any] = {
        f"engine {name}": value for name, value in fields_of(vllm_config).items() if name not in ENGINE_DOES_NOT_MATTER
    }
    for part, attribute, ignored in _PARTS:
        found = fields_of(getattr(vllm_config, attribute, None))
        settings |= {f"{part} {name}": value for name, value in found.items() if name not in ignored}
    hf_settings = vllm_config.model_config.hf_config.to_dict()
    settings["hf_config"] = _without_what_does_not_matter(hf_settings)
    if not _is_length_free(hf_settings):
        settings["max_model_len"] = vllm_config.model_config.max_model_len
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        settings["pipeline partition"] = os.environ.get("VLLM_PP_LAYER_PARTITION", "")
    return settings


def adapter_settings_of(vllm_config: Any) -> dict[str, Any]:
    """The settings that count only for requests with an adapter."""
    found = fields_of(vllm_config.lora_config)
    return {name: value for name, value in found.items() if name not in LORA_DOES_NOT_MATTER}


def config_digest(settings: dict[str, Any]) -> str:
    """64 hex digits. IdentityError for a setting of which no digest can be made."""
    return digest_settings(settings, frozenset())


def fields_of(config: Any) -> dict[str, Any]:
    """Name and value of each field of one of vLLM's settings classes; nothing for None."""
    if config is None:
        return {}
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _without_what_does_not_matter(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_what_does_not_matter(item) for name, item in value.items() if name not in HF_DOES_NOT_MATTER}


def _is_length_free(hf_settings: dict[str, Any]) -> bool:
    return all(kind in LENGTH_FREE_ROPES for kind in _rope_kinds(hf_settings))


def _rope_kinds(value: Any, *, of_rope: bool = False) -> list[str]:
    """Of the model, of each of its parts and of each kind of layer. Older configurations call it `type`."""
    if not isinstance(value, dict):
        return []
    kind = value.get("rope_type", value.get("type") if of_rope else None)
    kinds = [] if kind is None else [str(kind)]
    return kinds + [
        kind
        for name, item in value.items()
        for kind in _rope_kinds(item, of_rope=of_rope or str(name).startswith("rope"))
    ]
