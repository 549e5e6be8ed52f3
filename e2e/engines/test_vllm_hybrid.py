"""Gemma 3 270M: of its eighteen layers fifteen see a window of 512 tokens and three see everything. vLLM keeps six
groups of pages for it, and in five of them no pages for what has left the window.

Every answer is that of a vLLM without tierkv, token for token (float32), and counters say where the prompt's tokens
came from. The model is under the Gemma Terms of Use, so that nobody's test run fetches it unasked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from demo_lib.fetch_model import GEMMA3_270M
from demo_lib.prompts import TEXTS

from e2e.engines.conftest import REPOSITORY
from e2e.engines.failing_loads import VARIABLE
from e2e.engines.harness import Answer, tierkv_at
from e2e.engines.one_process import OneProcess, Reply
from e2e.engines.questions import BLOCK_TOKENS, reusable, shared
from e2e.engines.store import Store
from e2e.harness import Node, wait_until
from tierkv.torture.waits import NeverCame

MODEL = Path(os.environ.get("TIERKV_CACHE", REPOSITORY / ".cache")) / GEMMA3_270M.folder

pytestmark = [
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(
        not MODEL.is_dir(),
        reason=f"no {MODEL}: scripts/fetch_model gemma3-270m puts it there (238 MB, under the Gemma Terms of Use)",
    ),
]

BEGIN_OF_SEQUENCE = 2
"""The converted tokenizer does not put it in front, and without it the model answers nonsense."""
NEW_TOKENS = 70
"""Enough for the answer to complete a block of its own."""
ARGUMENTS = {
    "dtype": "float32",
    "block_size": BLOCK_TOKENS,
    "max_model_len": 2_048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,  # a long prompt takes several steps, between which the window moves on
    "num_gpu_blocks_override": 400,  # 150 MB
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class Prompts:
    """`branch` leaves `long` in the middle, `start` ends there; all are longer than the window."""

    long: tuple[int, ...]
    branch: tuple[int, ...]
    start: tuple[int, ...]
    other: tuple[int, ...]

    @staticmethod
    def next_turn(answer: Answer) -> tuple[int, ...]:
        return (*answer.prompt, *answer.tokens, *answer.prompt[1:30])


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    from tokenizers import Tokenizer

    text = "\n".join((TEXTS / name).read_text() for name in ("chat.txt", "system.txt", "code_question.txt"))
    ids = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    long = (BEGIN_OF_SEQUENCE, *ids[:1_300])
    return Prompts(
        long=long,
        branch=(*long[:1_000], *ids[1_500:1_700]),
        start=long[:700],
        other=(BEGIN_OF_SEQUENCE, *ids[700:1_500]),
    )


@pytest.fixture(scope="module")
def references(folder: Path, prompts: Prompts) -> dict[tuple[int, ...], Answer]:
    """By the prompt."""
    with OneProcess(folder / "hybrid-plain.log", MODEL, ARGUMENTS) as plain:
        plain.start()

        def ask(prompt: tuple[int, ...]) -> Answer:
            plain.reset_prefix_cache()
            return Answer(plain.ask(prompt, NEW_TOKENS).tokens, "", prompt=prompt)

        answers = [ask(prompt) for prompt in (prompts.long, prompts.branch, prompts.start, prompts.other)]
        answers.append(ask(Prompts.next_turn(answers[0])))
    assert len({answer.tokens for answer in answers}) == len(answers), "answers that look alike prove nothing"
    return {answer.prompt: answer for answer in answers}


@pytest.fixture(scope="module")
def hybrid_store(folder: Path) -> Iterator[Store]:
    (folder / "hybrid").mkdir()
    with Node(folder / "hybrid", host_bytes="512MiB", nvme_bytes="2GiB", slab_bytes=None, extent_bytes=None) as node:
        node.start()
        yield Store(node)


@dataclass(frozen=True, slots=True)
class Books:
    """What Store notes of an engine."""

    dtype: str = "float32"
    block_tokens: int = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Asked:
    """An engine, and what each of its answers must be."""

    engine: OneProcess
    store: Store
    references: dict[tuple[int, ...], Answer]

    def ask(self, prompt: tuple[int, ...]) -> Reply:
        reply = self.engine.ask(prompt, NEW_TOKENS)
        assert reply.tokens == self.references[prompt].tokens
        self.store.note(Books(), self.references[prompt])  # type: ignore[arg-type]
        return reply

    def ask_again(self, prompt: tuple[int, ...]) -> Reply:
        """With nothing in vLLM's own prefix cache."""
        self.engine.reset_prefix_cache()
        return self.ask(prompt)

    def wait_stored(self, prompt: tuple[int, ...]) -> None:
        """Until the node has all of this prompt and its answer. A page that has left the window before it was copied is
        lost for the node until its block is computed once more."""
        deadline = time.monotonic() + 300
        while True:
            try:
                wait_until(self.store.holds_all, "all is stored", 15.0)
                return
            except NeverCame:
                assert time.monotonic() < deadline, "the node never had all of it"
            self.ask_again(prompt)


