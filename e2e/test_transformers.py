"""A real model in a process of its own, a real node, and kill -9 for both."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from demo_lib.fetch_model import fetch
from demo_lib.processes import EngineProcess, Node

from tierkv.client import connect_operator

REPOSITORY = Path(__file__).parents[1]
MISSING = [name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: scripts/setup transformers demo"),
]

PREFIX_TOKENS, PROMPT_TOKENS, NEW_TOKENS = 512, 526, 16


@pytest.fixture(scope="session")
def model() -> Path:
    """SmolLM2-135M, fetched once and kept in TIERKV_CACHE (or .cache)."""
    return fetch(Path(os.environ.get("TIERKV_CACHE", REPOSITORY / ".cache")))


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    from tests.integrations.tiny import tiny_llama

    folder = tmp_path / "tiny"
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_node(processes: ExitStack, folder: Path) -> Node:
    node = processes.enter_context(Node(folder / "data", folder, host_bytes="512MiB"))
    node.start()
    return node


def start_engine(processes: ExitStack, node: Node, model: Path, dtypes: list[str]) -> EngineProcess:
    engine = processes.enter_context(EngineProcess(model, node.data_dir, dtypes, node.data_dir.parent))
    engine.start()
    return engine


class Asking:
    """One prompt and one element type, so that a call says only what is its own."""

    def __init__(self, engine: EngineProcess, dtype: str, tokens: list[int]) -> None:
        self._engine = engine
        self._common: dict[str, Any] = {"dtype": dtype, "tokens": tokens}

    def plain(self) -> list[int]:
        new: list[int] = self._engine.ask("plain", **self._common, new_tokens=NEW_TOKENS)["new"]
        return new

    def cached(self, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._engine.ask("cached", **self._common, new_tokens=NEW_TOKENS, **arguments)
        return answer

    def split(self, kept: str, at: int) -> list[int]:
        new: list[int] = self._engine.ask("split", **self._common, new_tokens=NEW_TOKENS, kept=kept, at=at)["new"]
        return new

    def flush(self) -> int:
        flushed: int = self._engine.ask("flush", **self._common)["flushed"]
        return flushed


def test_a_prefix_outlives_engine_and_node(processes: ExitStack, tmp_path: Path, model: Path) -> None:
    node = start_node(processes, tmp_path)
    engine = start_engine(processes, node, model, ["float32", "bfloat16"])
    tokens = engine.ask("prompts", code_tokens=1_000)[0]["tokens"][:PROMPT_TOKENS]
    single, half = Asking(engine, "float32", tokens), Asking(engine, "bfloat16", tokens)

    wanted = single.plain()
    cold = single.cached(keep="fp32")
    assert cold["new"] == wanted
    assert (cold["reused_tokens"], cold["stored_blocks"]) == (0, (PROMPT_TOKENS + NEW_TOKENS - 1) // 16)
    assert not cold["fault"]
    assert half.cached(keep="bf16")["reused_tokens"] == 0, "another element type shares nothing"
    half_wanted = half.split("bf16", PREFIX_TOKENS)
    kv = {
        dtype: engine.ask("digest", dtype=dtype, kept=kept, tokens=PREFIX_TOKENS)
        for dtype, kept in (("float32", "fp32"), ("bfloat16", "bf16"))
    }

    def check(tier: str) -> None:
        for asking, expected, dtype in ((single, wanted, "float32"), (half, half_wanted, "bfloat16")):
            warm = asking.cached()
            assert warm["new"] == expected
            assert (warm["reused_tokens"], warm[f"{tier}_tokens"]) == (PREFIX_TOKENS, PREFIX_TOKENS)
            assert warm["kv"] == kv[dtype], "the bytes that were loaded are the bytes that were stored"
            assert not warm["fault"]

    check("host")
    assert min(single.flush(), half.flush()) >= PREFIX_TOKENS // 16
    engine.kill()
    engine.start()
    check("host")
    node.kill()
    engine.kill()
    node.start()
    engine.start()
    check("nvme")
    check("host")


def test_an_engine_goes_on_without_its_node_and_finds_it_again(
    processes: ExitStack, tmp_path: Path, tiny_model: Path
) -> None:
    node = start_node(processes, tmp_path)
    engine = start_engine(processes, node, tiny_model, ["float32"])
    asking = Asking(engine, "float32", [7, 3, 9, 11] * 20)
    wanted = asking.plain()
    assert asking.cached()["stored_blocks"] == 5
    assert asking.flush() == 5

    node.kill()
    without = asking.cached()
    assert (without["new"], without["reused_tokens"]) == (wanted, 0)
    assert not without["fault"]

    node.start()
    deadline = time.monotonic() + 60
    again = asking.cached()
    while not again["reused_tokens"] and time.monotonic() < deadline:
        again = asking.cached()
    assert (again["new"], again["reused_tokens"]) == (wanted, 64)


def test_another_model_under_the_same_name_shares_nothing(
    processes: ExitStack, tmp_path: Path, tiny_model: Path
) -> None:
    node = start_node(processes, tmp_path)
    engine = start_engine(processes, node, tiny_model, ["float32"])
    asking = Asking(engine, "float32", [7, 3, 9, 11] * 20)
    asking.cached()
    assert asking.flush() == 5
    engine.kill()

    weights = tiny_model / "model.safetensors"
    before = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-3] ^= 0x01
    weights.write_bytes(content)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    engine.start()

    changed = asking.cached()
    assert changed["reused_tokens"] == 0
    assert changed["new"] == asking.plain()
    with connect_operator(data_dir=node.data_dir) as operator:
        rows = [row for row in operator.usage().rows if row.model_name == "tiny"]
    assert len({row.fingerprint for row in rows}) == 2
    assert sorted(row.reachable for row in rows) == [False, True]
