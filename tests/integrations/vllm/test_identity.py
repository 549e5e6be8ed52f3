from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import KVCacheTensor, UniformTypeKVCacheSpecs

from tests.integrations.vllm.engine import BLOCK_TOKENS, NUM_BLOCKS, full_attention, kv_config
from tests.integrations.vllm.test_supported import sliding
from tierkv.errors import LayoutMismatch
from tierkv.integrations.vllm.identity import EngineIdentity, join_salts, owned_layers, shard_rank
from tierkv.integrations.vllm.packing import packing_name
from tierkv.integrations.vllm.weights import Weights

WEIGHTS = Weights(name="tiny-llama", fingerprint="ab" * 32)
PAGE_BYTES = 2 * 32 * 4 * BLOCK_TOKENS
"""Of one layer: keys and values of one head of 32 numbers of 4 bytes."""


def group_key(vllm_config: Any, kv_cache_config: Any, **request: str) -> bytes:
    return EngineIdentity.of(vllm_config, kv_cache_config).for_request(WEIGHTS, **request).group_key()


def test_the_layout_says_how_a_block_lies_in_memory(plain_config: Any, kv_cache_config: Any) -> None:
    layout = EngineIdentity.of(plain_config, kv_cache_config).layout
    assert layout.dtype == "float32"
    assert layout.block_bytes == (2 * PAGE_BYTES,)
    assert layout.axes == "group,layer,head,token,key+value"
    assert layout.block_tokens == BLOCK_TOKENS
    release, backend, device, packing, order, version = layout.engine.split("/")
    assert (release, backend, device, order, version) == ("vllm-0.32", "CPU_ATTN", "cpu", "LBHNC", "v1")
    assert packing == packing_name(plain_config, kv_cache_config)


def test_packing_is_what_vllm_s_own_function_says(plain_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def decide(*given: Any) -> str:
        asked.append(given)
        return "amx"

    monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa", decide)
    assert packing_name(plain_config, kv_config()).endswith("-amx")
    assert asked == [(plain_config.model_config.dtype, BLOCK_TOKENS, 32, "auto")]


def test_blocks_that_are_packed_otherwise_are_others(
    plain_config: Any, kv_cache_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for isa in ("amx", "vec"):
        monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *given, isa=isa: isa)
        keys.add(group_key(plain_config, kv_cache_config))
    assert len(keys) == 2


def test_elsewhere_than_on_a_cpu_blocks_are_plain(vllm_config: Any, kv_cache_config: Any) -> None:
    vllm_config.device_config.device_type = "cuda"
    assert packing_name(vllm_config, kv_cache_config) == "plain"


def test_an_identity_is_the_same_at_the_next_start(model_folder: Any, plain_config: Any, kv_cache_config: Any) -> None:
    from tests.integrations.vllm.engine import engine_config

    assert group_key(engine_config(model_folder), kv_config()) == group_key(plain_config, kv_cache_config)


def test_what_changes_kv_changes_the_group(plain_config: Any, vllm_config: Any) -> None:
    def key(*specs: Any, config: Any = plain_config, **changed: Any) -> bytes:
        return group_key(config, kv_config(*specs, **changed))

    other_release = replace(EngineIdentity.of(plain_config, kv_config()), config="cd" * 32)
    wider = vllm_config
    wider.parallel_config.tensor_parallel_size = 2
    keys = [
        key(),
        key(full_attention(num_kv_heads=2)),
        key(layers=3),
        key(layout="LBNHC"),
        key(full_attention(), sliding()),
        key(sliding()),  # what lies behind the window may be missing
        key(sliding(sliding_window=32)),
        key(config=wider),
        group_key(plain_config, kv_config(), salt="a tenant"),
        group_key(plain_config, kv_config(), adapter="ef" * 32),
        other_release.for_request(WEIGHTS).group_key(),
        EngineIdentity.of(plain_config, kv_config()).for_request(replace(WEIGHTS, fingerprint="cd" * 32)).group_key(),
        EngineIdentity.of(plain_config, kv_config()).for_request(replace(WEIGHTS, settings="cd" * 32)).group_key(),
        EngineIdentity.of(plain_config, kv_config(), salt="an operator").for_request(WEIGHTS).group_key(),
    ]
    assert len(set(keys)) == len(keys)


def test_a_random_epoch_leaves_no_fingerprint(plain_config: Any, kv_cache_config: Any) -> None:
    engine = EngineIdentity.of(plain_config, kv_cache_config)
    found = engine.for_request(Weights(name="", epoch="12" * 16, problem="unproven"))
    assert found.find_gap() is None
    assert not found.is_persistent
    assert found.weights == ""


def test_a_renewed_engine_finds_nothing_of_before_and_shares_nothing(plain_config: Any, kv_cache_config: Any) -> None:
    engine = EngineIdentity.of(plain_config, kv_cache_config)
    identities = [one.for_request(WEIGHTS) for one in (engine, engine.renewed(), engine.renewed().renewed())]
    assert len({identity.group_key() for identity in identities}) == 3
    assert [identity.is_persistent for identity in identities] == [True, False, False]
    assert identities[1].find_gap() is None


def test_settings_of_which_no_digest_can_be_made_are_never_two_times_the_same(
    vllm_config: Any, kv_cache_config: Any
) -> None:
    vllm_config.additional_config = {"hook": object()}
    assert group_key(vllm_config, kv_cache_config) != group_key(vllm_config, kv_cache_config)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (4, 1), (1, 3), (2, 3)])