@pytest.fixture(scope="module")
def failing(folder: Path) -> Path:
    """While this file is there, loads of the first engine fail."""
    return folder / "loads-fail"


@pytest.fixture(scope="module")
def asked(
    folder: Path, failing: Path, hybrid_store: Store, references: dict[tuple[int, ...], Answer]
) -> Iterator[Asked]:
    transfer = tierkv_at(hybrid_store.node.endpoint) | {
        "kv_connector": "FailingLoads",
        "kv_connector_module_path": "e2e.engines.failing_loads",
    }
    arguments = ARGUMENTS | {"kv_transfer": transfer}
    with OneProcess(folder / "hybrid-one.log", MODEL, arguments, {VARIABLE: str(failing)}) as engine:
        engine.start()
        yield Asked(engine, hybrid_store, references)


@pytest.fixture
def first(asked: Asked, prompts: Prompts) -> Asked:
    """Its node has all of the long prompt, and vLLM nothing."""
    asked.ask_again(prompts.long)
    asked.wait_stored(prompts.long)
    asked.engine.reset_prefix_cache()
    return asked


def came_from(reply: Reply) -> dict[str, int]:
    assert reply.failed == 0
    return {tier: tokens for tier in ("own", "host", "nvme") if (tokens := getattr(reply, tier))}


def test_a_prompt_that_is_longer_than_the_window_comes_back_from_the_node(asked: Asked, prompts: Prompts) -> None:
    assert came_from(asked.ask(prompts.long)) == {}
    asked.wait_stored(prompts.long)
    assert came_from(asked.ask_again(prompts.long)) == {"host": reusable(prompts.long)}
    assert came_from(asked.ask_again(prompts.long)) == {"host": reusable(prompts.long)}


def test_a_prompt_that_leaves_it_in_the_middle_gets_what_they_share(first: Asked, prompts: Prompts) -> None:
    """The blocks of the window before that place were stored although vLLM had given their pages away by the end."""
    assert came_from(first.ask(prompts.branch)) == {"host": shared(prompts.long, prompts.branch)}
    first.wait_stored(prompts.branch)
    assert came_from(first.ask_again(prompts.branch)) == {"host": reusable(prompts.branch)}


def test_the_next_turn_gets_the_answer_too(first: Asked, prompts: Prompts) -> None:
    answer = first.references[prompts.long]
    following = Prompts.next_turn(answer)
    assert shared(answer.computed, following) > len(prompts.long), "the answer completes a block"
    assert came_from(first.ask(following)) == {"host": shared(answer.computed, following)}


def test_what_vllm_has_itself_and_what_the_node_has_make_one_prefix(first: Asked, prompts: Prompts) -> None:
    own = reusable(prompts.start)
    assert came_from(first.ask(prompts.start)) == {"host": own}
    assert came_from(first.ask(prompts.long)) == {"own": own, "host": reusable(prompts.long) - own}


def test_a_load_that_fails_in_the_middle_is_computed(first: Asked, prompts: Prompts, failing: Path) -> None:
    """vLLM can't be told which blocks are bad where there are several groups of pages: the request begins anew. On an
    engine that has nothing else to do."""
    failing.touch()
    try:
        assert first.ask(prompts.long).failed == 1
    finally:
        failing.unlink()
    assert came_from(first.ask_again(prompts.long)) == {"host": reusable(prompts.long)}


def test_after_engine_and_node_were_killed_prompts_come_from_disk(
    first: Asked, folder: Path, prompts: Prompts, references: dict[tuple[int, ...], Answer]
) -> None:
    """The last one: it kills the engine of the others."""
    store = first.store
    first.ask(prompts.other)
    first.wait_stored(prompts.other)
    store.wait_flushed()
    first.engine.kill()
    store.restart()
    arguments = ARGUMENTS | {"kv_transfer": tierkv_at(store.node.endpoint, load_deadline_seconds=30)}
    with OneProcess(folder / "hybrid-two.log", MODEL, arguments) as engine:
        engine.start()
        again = Asked(engine, store, references)
        for prompt in (prompts.other, prompts.long):
            assert came_from(again.ask(prompt)) == {"nvme": reusable(prompt)}
        assert came_from(again.ask_again(prompts.other)) == {"host": reusable(prompts.other)}
