"""Small LoRA adapters in the file format of PEFT, with random weights, large enough to change what a model says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
STRENGTH = 0.06
"""Of both matrices' entries: their product then moves the projections as much as a wild training would."""


def write_adapter(folder: Path, model: Path, *, seed: int) -> Path:
    """An adapter on queries, keys and values of every layer of the Llama in `model`. Another seed is what another
    training would have made of it. Replaces what `folder` held."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    widths = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in widths.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) * STRENGTH
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, RANK, generator=random) * STRENGTH
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2))
    return folder
