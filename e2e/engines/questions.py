"""What the engines are asked: a chat, a code assistant, a shared system prompt. Each question has a name; what a vLLM
without tierkv answers is what every other answer is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from demo_lib.prompts import CODE_FILES, REPOSITORY, TEXTS

from e2e.engines.harness import BASE, Answer, Message, VllmServer

BLOCK_TOKENS = 64
NEW_TOKENS = 12
SMALL_CACHE = ("--num-gpu-blocks-override", "160")
"""Arguments of a vLLM that has room for what is asked at a time, and not for more: two of them run side by side."""
BURST = 8

TUNED = "tuned"
"""The adapter's name, before and after it was trained again."""

RETRAINED = "retrained"
"""The adapter that was trained again, where a server has both."""


@dataclass(frozen=True, slots=True)
class Question:
    messages: tuple[Message, ...]
    model: str = BASE


def _text(name: str) -> str:
    return (TEXTS / name).read_text().strip()


def _code(which: int, characters: int) -> str:
    name = CODE_FILES[which]
    return f"### {name}\n{Path(REPOSITORY, name).read_text()[:characters]}"


def _ask(system: str, user: str, model: str = BASE) -> Question:
    return Question(({"role": "system", "content": system}, {"role": "user", "content": user}), model)


def _turns() -> list[str]:
    """What the user says in the chat, turn by turn."""
    parts = _text("chat.txt").split("## user\n")[1:]
    return [part.partition("## assistant\n")[0].strip() for part in parts]


TURNS = _turns()[:3]
CHAT_SYSTEM = " ".join(_text("system.txt").split()[:120])

_help = partial(_ask, _text("system.txt"))
_reviewer = "You are a careful reviewer of Python code."
_chat_start = _text("chat.txt")[:600]
_code_0, _code_1 = _code(0, 1_600), _code(1, 900)

QUESTIONS: dict[str, Question] = {
    "help 1": _help("A customer asks why two of his loggers disagree by 12 mm. What do I tell him?"),
    "help 2": _help("May I restart the export tonight without asking anybody?"),
    "known": _ask("You are a patient teacher.", f"{_code(1, 3_000)[2_400:]}\n\nWhat does it do?"),
    "code 1": _ask(_reviewer, f"{_code_0}\n\n{_text('code_question.txt')}"),
    "code 2": _ask(_reviewer, f"{_code_0}\n\n{_text('code_question_second.txt')}"),
    "tuned": _ask(_reviewer, f"{_code_1}\n\nWhat is this for?", TUNED),
    "retrained": _ask(_reviewer, f"{_code_1}\n\nWhat is this for?", RETRAINED),
    "untuned": _ask(_reviewer, f"{_code_1}\n\nWhat is this for?"),
    "shared 1": _ask(_reviewer, f"{_code(2, 900)}\n\nWhat is missing here?"),
    "shared 2": _ask(_reviewer, f"{_code(3, 900)}\n\nWhat would you rename?"),
    "absent": _ask(_reviewer, f"{_code(4, 900)}\n\nWhat may go wrong here?"),
    **{
        f"burst {number}": _ask(
            _chat_start, f"{_code(5, 3_000)[300 * number :][:500]}\n\nQuestion {number}: explain it."
        )
        for number in range(BURST)
    },
}


def ask(server: VllmServer, name: str, *, model: str | None = None) -> Answer:
    """Its answer to the question of that name; `model` where the adapter has another name there."""
    question = QUESTIONS[name]
    return server.chat(question.messages, new_tokens=NEW_TOKENS, model=model or question.model)


def take_turn(server: VllmServer, answers: Sequence[Answer]) -> Answer:
    """The next turn of the chat, after these."""
    messages = [{"role": "system", "content": CHAT_SYSTEM}]
    for said, answer in zip(TURNS, answers, strict=False):
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer.text}]
    messages.append({"role": "user", "content": TURNS[len(answers)]})
    return server.chat(messages, new_tokens=NEW_TOKENS)


def reusable(prompt: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> int:
    """Tokens of a prompt that a cache of whole blocks can provide: one at least is left to compute."""
    return (len(prompt) - 1) // block_tokens * block_tokens


def shared(one: Sequence[int], other: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> int:
    """Tokens in the whole blocks that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    equal = next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
    return equal // block_tokens * block_tokens
