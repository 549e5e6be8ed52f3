"""Models of a few thousand parameters, made on the spot."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64
LAYERS, HEADS, HEAD_DIM = 2, 2, 8


def tiny_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(settings | changes))


def tiny_llama(*, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes)).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # of a size at which the next token depends on the prompt
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return model


def prompt(count: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (1, count), generator=generator)
