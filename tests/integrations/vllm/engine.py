"""What vLLM hands to a connector, made with its own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
BLOCK_TOKENS = 32
NUM_BLOCKS = 4


def transfer(**changed: Any) -> Any:
    given: dict[str, Any] = {
        "kv_connector": "TierkvConnector",
        "kv_connector_module_path": "tierkv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    return KVTransferConfig(**(given | changed))


def engine_config(model: Path, **arguments: Any) -> Any:
    """Of an engine that is started with these arguments."""
    given: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 256,
    }
    config = EngineArgs(**(given | arguments)).create_engine_config()
    config.kv_transfer_config = transfer()
    return config


def full_attention(**changed: Any) -> Any:
    given: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    return FullAttentionSpec(**(given | changed))


def kv_config(*specs: Any, layers: int = 2, layout: str = "LBHNC", **changed: Any) -> Any:
    """One cache group for each spec, of `layers` layers each."""
    groups, tensors = [], []
    for index, spec in enumerate(specs or (full_attention(),)):
        names = [f"model.layers.{index * layers + layer}.self_attn.attn" for layer in range(layers)]
        page = spec.page_size_bytes
        groups.append(KVCacheGroupSpec(names, spec))
        tensors.append(
            KVCacheTensor(
                size=layers * NUM_BLOCKS * page, layers=names, layer_stride=page * NUM_BLOCKS, block_stride=page
            )
        )
    given: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "kv_cache_tensors": tensors,
        "kv_cache_groups": groups,
        "kv_cache_layout": layout,
        "hash_block_size": BLOCK_TOKENS,
    }
    return KVCacheConfig(**(given | changed))
