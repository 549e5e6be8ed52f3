"""The folder of a model of a few thousand parameters, with a tokenizer whose tokens are words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.integrations.tiny import VOCABULARY, tiny_llama

WORDS = ["[UNK]", "<s>", *(f"w{number}" for number in range(2, VOCABULARY))]


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="<s>").save_pretrained(folder)


def tiny_folder(folder: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    tiny_llama(dtype=dtype, **changes).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def words(count: int, *, seed: int = 0) -> str:
    """A prompt of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[int(one)] for one in torch.randint(2, VOCABULARY, (count,), generator=generator))
