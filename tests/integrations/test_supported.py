from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.integrations.tiny import prompt, tiny_config, tiny_llama
from tierkv.errors import UnsupportedModel
from tierkv.integrations.supported import check_generation, check_model, check_tokens, forward, probe

pytestmark = pytest.mark.engine


def test_a_plain_decoder_is_served() -> None:
    model = tiny_llama()
    check_model(model)
    assert probe(model).get_seq_length() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_of_any_element_type_passes_the_probe(dtype: torch.dtype) -> None:
    probe(tiny_llama(dtype=dtype))


def test_learned_positions_are_served() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    check_model(model)
    probe(model)


def mistral(**changes: Any) -> MistralForCausalLM:
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MistralForCausalLM(MistralConfig(**(settings | changes))).eval()


def test_a_sliding_window_is_refused_and_full_attention_of_the_same_kind_served() -> None:
    with pytest.raises(UnsupportedModel, match="layer 0 has a sliding window"):
        check_model(mistral(sliding_window=8))
    check_model(mistral(sliding_window=None))


def test_recurrent_layers_are_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)).eval()
    with pytest.raises(UnsupportedModel, match="recurrent"):
        check_model(model)


def test_an_encoder_decoder_is_refused() -> None:
    config = BartConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        check_model(BartForConditionalGeneration(config).eval())


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        check_model(LlamaModel(tiny_config()).eval())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_of_the_prompt_are_refused(kind: str) -> None:
    model = tiny_llama()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match=f"rope type '{kind}'"):
        check_model(model)
    model.config.rope_parameters = {"full_attention": {"rope_type": kind, "rope_theta": 10_000.0}}
    with pytest.raises(UnsupportedModel, match=f"rope type '{kind}'"):
        check_model(model)


def test_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="training mode"):
        check_model(tiny_llama().train())


def test_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="weights on meta"):
        check_model(tiny_llama().to("meta"))


def test_an_adapter_needs_its_fingerprint() -> None:
    model = tiny_llama()
    model._hf_peft_config_loaded = True
    with pytest.raises(UnsupportedModel, match="adapter"):
        check_model(model)
    check_model(model, adapter="ab" * 32)


def test_the_probe_finds_a_model_whose_tokens_see_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(attn_implementation="eager")
    everything: Any = model.model.forward

    def see_all(*arguments: Any, attention_mask: Any = None, **options: Any) -> Any:
        tokens = options["input_ids"].shape[1]
        length = tokens + options["past_key_values"].get_seq_length()
        return everything(*arguments, attention_mask=torch.zeros(1, 1, tokens, length), **options)

    monkeypatch.setattr(model.model, "forward", see_all)
    with pytest.raises(UnsupportedModel, match="depends on what follows"):
        probe(model)


def test_forward_computes_only_what_the_cache_lacks() -> None:
    model, tokens = tiny_llama(), prompt(20)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        forward(model, tokens[:, :12], cache)
        split = forward(model, tokens, cache)
        whole = model(tokens, use_cache=False).logits[:, -1]
    assert cache.get_seq_length() == 20
    assert torch.allclose(split, whole, atol=1e-4)


def test_a_prompt_may_come_with_or_without_its_batch_axis() -> None:
    assert check_tokens(torch.tensor([1, 2, 3], dtype=torch.int32)).tolist() == [[1, 2, 3]]
    assert check_tokens(torch.tensor([[1, 2, 3]])).dtype == torch.int64


def test_a_batch_of_prompts_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="batch of 2"):
        check_tokens(torch.ones(2, 5, dtype=torch.int64))


@pytest.mark.parametrize("bad", [torch.ones(1, 0, dtype=torch.int64), torch.ones(1, 3), torch.ones(1, 1, 1).long()])
def test_what_is_no_prompt_is_an_error(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="input_ids"):
        check_tokens(bad)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"use_cache": False},
        {"cache_implementation": "quantized"},
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded"},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 8},
        {"token_healing": True},
        {"assistant_model": object()},
        {"custom_generate": lambda *_: None},
        {"attention_mask": torch.tensor([[0, 1, 1]])},
        {"pixel_values": torch.ones(1)},
        {"inputs_embeds": torch.ones(1)},
        {"position_ids": torch.ones(1)},
        {"generation_config": GenerationConfig(num_beams=3)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_under_which_the_cache_is_not_one_sequence_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(options)).replace("generation_config", "num_beams")):
        check_generation(tiny_llama(), options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 5, "do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"attention_mask": torch.ones(1, 3)},
        {"num_beams": 1, "use_cache": True},
        {"generation_config": GenerationConfig(max_new_tokens=4), "streamer": object()},
        {"return_dict_in_generate": True, "output_scores": True},
        {"repetition_penalty": 1.2, "min_new_tokens": 3},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_ordinary_options_are_served(options: dict[str, Any]) -> None:
    check_generation(tiny_llama(), options)


def test_beams_set_in_the_model_s_own_generation_config_are_found() -> None:
    model = tiny_llama()
    model.generation_config.num_beams = 4
    with pytest.raises(UnsupportedModel, match="num_beams=4"):
        check_generation(model, {"generation_config": GenerationConfig(max_new_tokens=3, num_beams=None)})
