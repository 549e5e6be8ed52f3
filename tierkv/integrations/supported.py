"""Which models and which requests a block cache serves rightly. All others are refused with the reason, never tried.

Blocks can be shared between prompts only if the KV of a token depends on nothing but the tokens up to it, and if
the cache keeps it for all of them. `check_model` asks the settings, then `probe` asks the model.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from tierkv.errors import UnsupportedModel

PROBE_TOKENS = 16
# Splitting a prompt changes the order of sums, so rounding: 2 % after the 30 layers of a small model in bf16. Where a
# token sees its successors, the KV is another one: 60 % there. Ids are spread, because the first few of a vocabulary
# are often special ones that a model hardly tells apart, and there rounding alone makes 12 %.
PROBE_TOLERANCE = 0.2
PROBE_STRIDE = 7_919

SERVED_DEVICES = frozenset({"cpu", "cuda"})

LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})


def check_model(model: Any, *, adapter: str = "") -> None:
    """UnsupportedModel unless the settings promise what blocks need. `adapter` is the fingerprint of adapter files that
    the caller put into the identity."""
    config = model.config
    if config.is_encoder_decoder:
        raise UnsupportedModel("an encoder-decoder model: its decoder's KV depends on the encoder's input")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModel("a multi-modal model: block keys are made of token ids, and images have none")
    if not model.can_generate():
        raise UnsupportedModel(f"{type(model).__name__} has no language-model head to generate with")
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise UnsupportedModel("bidirectional attention: the KV of a token depends on the tokens behind it")
    _check_layers(model)
    _check_rope(config)
    if getattr(model, "_hf_peft_config_loaded", False) and not adapter:
        raise UnsupportedModel("an adapter is loaded, but its fingerprint is not in the identity")
    check_state(model)


def check_state(model: Any) -> None:
    """What may change while a model is in use."""
    if model.training:
        raise UnsupportedModel("the model is in training mode, where dropout changes the KV: call model.eval()")
    devices = {str(tensor.device) for tensor in model.parameters()}
    if len(devices) != 1 or device_of(model).type not in SERVED_DEVICES:
        raise UnsupportedModel(
            f"weights on {', '.join(sorted(devices))}: models on the CPU or on one CUDA device are served"
        )


def device_of(model: Any) -> torch.device:
    """Where its weights are, as far as the first one tells."""
    device: torch.device = next(iter(model.parameters())).device
    return device


def probe(model: Any) -> DynamicCache:
    """Prove on the model itself that a prefix may be computed alone: PROBE_TOKENS tokens in one pass and in two must
    give the same KV but for rounding. Returns the cache of the one pass, whose layers show the shapes."""
    spread = torch.arange(1, PROBE_TOKENS + 1, device=device_of(model)) * PROBE_STRIDE
    tokens = spread.remainder(model.config.vocab_size - 1).unsqueeze(0) + 1
    half = PROBE_TOKENS // 2
    with torch.inference_mode():
        whole, split = DynamicCache(config=model.config), DynamicCache(config=model.config)
        forward(model, tokens, whole)
        forward(model, tokens[:, :half], split)
        forward(model, tokens, split)
        for index, (one, other) in enumerate(zip(whole.layers, split.layers, strict=True)):
            for name in ("keys", "values"):
                expected, found = getattr(one, name), getattr(other, name)
                if expected is None or found is None or expected.dim() != 4 or expected.shape != found.shape:
                    raise UnsupportedModel(f"layer {index} does not keep {name} as [batch, head, token, dim]")
                if _distance(expected, found) > PROBE_TOLERANCE:
                    raise UnsupportedModel(f"layer {index}: the KV of a prefix depends on what follows it")
    return whole


def forward(model: Any, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Run the model on those of `tokens`, int64 [1, all tokens of the prompt], that the cache doesn't hold, and return
    the logits of the last one, [1, vocabulary]. The mask covers all tokens: without it the library takes the
    rest for a whole prompt."""
    begin = cache.get_seq_length()
    fewer_logits = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(
        input_ids=tokens[:, begin:],
        attention_mask=torch.ones_like(tokens),
        past_key_values=cache,
        use_cache=True,
        **fewer_logits,
    )
    if cache.get_seq_length() != tokens.shape[1]:
        raise UnsupportedModel(f"the cache holds {cache.get_seq_length()} tokens after a prompt of {tokens.shape[1]}")
    logits: torch.Tensor = output.logits[:, -1]
    return logits


