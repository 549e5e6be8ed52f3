"""scripts/demo_lib: what counts as wrong, what is told, and that the prompts share what they should."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from demo_lib.prompts import count_shared, make_prompts
from demo_lib.report import print_report, problems_of, restart_lines, shortfalls_of
from demo_lib.story import ONE_SHOT, SPLIT, Overhead, Step, problem_of
from rich.console import Console

STEP = Step(
    dtype="bfloat16",
    prompt="chat",
    name="both killed -9",
    prompt_tokens=2_381,
    first_token_seconds=0.5,
    runs=3,
    cold_seconds=5.0,
    reused_tokens=2_368,
    nvme_tokens=2_368,
    loaded_bytes=54_558_720,
    reference=SPLIT,
    same_bytes=True,
)
OVERHEAD = Overhead(
    dtype="bfloat16",
    prompt="chat",
    plain_seconds=[5.0, 4.0, 4.5],
    cached_seconds=[5.1, 4.08, 4.59],
    own_seconds=[0.09, 0.05, 0.072],
)


def test_a_good_run_has_no_problems() -> None:
    assert problems_of([STEP, replace(STEP, reference=None, same_bytes=None)]) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"same_tokens": False}, "the answer is not the one without tierkv"),
        ({"same_bytes": False}, "is not the KV that was stored"),
        ({"problem": "reused 0 tokens, not 2368"}, "reused 0 tokens"),
    ],
)
def test_what_must_not_happen_is_a_problem(change: dict[str, Any], words: str) -> None:
    (problem,) = problems_of([STEP, replace(STEP, **change)])
    assert problem.startswith("chat, bf16, both killed -9: ")
    assert words in problem


def test_slowness_is_told_but_is_no_problem() -> None:
    slow = replace(STEP, first_token_seconds=1.0)
    dear = replace(OVERHEAD, own_seconds=[0.9, 0.5, 0.5])
    assert problems_of([slow]) == []
    assert len(shortfalls_of([slow], [dear])) == 2
    assert shortfalls_of([STEP], [OVERHEAD]) == []


def test_the_restart_line_has_both_times_and_their_ratio() -> None:
    (line,) = restart_lines([STEP, replace(STEP, name="the same again")])
    assert "5.00 s without tierkv, 0.50 s with it: 10.0x" in line


def test_the_table_names_the_reference_of_each_answer() -> None:
    page = io.StringIO()
    steps = [
        replace(STEP, name="cold, without tierkv", reused_tokens=0, reference=None, same_bytes=None),
        replace(STEP, name="cold, with tierkv", reused_tokens=0, reference=ONE_SHOT, same_bytes=None),
        STEP,
        replace(STEP, name="after", same_tokens=False),
    ]
    print_report(Console(file=page, width=150), steps, [OVERHEAD], ["a note"], new_tokens=16)
    text = page.getvalue()
    assert re.search(r"cold, with tierkv .* yes¹", text)
    assert re.search(r"both killed -9 .* 0\.50 .* 3 .* 10\.0 .* 0 \+ 2,368 .* 55 .* yes² .* yes", text)
    assert re.search(r"after .* NO²", text)
    assert "1.6% of a cold request was spent in tierkv; +2.0% from end to end" in text
    assert "a note" in text


FOUND = {"reused_tokens": 32, "host_tokens": 0, "nvme_tokens": 32, "reason": None, "fault": ""}


@pytest.mark.parametrize(
    ("change", "expectation", "words"),
    [
        ({}, {"reused": 32, "tier": "nvme"}, ""),
        ({}, {"reused": 32, "tier": "host"}, "should have been in memory"),
        ({"nvme_tokens": 0, "host_tokens": 32}, {"reused": 32, "tier": "nvme"}, "nothing came from NVMe"),
        ({}, {"reused": 48, "tier": "nvme"}, "reused 32 tokens, not 48"),
        ({"fault": "boom"}, {"reused": 32, "tier": "nvme"}, "boom"),
    ],
)
def test_a_step_must_reuse_what_it_should_from_where_it_should(
    change: dict[str, Any], expectation: dict[str, Any], words: str
) -> None:
    problem = problem_of(FOUND | change, **expectation)
    assert words in problem
    assert bool(problem) is bool(words)


class Words:
    """A tokenizer for which every word and every line end is a token."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['role']}> {message['content']} <end> " for message in messages) + "<assistant>"

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [hash(word) for word in re.findall(r"\S+|\n", text)]}


def test_the_prompts_share_the_system_prompt_and_the_code() -> None:
    chat, code = make_prompts(Words(), code_tokens=6_000)
    assert count_shared(chat.tokens, code.tokens) > 500
    assert count_shared(chat.tokens, chat.second) >= count_shared(chat.tokens, code.tokens)
    assert 5_900 <= len(code.tokens) <= 6_000
    assert count_shared(code.tokens, code.second) > 5_500


def test_a_small_code_prompt_has_no_files_rather_than_none_of_the_question() -> None:
    _, code = make_prompts(Words(), code_tokens=10)
    assert len(code.tokens) > 500
