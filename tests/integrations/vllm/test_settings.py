from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    KernelConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    VllmConfig,
)

from tierkv.errors import IdentityError
from tierkv.integrations.identity_common import HF_DOES_NOT_MATTER
from tierkv.integrations.vllm import settings
from tierkv.integrations.vllm.settings import adapter_settings_of, config_digest, settings_of

COUNTS: dict[type, set[str]] = {
    ModelConfig: {
        "runner",
        "convert",
        "dtype",
        "quantization",
        "quantization_config",
        "disable_sliding_window",
        "model_class_overrides",
        "model_impl",
        "multimodal_config",
    },
    CacheConfig: {"cache_dtype", "sliding_window", "kv_cache_dtype_skip_layers", "skip_page_size_padded"},
    AttentionConfig: {
        "disable_flashinfer_q_quantization",
        "use_prefill_query_quantization",
        "indexer_kv_dtype",
        "indexer_sparse_logits",
        "hisparse_config",
        "use_non_causal",
    },
    KernelConfig: {"moe_backend", "sparse_indexer_topk_backend", "linear_backend", "linear_backend_per_quant"},
    LoadConfig: {"load_format", "model_loader_extra_config", "ignore_patterns"},
    LoRAConfig: {
        "lora_dtype",
        "target_modules",
        "enable_tower_connector_lora",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
    },
    VllmConfig: {"engram_config", "additional_config"},
}
"""What of each class changes KV. A field that neither this nor the product names is new: look at it, and decide."""

DOES_NOT = {
    ModelConfig: settings.MODEL_DOES_NOT_MATTER,
    CacheConfig: settings.CACHE_DOES_NOT_MATTER,
    AttentionConfig: settings.ATTENTION_DOES_NOT_MATTER,
    KernelConfig: settings.KERNEL_DOES_NOT_MATTER,
    LoadConfig: settings.LOAD_DOES_NOT_MATTER,
    LoRAConfig: settings.LORA_DOES_NOT_MATTER,
    VllmConfig: settings.ENGINE_DOES_NOT_MATTER,
}

PARTS = {
    "model_config": ModelConfig,
    "cache_config": CacheConfig,
    "attention_config": AttentionConfig,
    "kernel_config": KernelConfig,
    "load_config": LoadConfig,
}

JUDGED_ON_THEIR_OWN = {"hf_config", "max_model_len"}


def names_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("kind", list(COUNTS), ids=lambda kind: kind.__name__)
def test_every_setting_of_the_tested_version_is_decided(kind: type) -> None:
    assert names_of(kind) == COUNTS[kind] | DOES_NOT[kind]
    assert not COUNTS[kind] & DOES_NOT[kind]


@pytest.mark.parametrize(
    ("part", "name"),
    [(part, name) for part, kind in PARTS.items() for name in sorted(names_of(kind) - JUDGED_ON_THEIR_OWN)],
)
def test_a_setting_counts_unless_it_is_known_not_to(plain_config: Any, vllm_config: Any, part: str, name: str) -> None:
    object.__setattr__(getattr(vllm_config, part), name, "something else")
    same = config_digest(settings_of(vllm_config)) == config_digest(settings_of(plain_config))
    assert same is (name in DOES_NOT[PARTS[part]])


@pytest.mark.parametrize("name", sorted(names_of(VllmConfig) - {*PARTS, "parallel_config"}))
def test_so_does_a_whole_group_of_settings(plain_config: Any, vllm_config: Any, name: str) -> None:
    object.__setattr__(vllm_config, name, "something else")
    same = config_digest(settings_of(vllm_config)) == config_digest(settings_of(plain_config))
    assert same is (name in settings.ENGINE_DOES_NOT_MATTER)


def test_an_unknown_setting_counts() -> None:
    @dataclasses.dataclass
    class Newer:
        block_size: int = 16
        rotate_keys: bool = False

    found = settings.fields_of(Newer())
    assert set(found) - settings.CACHE_DOES_NOT_MATTER == {"rotate_keys"}


def digest_with(vllm_config: Any, **changed: Any) -> str:
    vllm_config.model_config.hf_config.update(changed)
    return config_digest(settings_of(vllm_config))


