"""What engines tell of their prompts, seen with the operator's commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.either_client import KINDS, EitherEngine
from e2e.harness import Node, wait_until
from e2e.test_cli import tierkv
from tierkv.core.value.cost import prefill_seconds

BLOCKS = 4
RATE = 500.0
SETTING = 9_000.0


def shown(node: Node) -> dict[str, Any]:
    done = tierkv("du", "--json", "--endpoint", str(node.endpoint))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["prefill"]
    return dict(row)


def tell(engine: EitherEngine, prompt: int) -> None:
    """Eight stretches of a prompt, and a call that they go with."""
    for number in range(8):
        first = 2_048 * number
        engine.group.report_prefill(tokens=2_048, first_token=first, seconds=prefill_seconds(2_048, first, RATE))
    engine.match(prompt, BLOCKS)


@pytest.mark.parametrize("client", KINDS)
def test_a_node_reckons_with_what_its_engines_tell_until_its_front_is_a_new_one(tmp_path: Path, client: str) -> None:
    with Node(tmp_path, prefill_tokens_per_second=str(SETTING)) as node:
        node.start()
        with EitherEngine(client, node.endpoint) as engine:
            assert engine.store(1, BLOCKS) == BLOCKS
            assert (shown(node)["tokens_per_second"], shown(node)["samples"]) == (SETTING, 0)
            tell(engine, 1)
            wait_until(lambda: shown(node)["samples"] == 8, "the node has heard of it")
            assert shown(node)["tokens_per_second"] == pytest.approx(RATE)
            out = " ".join(tierkv("du", "--endpoint", str(node.endpoint)).stdout.split())
            assert "prefill of stamped: 500 tokens/s, measured (8 samples)" in out
            assert engine.match(1, BLOCKS) == BLOCKS
            assert engine.client.counters.stale_replies == 0
            before = node.wait_ready().incarnation
            node.kill("front")
            node.wait_status(
                lambda told: told.incarnation != before and told.state != "recovering",
                "a new front",
            )
            engine.skip(3.0)
            assert engine.match(1, BLOCKS) >= 0
            assert shown(node)["samples"] == 0
            tell(engine, 1)
            wait_until(lambda: shown(node)["samples"] == 8, "the new front has heard of it")
