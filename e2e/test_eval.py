"""The eval of a real model, and the gate behind it: SmolLM2-135M, and five prompts of documentation and code."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from demo_lib.fetch_model import fetch

from e2e.harness import Node, data_of
from tests.verdicts import FP8, write_passing
from tierkv.client import connect
from tierkv.config import Settings
from tierkv.core.eval_results import Measured, why_failed
from tierkv.core.reasons import Reason
from tierkv.storage.manifest import fingerprint_model
from tierkv_cli.main import run

if TYPE_CHECKING:
    from tierkv.core.codec import BlockCodec
    from tierkv.integrations.kv_blocks import BlockShape

REPOSITORY = Path(__file__).parents[1]
PROMPTS = Path(__file__).parent / "eval_prompts.jsonl"
MISSING = [name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1_500),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: scripts/setup transformers demo"),
]


@pytest.fixture(scope="module")
def model() -> Path:
    """SmolLM2-135M, fetched once and kept in TIERKV_CACHE (or .cache)."""
    return fetch(Path(os.environ.get("TIERKV_CACHE", REPOSITORY / ".cache")))


def test_a_real_model_passes_and_is_then_served_with_fp8(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Node(tmp_path, codec="fp8") as node:
        refused = node.spawn(log=tmp_path / "refused.log")
        assert refused.wait(60) == 2
        assert "tierkv eval --model DIR" in (tmp_path / "refused.log").read_text()
        where = ["--model", str(model), "--prompts", str(PROMPTS), "--data-dir", str(data_of(node))]
        code = run(["eval", *where, "--json"])
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert (code, told["problem"]) == (0, "")
        weights = told["verdict"]["weights"]
        assert weights == fingerprint_model(model).fingerprint
        node.start()
        with connect(node.endpoint, timeout_seconds=20) as client:
            assert client.ask_codec(weights).codec == FP8
            assert client.ask_codec(weights, "ad" * 32).reason is Reason.NO_VERDICT


def test_one_byte_of_the_weights_changed_and_the_verdict_is_not_theirs(model: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(model, tmp_path / "changed")
    weights = changed / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with Node(tmp_path, codec="fp8") as node:
        write_passing(data_of(node), fingerprint_model(model).fingerprint)
        node.start()
        with connect(node.endpoint, timeout_seconds=20) as client:
            assert client.ask_codec(fingerprint_model(model).fingerprint).codec == FP8
            answer = client.ask_codec(fingerprint_model(changed).fingerprint)
    assert (answer.codec, answer.reason) == ("", Reason.NO_VERDICT)


def test_a_codec_made_bad_on_purpose_fails_the_gate(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.evaluation.bad_codecs import HarmedFp8, lose_two_bits, mix_scales
    from tierkv.evaluation.kept_prefix import RawBlocks
    from tierkv.evaluation.loading import Tokens, load
    from tierkv.evaluation.measuring import Haystack, measure, usable
    from tierkv.evaluation.messages import EvalPrompt

    monkeypatch.setattr("tierkv.evaluation.measuring.GENERATED_PROMPTS", 1)
    ready = load(model, None, data_dir="", block_tokens=16)
    tokens = Tokens(model)
    texts = [json.loads(line) for line in PROMPTS.read_text().splitlines()][1:2]
    made = [tokens.of(EvalPrompt(line=1, text=text), ready.model.config.vocab_size) for text in texts]
    prompts = usable(made, 16, ready.context_tokens)
    limits = msgspec.structs.replace(Settings().eval_limits, min_retrieval=0.0)

    def measured(codec: BlockCodec) -> Measured:
        return measure(ready.model, ready.shape, codec, prompts, Haystack(facts=(), hay=(), start=(), lengths=()))

    shape: BlockShape = ready.shape
    raw = measured(RawBlocks(shape))
    assert (raw.agreement, raw.kl, raw.perplexity_ratio, raw.generated_agreement) == (1.0, 0.0, 1.0, 1.0)
    assert why_failed(raw, limits) == ""
    for harm in (lose_two_bits, mix_scales):
        failed = why_failed(measured(HarmedFp8(shape, harm)), limits)
        for setting in ("eval_min_agreement", "eval_max_kl", "eval_max_perplexity_ratio"):
            assert setting in failed, harm.__name__
