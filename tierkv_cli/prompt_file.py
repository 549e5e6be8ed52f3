"""Prompts in a file, one a line, as requests of an engine's OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

_OF_OURS = {"max_tokens": 1, "stream": False, "n": 1}
_NOT_PASSED_ON = frozenset({*_OF_OURS, "max_completion_tokens", "stream_options", "model"})


class BadPrompt(ValueError):
    """Says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`path` is below the endpoint's /v1. `body` lacks the model."""

    line: int
    path: str
    body: dict[str, Any]


def read_lines(path: str) -> list[tuple[int, str]]:
    """(number, text) of every line that is not blank; "-" is the standard input. Raises OSError, UnicodeError."""
    if path == "-":
        lines = sys.stdin.read().splitlines()
    else:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    return [(number, line.rstrip("\r")) for number, line in enumerate(lines, start=1) if line.strip()]


def parse_prompt(number: int, line: str) -> Prompt:
    """A line that begins with { or " is JSON, any other is the prompt itself. Raises BadPrompt."""
    if not line.lstrip().startswith(("{", '"')):
        return _completion(number, line)
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadPrompt(f"it begins like JSON and isn't: {error}") from None
    if isinstance(value, str):
        return _completion(number, value)
    rest = {key: one for key, one in value.items() if key not in _NOT_PASSED_ON}
    if ("prompt" in value) == ("messages" in value):
        raise BadPrompt('an object needs one of "prompt" and "messages"')
    if "prompt" in value:
        return _completion(number, value["prompt"], rest)
    if not (isinstance(value["messages"], list) and value["messages"]):
        raise BadPrompt('"messages" is a list of messages')
    return Prompt(number, "chat/completions", rest | _OF_OURS)


def _completion(number: int, prompt: object, rest: dict[str, Any] | None = None) -> Prompt:
    is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    if not (is_tokens or (isinstance(prompt, str) and prompt)):
        raise BadPrompt('a prompt is text, or in an object under "prompt" a list of token ids')
    return Prompt(number, "completions", (rest or {}) | {"prompt": prompt} | _OF_OURS)