def check_tokens(input_ids: torch.Tensor) -> torch.Tensor:
    """The prompt as int64 [1, tokens]. UnsupportedModel for a batch, ValueError for what is no prompt."""
    tokens = input_ids.unsqueeze(0) if input_ids.dim() == 1 else input_ids
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] == 0:
        raise ValueError(f"input_ids are whole numbers, [tokens] or [1, tokens], not {tuple(input_ids.shape)}")
    if tokens.shape[0] != 1:
        raise UnsupportedModel(f"a batch of {tokens.shape[0]} prompts: only one prompt at a time is served so far")
    return tokens.to(torch.int64)


def check_generation(model: Any, options: dict[str, Any]) -> None:
    """UnsupportedModel for options of `generate` under which the cache is not the KV of one growing sequence."""
    given = copy.deepcopy(options.get("generation_config") or model.generation_config)
    settings = {name: value for name, value in options.items() if name not in _ARGUMENTS_OF_GENERATE}
    model_inputs = given.update(**settings)
    mask = model_inputs.pop("attention_mask", None)
    if mask is not None and not bool((mask == 1).all()):
        raise UnsupportedModel("attention_mask hides tokens: a padded prompt is not served")
    if model_inputs:
        raise UnsupportedModel(f"{', '.join(sorted(model_inputs))}: inputs besides the tokens may change the KV")
    for name in _REFUSED_ARGUMENTS:
        if options.get(name) is not None:
            raise UnsupportedModel(f"{name}: the cache is not the KV of one growing sequence")
    for name, harmless in _HARMLESS_SETTINGS.items():
        value = getattr(given, name, None)
        if value is None:
            value = getattr(model.generation_config, name, None)
        if value is not None and value not in harmless:
            raise UnsupportedModel(f"{name}={value!r}: the cache is not the KV of one growing sequence")


_ARGUMENTS_OF_GENERATE = frozenset(
    {
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "streamer",
        "tokenizer",
        "synced_gpus",
        "assistant_model",
        "assistant_tokenizer",
        "custom_generate",
        "negative_prompt_ids",
        "negative_prompt_attention_mask",
        "trust_remote_code",
    }
)
_REFUSED_ARGUMENTS = ("assistant_model", "custom_generate", "negative_prompt_ids", "synced_gpus")
_HARMLESS_SETTINGS: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "use_cache": (True,),
    "cache_implementation": (),
    "prompt_lookup_num_tokens": (),
    "prefill_chunk_size": (),
    "penalty_alpha": (0, 0.0),
    "dola_layers": (),
    "constraints": (),
    "force_words_ids": (),
    "assistant_early_exit": (),
    "token_healing": (False,),
    "guidance_scale": (1, 1.0),
}


def _check_layers(model: Any) -> None:
    layers = DynamicCache(config=model.config).layers
    if not layers:
        raise UnsupportedModel("the library has no cache of known layers for this model")
    for index, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            raise UnsupportedModel(f"layer {index} is recurrent: its state is not made of blocks of tokens")
        if isinstance(layer, DynamicSlidingWindowLayer):
            raise UnsupportedModel(f"layer {index} has a sliding window: its cache forgets the tokens before it")
        if type(layer) is not DynamicLayer:
            raise UnsupportedModel(
                f"layer {index} keeps a {type(layer).__name__}, which holds more than keys and values"
            )


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have one set of parameters for each kind.
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = parameters.get("rope_type")
        if kind in LENGTH_DEPENDENT_ROPES:
            raise UnsupportedModel(f"rope type {kind!r}: the keys of a prefix depend on the length of the whole prompt")


def _distance(expected: torch.Tensor, found: torch.Tensor) -> float:
    wide = expected.to(torch.float32)
    return float((wide - found.to(torch.float32)).norm() / wide.norm().clamp_min(1e-9))
