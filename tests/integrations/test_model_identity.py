from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.integrations.tiny import tiny_config, tiny_llama
from tierkv.errors import IdentityError
from tierkv.integrations import model_identity
from tierkv.integrations.identity_common import random_epoch
from tierkv.integrations.kv_blocks import BlockShape
from tierkv.integrations.model_identity import (
    DOES_NOT_MATTER,
    config_digest,
    identity_of,
    settings_of,
)

pytestmark = pytest.mark.engine

SHAPE = BlockShape(layers=2, heads=2, block_tokens=16, head_dim=8, dtype=torch.float32)
WEIGHTS = "ab" * 32


@pytest.mark.parametrize("name", sorted(tiny_config().to_dict()))
def test_a_setting_counts_unless_it_is_known_not_to(name: str) -> None:
    settings = tiny_config().to_dict()
    changed = settings | {name: "something else"}
    assert (config_digest(changed) == config_digest(settings)) is (name in DOES_NOT_MATTER)


def test_an_unknown_setting_counts() -> None:
    settings = tiny_config().to_dict()
    assert config_digest(settings | {"rotate_twice": False}) != config_digest(settings)


def test_the_settings_that_shape_the_kv_are_not_on_the_list() -> None:
    must_count = {"rope_parameters", "rope_theta", "sliding_window", "layer_types", "hidden_act", "head_dim", "dtype"}
    must_count |= {"num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "quantization_config", "pad_token_id"}
    assert not must_count & DOES_NOT_MATTER


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
        {"rms_norm_eps": 1.0000000001e-6},
        {"hidden_act": "gelu"},
    ],
)
def test_a_small_change_of_a_setting_is_another_config(change: dict[str, Any]) -> None:
    assert config_digest(tiny_config(**change).to_dict()) != config_digest(tiny_config().to_dict())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (1, "1"),
        (None, "None"),
        (None, False),
        ([], {}),
        ([1, 2], [[1], 2]),
        ([1, 2], [2, 1]),
        (["1", "23"], ["12", "3"]),
        ({"a": None}, {}),
        ({1: "x"}, {"1": "x"}),
        ({1, 2}, [1, 2]),
        (0.1, 0.1 + 1e-17 * 2),
        (0.0, -0.0),
        (math.inf, "inf"),
        (torch.float16, "torch.float16"),
    ],
)
def test_values_that_differ_have_digests_that_differ(one: object, other: object) -> None:
    alike = repr(one) == repr(other)
    assert (config_digest({"x": one}) == config_digest({"x": other})) is alike


Settings = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), Settings, max_size=4))
def test_the_order_of_the_settings_does_not_count(settings: dict[str, Any]) -> None:
    backwards = dict(reversed(list(settings.items())))
    assert config_digest(backwards) == config_digest(settings)


def test_a_setting_of_which_no_digest_can_be_made_is_named() -> None:
    with pytest.raises(IdentityError, match=r"config\.rope\[1\]"):
        config_digest({"rope": [1, object()]})


def test_the_digest_of_a_config_is_the_same_in_every_process() -> None:
    golden = config_digest({"a": 1, "b": [0.1, None, True], "c": {"d": "e"}, "use_cache": True})
    assert golden == "ef555259701b8169c9612fe172b74fc80211e6c691f594896f4101e74b21ee80"


def identity(model: Any = None, **changes: Any) -> Any:
    arguments: dict[str, Any] = {"weights": WEIGHTS}
    shape = changes.pop("shape", SHAPE)
    return identity_of(model or tiny_llama(), shape, **(arguments | changes))


def test_the_same_model_loaded_twice_has_one_identity() -> None:
    assert identity(tiny_llama(seed=1)) == identity(tiny_llama(seed=1))


def test_names_and_places_are_not_in_the_identity() -> None:
    model = tiny_llama()
    before = identity(model)
    model.config._name_or_path = "/somewhere/else"
    model.config.transformers_version = "4.0.0"
    model.name_or_path = "another"
    assert identity(model) == before


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "cd" * 32},
        {"adapter": "ef" * 32},
        {"salt": "tenant"},
        {"epoch": "1"},
        {"shape": replace(SHAPE, block_tokens=32)},
        {"shape": replace(SHAPE, dtype=torch.bfloat16)},
        {"shape": replace(SHAPE, dtype=torch.float16)},
        {"shape": replace(SHAPE, heads=1)},
    ],
)
def test_each_part_of_the_identity_makes_another_group(change: dict[str, Any]) -> None:
    assert identity(**change).group_key() != identity().group_key()


def test_bf16_and_fp16_blocks_of_equal_size_are_different_layouts() -> None:
    one = identity(shape=replace(SHAPE, dtype=torch.bfloat16)).layout
    other = identity(shape=replace(SHAPE, dtype=torch.float16)).layout
    assert one.block_bytes == other.block_bytes
    assert one != other


def test_a_model_converted_after_loading_is_not_one_loaded_in_that_type() -> None:
    converted = tiny_llama(dtype=torch.bfloat16)
    assert identity(converted).config != identity(tiny_llama()).config


def test_the_attention_implementation_is_in_config_and_layout() -> None:
    eager = tiny_llama(attn_implementation="eager")
    assert identity(eager).config != identity().config
    assert "/eager/cpu/" in identity(eager).layout.engine
    assert identity(eager).layout.engine != identity().layout.engine


def test_the_release_of_the_library_is_in_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity()
    monkeypatch.setattr(model_identity.transformers, "__version__", "99.1.2")
    assert identity().layout.engine.startswith("transformers-99.1/")
    assert identity().group_key() != before.group_key()


def test_lower_precision_of_products_is_another_config() -> None:
    model = tiny_llama()
    before = identity(model).config
    torch.set_float32_matmul_precision("medium")
    try:
        assert identity(model).config != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert identity(model).config == before


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_from_outside_of_the_library_is_part_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own_llama.py"
    path.write_text("from transformers import LlamaForCausalLM\nclass Own(LlamaForCausalLM): pass\n")
    module = load_module(path)
    monkeypatch.setitem(sys.modules, "own_llama", module)
    model = module.Own(tiny_config())
    before = config_digest(settings_of(model))
    assert before == config_digest(settings_of(model))

    path.write_text(path.read_text() + "# changed\n")
    assert config_digest(settings_of(model)) != before

    path.unlink()
    with pytest.raises(IdentityError, match="own_llama"):
        settings_of(model)


def test_an_epoch_is_never_the_same_twice() -> None:
    assert random_epoch() != random_epoch()
    assert not identity(epoch=random_epoch()).is_persistent
