"""What a vLLM is not started with: the reason is in its log, by name, with what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.engines.another_version import LACKING, VERSION
from e2e.engines.harness import VllmServer, tierkv_at
from e2e.engines.one_process import OneProcess
from e2e.engines.questions import BLOCK_TOKENS
from tierkv.integrations.vllm.version import TESTED

ENDPOINT = Path("/nonexistent")
UNTESTED = "0.33.1"
MISSING = "get_transfer_results"
SHORT = {"max_model_len": 256, "max_num_batched_tokens": 256}
"""vLLM makes connectors when it has loaded the weights and tried its largest batch, which is small then."""


def refused(folder: Path, model: Path, name: str, transfer: dict[str, Any], **variables: str) -> str:
    """What the server says."""
    arguments = ("--max-num-batched-tokens", str(SHORT["max_num_batched_tokens"]))
    with VllmServer(
        folder,
        model,
        name,
        kv_transfer=transfer,
        max_model_len=SHORT["max_model_len"],
        arguments=arguments,
        variables=variables,
    ) as server:
        server.begin()
        return server.wait_refused()


def test_an_option_with_a_typo_is_named(folder: Path, model: Path) -> None:
    said = refused(folder, model, "typo", tierkv_at(ENDPOINT, end_point="/run/tierkv"))
    assert "kv_connector_extra_config.end_point: unknown; known are endpoint, data_dir" in said


def test_a_version_that_lacks_something_is_refused_before_anything_is_loaded(folder: Path, model: Path) -> None:
    transfer = tierkv_at(ENDPOINT, module="e2e.engines.another_version")
    said = refused(folder, model, "lacking", transfer, **{VERSION: UNTESTED, LACKING: MISSING})
    assert f"vLLM {UNTESTED}: tested is {TESTED}.x, and this one lacks " in said
    assert f"KVConnectorBase_V1.{MISSING}" in said
    assert "EngineCore" not in said


def test_another_block_size_than_the_operator_asked_for_is_refused_with_the_flag_that_sets_it(
    folder: Path, model: Path
) -> None:
    transfer = tierkv_at(ENDPOINT, block_tokens=48)
    arguments = SHORT | {"dtype": "float32", "block_size": BLOCK_TOKENS, "enforce_eager": True, "kv_transfer": transfer}
    with (
        OneProcess(folder / "blocks.log", model, arguments) as engine,
        pytest.raises(AssertionError, match="has ended"),
    ):
        engine.start()
    asked = f"block_tokens is 48, and vLLM's blocks have {BLOCK_TOKENS} tokens: start it with --block-size 48"
    assert asked in (folder / "blocks.log").read_text()
