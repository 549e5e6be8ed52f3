"""Token ids of raw text, by the tokenizer of a model: for commands that are given a prompt as a file."""

from __future__ import annotations

from transformers import AutoTokenizer


def token_ids(text: str, tokenizer: str) -> list[int]:
    """As an engine makes them of a prompt that is no chat: with the special tokens that the tokenizer adds by itself,
    and no template. `tokenizer` is a directory, or a name that this machine has in its cache; nothing is fetched.
    Raises OSError or ValueError where there is none."""
    loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    return [int(one) for one in loaded(text)["input_ids"]]
