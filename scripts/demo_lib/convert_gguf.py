"""usage: convert_gguf.py FILE.gguf FOLDER       the model as bf16 safetensors, with tokenizer and chat template"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging


def convert(gguf: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Without dequantize the weights stay packed, and packed ones can't be saved.
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=plain, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    logging.set_verbosity_error()
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
