"""A vLLM tells the node how long its prompts take, and the node reckons with that."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from e2e.engines.harness import VllmServer, tierkv_at
from e2e.engines.questions import SMALL_CACHE
from e2e.harness import Node
from e2e.test_cli import tierkv

PROMPT_TOKENS = 1_900
PROMPTS = 12
SETTING = 12_000.0


def prefill_row(node: Node) -> dict[str, Any]:
    done = tierkv("du", "--json", "--endpoint", str(node.endpoint))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["prefill"]
    return dict(row)


def prompt(number: int) -> list[int]:
    """No two begin alike."""
    return [1_000 + (17 * number + 7 * index) % 20_000 for index in range(PROMPT_TOKENS)]


def test_a_node_learns_what_a_vllm_s_prompts_cost(tmp_path: Path, folder: Path, model: Path) -> None:
    with (
        Node(tmp_path, host_bytes="256MiB", nvme_bytes="1GiB", slab_bytes=None, extent_bytes=None) as node,
        VllmServer(
            folder,
            model,
            "timed",
            kv_transfer=tierkv_at(node.endpoint),
            dtype="bfloat16",
            arguments=SMALL_CACHE,
        ) as server,
    ):
        node.start()
        server.start()
        server.complete(prompt(0), new_tokens=1)
        assert prefill_row(node)["samples"] == 0, "one prompt is not enough"
        began = time.monotonic()
        for number in range(1, PROMPTS):
            server.complete(prompt(number), new_tokens=1)
        overall = (PROMPTS - 1) * PROMPT_TOKENS / (time.monotonic() - began)
        told = prefill_row(node)
        assert told["samples"] >= 4
        assert told["tokens_per_second"] != SETTING
        assert overall / 5 < told["tokens_per_second"] < 5 * overall
        shown = tierkv("du", "--endpoint", str(node.endpoint)).stdout
        assert f"measured ({told['samples']} samples)" in " ".join(shown.split())