@pytest.mark.parametrize(
    "changed", [{"rms_norm_eps": 1e-6}, {"architectures": ["MistralForCausalLM"]}, {"a_new_one": 1}], ids=str
)
def test_the_model_s_effective_settings_count(plain_config: Any, vllm_config: Any, changed: dict[str, Any]) -> None:
    assert digest_with(vllm_config, **changed) != config_digest(settings_of(plain_config))


def test_its_bookkeeping_does_not(plain_config: Any, vllm_config: Any) -> None:
    vllm_config.model_config.hf_config.name_or_path = "/elsewhere"
    assert digest_with(vllm_config, eos_token_id=7, use_cache=False) == config_digest(settings_of(plain_config))
    assert "eos_token_id" in HF_DOES_NOT_MATTER


@pytest.mark.parametrize(
    ("rope", "counts"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, False),
        ({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}, False),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, True),
        ({"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.0]}, True),
        ({"rope_type": "a new one"}, True),
        ({"local": {"rope_type": "default"}, "global": {"rope_type": "longrope"}}, True),
        ({"local": {"rope_type": "default"}, "global": {"type": "longrope"}}, True),
    ],
    ids=["default", "yarn", "dynamic", "longrope", "unknown", "one layer's", "one layer's, old form"],
)
def test_the_longest_prompt_counts_only_where_angles_depend_on_it(
    vllm_config: Any, rope: dict[str, Any], counts: bool
) -> None:
    object.__setattr__(vllm_config.model_config.hf_config, "rope_parameters", rope)
    before = config_digest(settings_of(vllm_config))
    vllm_config.model_config.max_model_len = 128
    assert (config_digest(settings_of(vllm_config)) != before) is counts


def test_the_old_form_of_rope_settings_is_known_too(vllm_config: Any) -> None:
    before = digest_with(vllm_config, rope_scaling={"type": "dynamic", "factor": 2.0})
    vllm_config.model_config.max_model_len = 128
    assert config_digest(settings_of(vllm_config)) != before


def test_how_layers_are_parted_counts_with_several_stages(
    plain_config: Any, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_config.parallel_config.pipeline_parallel_size = 2
    for config, differs in ((plain_config, False), (vllm_config, True)):
        monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
        before = config_digest(settings_of(config))
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")
        assert (config_digest(settings_of(config)) != before) is differs


def test_settings_of_media_can_be_digested(plain_config: Any, vllm_config: Any) -> None:
    vllm_config.model_config.multimodal_config = MultiModalConfig()
    assert config_digest(settings_of(vllm_config)) != config_digest(settings_of(plain_config))


def test_settings_of_adapters_count_for_adapters_only(plain_config: Any, vllm_config: Any) -> None:
    vllm_config.lora_config = LoRAConfig(max_lora_rank=8, lora_dtype="float16")
    assert config_digest(settings_of(vllm_config)) == config_digest(settings_of(plain_config))
    before = config_digest(adapter_settings_of(vllm_config))
    vllm_config.lora_config = LoRAConfig(max_lora_rank=16, lora_dtype="float16", max_loras=2)
    assert config_digest(adapter_settings_of(vllm_config)) == before
    vllm_config.lora_config = LoRAConfig(max_lora_rank=8, lora_dtype="float16", target_modules=["q_proj"])
    assert config_digest(adapter_settings_of(vllm_config)) != before
    assert adapter_settings_of(plain_config) == {}


def test_a_setting_of_which_no_digest_can_be_made_is_named(vllm_config: Any) -> None:
    vllm_config.additional_config = {"hook": lambda: None}
    with pytest.raises(IdentityError, match=r"engine additional_config\.hook holds a function"):
        config_digest(settings_of(vllm_config))


def test_two_starts_with_the_same_settings_have_the_same_digest(model_folder: Any, plain_config: Any) -> None:
    from tests.integrations.vllm.engine import engine_config

    again = engine_config(model_folder, gpu_memory_utilization=0.5, max_num_seqs=3, served_model_name="other", seed=7)
    assert config_digest(settings_of(again)) == config_digest(settings_of(plain_config))
