"""What can be wrong with a model, an adapter or prompts, and how it is said."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from tests.evaluation.tiny_folder import save_tokenizer, tiny_folder, words
from tests.integrations.tiny import VOCABULARY
from tierkv.errors import ConfigError, IdentityError, UnsupportedModel
from tierkv.evaluation.loading import Tokens, digest_of_prompts, haystack, load, make_codec, require_cache_room
from tierkv.evaluation.messages import EvalPrompt
from tierkv.integrations.kv_blocks import BlockShape
from tierkv.node.memory_room import MemoryRoom
from tierkv.storage.manifest import fingerprint_model

pytestmark = pytest.mark.engine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "tiny")


def test_a_model_is_ready_with_its_fingerprint_and_shape(folder: Path) -> None:
    ready = load(folder, None, data_dir="", block_tokens=8)
    assert ready.loaded.weights == fingerprint_model(folder).fingerprint
    assert (ready.adapter, ready.shape.block_tokens, ready.context_tokens) == ("", 8, 4096)
    codec = make_codec("fp8_e4m3", ready.shape)
    assert sum(codec.block_bytes) < ready.shape.block_bytes / 3


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="holds no weight files"):
        load(tmp_path, None, data_dir="", block_tokens=8)


def test_weights_that_the_library_can_not_load_are_named(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"{folder} can't be loaded"):
        load(folder, None, data_dir="", block_tokens=8)


def test_a_folder_without_a_configuration_is_named_before_the_library_is_asked(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=f"{folder} holds no config.json; name the folder"):
        load(folder, None, data_dir="", block_tokens=8)


def test_a_model_larger_than_memory_is_not_even_tried(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"take about .* free on this box; stop what else"):
        load(folder, None, data_dir="", block_tokens=8, room=lambda: MemoryRoom(1000, "this box"))


def test_caches_larger_than_memory_are_not_even_tried(folder: Path) -> None:
    ready = load(folder, None, data_dir="", block_tokens=8)
    require_cache_room(ready, 1_000, MemoryRoom(2**30, "this box"))
    with pytest.raises(ConfigError, match="caches of 1,000 tokens take about"):
        require_cache_room(ready, 1_000, MemoryRoom(1_000_000, "this box"))


def test_a_model_without_a_cache_of_blocks_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises((UnsupportedModel, ConfigError), match=r"encoder-decoder|can't be loaded"):
        load(tmp_path, None, data_dir="", block_tokens=8)


def test_a_cache_of_other_numbers_is_refused() -> None:
    with pytest.raises(ConfigError, match="its cache holds float64"):
        make_codec("fp8_e4m3", BlockShape(1, 1, 4, 8, torch.float64))


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"x" * 100)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    return folder


@pytest.mark.skipif(importlib.util.find_spec("peft") is not None, reason="peft is installed here")
def test_an_adapter_without_the_package_that_runs_it_says_which_one(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install peft") as raised:
        load(folder, adapter(tmp_path / "lora"), data_dir="", block_tokens=8)
    assert raised.value.field == "adapter"


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed here")
def test_an_adapter_that_is_none_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit the model"):
        load(folder, adapter(tmp_path / "lora"), data_dir="", block_tokens=8)


# ---- tokens


def test_prompts_are_texts_tokens_or_chats(folder: Path) -> None:
    tokens = Tokens(folder)
    assert tokens.of(EvalPrompt(line=1, text="w5 w6"), VOCABULARY) == [5, 6]
    assert tokens.of(EvalPrompt(line=1, tokens=[7, 8]), VOCABULARY) == [7, 8]
    with pytest.raises(ConfigError, match="line 3: the model's chat template does not take it"):
        tokens.of(EvalPrompt(line=3, messages=[{"role": "user", "content": "w5"}]), VOCABULARY)


def test_a_chat_goes_through_the_models_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for one in messages %}w9 {{ one.content }} {% endfor %}w10")
    chat = EvalPrompt(line=1, messages=[{"role": "user", "content": "w5"}])
    assert Tokens(folder).of(chat, VOCABULARY) == [9, 5, 10]


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**40])
def test_a_token_that_the_model_does_not_know_is_named_by_its_line(folder: Path, token: int) -> None:
    with pytest.raises(ConfigError, match=f"line 4: a token id is beyond the model's {VOCABULARY}"):
        Tokens(folder).of(EvalPrompt(line=4, tokens=[1, token]), VOCABULARY)


def test_without_a_tokenizer_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer that can be used"):
        Tokens(tmp_path)


def test_hay_has_no_special_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    made = haystack(Tokens(tmp_path), [[1, 5, 0, 6], [7]], 4096, long_context=False)
    assert (made.hay, made.start) == ([5, 6, 7], [])


def test_the_digest_is_of_every_token_and_where_prompts_end() -> None:
    digests = {digest_of_prompts(one) for one in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[3], [1, 2]], [])}
    assert len(digests) == 5
    assert words(5) == words(5)
