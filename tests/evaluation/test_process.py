"""What the process with the model answers when there is nothing to measure."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest

from tests.evaluation.tiny_folder import tiny_folder, words
from tierkv.evaluation import kept_prefix, measuring, process
from tierkv.evaluation.messages import EvalPrompt, EvalRequest, Problem, Working, decode_line
from tierkv.evaluation.process import answer, notes

pytestmark = pytest.mark.engine


@pytest.fixture
def request_(tmp_path: Path) -> EvalRequest:
    return EvalRequest(
        model=str(tiny_folder(tmp_path / "tiny")),
        adapter="",
        data_dir="",
        prompts=[EvalPrompt(line=1, text=words(420))],
        codec="fp8_e4m3",
        block_tokens=16,
        long_context=False,
    )


def problem_of(request: EvalRequest) -> Problem:
    found = answer(request, io.BytesIO())  # type: ignore[arg-type]
    assert isinstance(found, Problem)
    return found


def test_short_prompts_are_bad_input(request_: EvalRequest) -> None:
    found = problem_of(msgspec.structs.replace(request_, prompts=[EvalPrompt(line=1, text="w5 w6")]))
    assert found.is_bad_input
    assert found.words.startswith("--prompts: none has 32 tokens")


def test_a_folder_without_a_model_is_bad_input(request_: EvalRequest, tmp_path: Path) -> None:
    found = problem_of(msgspec.structs.replace(request_, model=str(tmp_path)))
    assert found.is_bad_input
    assert str(tmp_path) in found.words


def test_a_model_with_a_sliding_window_is_bad_input(request_: EvalRequest, tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    from tests.evaluation.tiny_folder import save_tokenizer

    config = MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path / "windowed")
    save_tokenizer(tmp_path / "windowed")
    found = problem_of(msgspec.structs.replace(request_, model=str(tmp_path / "windowed")))
    assert found.is_bad_input
    assert "--model: layer 0 has a sliding window" in found.words


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")]
)
def test_memory_that_runs_out_is_no_bug(
    request_: EvalRequest, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(measuring, "measure", fail)
    found = problem_of(request_)
    assert (found.words, found.is_bad_input) == (process.NO_MEMORY, False)


def test_libraries_that_are_not_there_are_named(request_: EvalRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ImportError("No module named 'torch'")

    monkeypatch.setattr(process, "evaluate", fail)
    assert "pip install" in problem_of(request_).words


def test_numbers_that_are_not_finite_are_no_bad_input(request_: EvalRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise kept_prefix.NotFinite("not finite")

    monkeypatch.setattr(measuring, "measure", fail)
    assert problem_of(request_) == Problem(words="not finite", is_bad_input=False)


def test_it_tells_how_it_gets_on(request_: EvalRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.evaluation.needles.LENGTHS", (128,))
    monkeypatch.setattr(measuring, "GENERATED_PROMPTS", 1)
    out = io.BytesIO()
    answer(request_, out)  # type: ignore[arg-type]
    stages = [one.stage for one in map(decode_line, out.getvalue().splitlines()) if isinstance(one, Working)]
    assert stages == ["loading", "prompts", "retrieval in 128 tokens"]


def test_what_was_not_done_as_given_is_noted() -> None:
    assert notes([[1] * 9, [1]], [[1] * 9], None) == ["1 of 2 prompts are too short to be compared, and left out"]
    assert notes([[1] * 9], [[1] * 5], 5) == ["1 of 1 prompts are longer than the model's context of 5, and cut"]
    assert notes([[1] * 9], [[1] * 9], 9) == []