def test_each_worker_s_share_of_a_block_has_a_number(
    vllm_config: Any, kv_cache_config: Any, tensor: int, pipeline: int
) -> None:
    parallel = vllm_config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = tensor, pipeline
    parallel.world_size = tensor * pipeline
    ranks = [shard_rank(with_rank(parallel, rank)) for rank in range(parallel.world_size)]
    found = EngineIdentity.of(vllm_config, kv_cache_config).parallel
    assert ranks == list(range(found.shards))
    assert (found.tensor, found.pipeline) == (tensor, pipeline)


def with_rank(parallel: Any, rank: int) -> Any:
    parallel.rank = rank
    return parallel


def test_data_parallelism_does_not_matter(plain_config: Any, vllm_config: Any, kv_cache_config: Any) -> None:
    vllm_config.parallel_config.data_parallel_size = 2
    vllm_config.parallel_config.data_parallel_rank = 1
    assert group_key(vllm_config, kv_cache_config) == group_key(plain_config, kv_cache_config)


def test_layers_that_use_the_kv_of_others_are_not_in_a_block(plain_config: Any) -> None:
    config = kv_config(layers=3)
    config.kv_cache_tensors[0].layers = config.kv_cache_tensors[0].layers[:2]
    assert owned_layers(config) == (("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"),)
    assert EngineIdentity.of(plain_config, config).layout.block_bytes == (2 * PAGE_BYTES,)


def test_bytes_of_layers_that_differ_are_told_without_their_specs(plain_config: Any) -> None:
    """The scheduler is given the spec of one layer only."""
    narrow, wide = full_attention(), full_attention(num_kv_heads=2)
    names = ["model.layers.0", "model.layers.1"]
    specs = dict(zip(names, (narrow, wide), strict=True))
    spec = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=specs)
    config = kv_config()
    group = config.kv_cache_groups[0]
    group.layer_names = names
    config.kv_cache_tensors = [
        KVCacheTensor(
            size=one.page_size_bytes * NUM_BLOCKS,
            layers=[name],
            layer_stride=one.page_size_bytes * NUM_BLOCKS,
            block_stride=one.page_size_bytes,
        )
        for name, one in specs.items()
    ]
    sides = []
    for group.kv_cache_spec in (spec, narrow):
        sides.append(EngineIdentity.of(plain_config, config).layout)
    assert sides[0] == sides[1]
    assert sides[0].block_bytes == (3 * PAGE_BYTES,)


def test_in_layouts_with_the_block_outermost_bytes_are_the_same(plain_config: Any) -> None:
    config = kv_config(layout="BLHNC")
    tensor = config.kv_cache_tensors[0]
    tensor.layer_stride, tensor.block_stride = PAGE_BYTES, 2 * PAGE_BYTES
    assert EngineIdentity.of(plain_config, config).layout.block_bytes == (2 * PAGE_BYTES,)


def test_each_group_has_its_own_size(plain_config: Any) -> None:
    config = kv_config(full_attention(), sliding(num_kv_heads=2), layers=3)
    assert EngineIdentity.of(plain_config, config).layout.block_bytes == (3 * PAGE_BYTES, 6 * PAGE_BYTES)


def test_a_worker_with_another_layout_than_the_scheduler_s_says_where(plain_config: Any) -> None:
    told = EngineIdentity.of(plain_config, kv_config()).for_request(WEIGHTS)
    EngineIdentity.of(plain_config, kv_config()).check_same(told)
    with pytest.raises(LayoutMismatch, match="block_bytes"):
        EngineIdentity.of(plain_config, kv_config(layers=3)).check_same(told)


def test_a_quantized_cache_is_not_the_plain_one(plain_config: Any, vllm_config: Any, kv_cache_config: Any) -> None:
    object.__setattr__(vllm_config.cache_config, "cache_dtype", "bfloat16")
    layout = EngineIdentity.of(vllm_config, kv_cache_config).layout
    assert layout.dtype == "float32:bfloat16"
    assert layout != EngineIdentity.of(plain_config, kv_cache_config).layout


SALTS = st.text(max_size=6) | st.sampled_from(["", "[", '["a"]', '["a", "b"]', "x" * 257, "x" * 300])


@given(st.lists(st.tuples(SALTS, SALTS), min_size=2, max_size=6, unique=True))
def test_no_two_pairs_of_salts_look_alike(pairs: list[tuple[str, str]]) -> None:
    for one, other in itertools.combinations(pairs, 2):
        assert join_salts(*one) != join_salts(*other)


def test_the_operator_s_salt_alone_stays_as_it_is() -> None:
    """So that what is purged by it, or made by another integration, has the same one."""
    assert join_salts("", "") == ""
    assert join_salts("a department", "") == "a department"


def test_a_long_salt_of_a_request_fits_the_wire() -> None:
    assert len(join_salts("operator", "x" * 100_000)) < 200
