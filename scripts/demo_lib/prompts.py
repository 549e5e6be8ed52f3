"""The demo's prompts: a chat and a code assistant that share a system prompt, as token ids of the model.

The code assistant is shown files of this repository, as many lines of them as the wanted length has room for.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parent / "texts"
REPOSITORY = Path(__file__).parents[2]
CODE_FILES = (
    "tierkv/core/keys.py",
    "tierkv/core/identity.py",
    "tierkv/core/reasons.py",
    "tierkv/core/instructions.py",
    "tierkv/wire/session.py",
    "tierkv/wire/messages.py",
)

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`second` is another request of the same kind: its beginning is `tokens`' own, its end is not."""

    name: str
    tokens: list[int]
    second: list[int]


def count_shared(one: list[int], other: list[int]) -> int:
    """Tokens that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def make_prompts(tokenizer: Any, *, code_tokens: int) -> list[Prompt]:
    system = {"role": "system", "content": _text("system.txt")}

    def tokens_of(messages: list[Message]) -> list[int]:
        text = tokenizer.apply_chat_template([system, *messages], tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    chat = Prompt("chat", tokens_of(_conversation("chat.txt")), tokens_of(_conversation("chat_second.txt")))
    question, second = _text("code_question.txt"), _text("code_question_second.txt")
    lines = _lines_of_code()
    kept = bisect_right(
        range(len(lines)), code_tokens, key=lambda count: len(tokens_of(_code_request(lines[:count], question)))
    )
    files = lines[: max(0, kept - 1)]
    code = Prompt("code", tokens_of(_code_request(files, question)), tokens_of(_code_request(files, second)))
    return [chat, code]


def _text(name: str) -> str:
    return (TEXTS / name).read_text().strip()


def _conversation(name: str) -> list[Message]:
    messages = []
    for part in _text(name).split("## ")[1:]:
        role, _, content = part.partition("\n")
        messages.append({"role": role.strip(), "content": content.strip()})
    return messages


def _lines_of_code() -> list[str]:
    return [line for name in CODE_FILES for line in [f"### {name}", *(REPOSITORY / name).read_text().splitlines(), ""]]


def _code_request(lines: list[str], question: str) -> list[Message]:
    return [{"role": "user", "content": "\n".join([*lines, "", question])}]
