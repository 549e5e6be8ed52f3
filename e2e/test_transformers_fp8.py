"""A real model on a node with codec = fp8: half the bytes, and the same answer from every tier, whoever was killed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.test_transformers import (
    MISSING,
    PREFIX_TOKENS,
    PROMPT_TOKENS,
    Asking,
    model,
    processes,
    start_engine,
    start_node,
)
from tests.verdicts import write_passing
from tierkv.client import connect_operator
from tierkv.storage.manifest import fingerprint_model

__all__ = ["model", "processes"]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: scripts/setup transformers demo"),
]

RAW_BLOCK_BYTES = 30 * 2 * 3 * 16 * 64 * 2
"""Of SmolLM2-135M in bfloat16: layers, keys and values, heads, tokens, numbers of a head."""


def test_the_answer_is_the_same_from_every_tier_and_half_the_bytes_are_on_disk(
    processes: ExitStack, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERKV_CODEC", "fp8")
    write_passing(tmp_path / "data", fingerprint_model(model).fingerprint)
    node = start_node(processes, tmp_path)
    engine = start_engine(processes, node, model, ["bfloat16"])
    tokens = engine.ask("prompts", code_tokens=1_000)[0]["tokens"][:PROMPT_TOKENS]
    asking = Asking(engine, "bfloat16", tokens)

    cold = asking.cached(keep="bf16")
    assert not cold["fault"]
    computed = engine.ask("digest", dtype="bfloat16", kept="bf16", tokens=PREFIX_TOKENS)
    blocks = cold["stored_blocks"]
    wanted = asking.cached()
    assert (wanted["reused_tokens"], wanted["host_tokens"]) == (PREFIX_TOKENS, PREFIX_TOKENS)
    assert wanted["kv"] != computed, "what was loaded went through the codec"

    def check(tier: str) -> None:
        warm = asking.cached()
        assert (warm["reused_tokens"], warm[f"{tier}_tokens"]) == (PREFIX_TOKENS, PREFIX_TOKENS)
        assert (warm["new"], warm["kv"]) == (wanted["new"], wanted["kv"])
        assert not warm["fault"]

    assert asking.flush() >= PREFIX_TOKENS // 16
    engine.kill()
    engine.start()
    check("host")
    node.kill()
    engine.kill()
    node.start()
    engine.start()
    check("nvme")
    check("host")

    on_disk = sum(path.stat().st_size for path in node.data_dir.rglob("*.kv"))
    assert on_disk < 0.53 * blocks * RAW_BLOCK_BYTES
    with connect_operator(data_dir=node.data_dir) as operator:
        assert [row.reachable for row in operator.usage().rows] == [True]
