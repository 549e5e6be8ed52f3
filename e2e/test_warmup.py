"""A warm-up after kill -9: what was stored is in memory again before anybody asks, however often it is cut off."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Node, StampedEngine, environment, wait_until
from e2e.test_cli import answer, command, tierkv
from tests.cli.openai_engine import Answer, OpenAiEngine, completion
from tierkv.torture.stamped import BLOCK_BYTES, BLOCK_TOKENS

pytestmark = pytest.mark.timeout(180)

PROMPTS, BLOCKS = 12, 24
ALL_BYTES = PROMPTS * BLOCKS * BLOCK_BYTES
SECONDS = 60.0


@pytest.fixture
def cold(node: Node) -> Node:
    """It was killed, all of it, after everything was flushed, and has started again."""
    node.start()
    with StampedEngine(node.endpoint) as engine:
        for prompt in range(PROMPTS):
            engine.store_flushed(prompt, BLOCKS)
    node.kill("supervisor")
    node.start()
    assert host_bytes(node) == 0
    return node


def host_bytes(node: Node) -> int:
    return int(answer(node, "du")["total"]["host_bytes"])


@contextmanager
def warming_up(node: Node, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command, which has begun."""
    before = answer(node, "status")["counters"].get("requests.Warmup", 0)
    warming = subprocess.Popen(
        command("warmup", "--endpoint", str(node.endpoint), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        wait_until(
            lambda: answer(node, "status")["counters"].get("requests.Warmup", 0) > before + 1, "it is warming up"
        )
        yield warming
    finally:
        warming.kill()
        warming.communicate()


def require_all_hit_in_memory(node: Node) -> None:
    with StampedEngine(node.endpoint) as engine:
        for prompt in range(PROMPTS):
            loaded = engine.load(prompt, BLOCKS)
            assert (loaded.right, loaded.nvme_blocks) == (BLOCKS, 0), f"prompt {prompt}: {loaded}"


def test_one_that_is_interrupted_in_the_middle_is_gone_on_with(cold: Node) -> None:
    with cold.paused("storage"), warming_up(cold) as warming:
        warming.send_signal(signal.SIGINT)
        said, complained = warming.communicate(timeout=SECONDS)
    assert warming.returncode == 4, complained
    assert "run the same command again to go on" in complained
    assert f"of {PROMPTS * 3} extents" in said
    brought = wait_until(lambda: host_bytes(cold), "what was being read when it was interrupted is there")
    assert brought < ALL_BYTES
    done = tierkv("warmup", "--json", "--endpoint", str(cold.endpoint))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["already_bytes"] >= brought
    assert told["promoted_bytes"] + told["already_bytes"] == told["total_bytes"] == ALL_BYTES
    require_all_hit_in_memory(cold)
    again = json.loads(tierkv("warmup", "--json", "--endpoint", str(cold.endpoint)).stdout)
    assert (again["promoted_bytes"], again["already_bytes"]) == (0, ALL_BYTES)


@pytest.mark.parametrize("victim", ["front", "storage"])
def test_a_process_that_is_killed_in_the_middle_is_outlived(cold: Node, victim: str) -> None:
    cold.signal("storage", signal.SIGSTOP)
    with warming_up(cold, "--json") as warming:
        cold.kill(victim)
        said, complained = warming.communicate(timeout=SECONDS)
    assert warming.returncode == 0, complained
    assert json.loads(said)["restarts"] == (victim == "front")
    require_all_hit_in_memory(cold)


def test_a_node_that_is_started_again_in_the_middle_is_waited_for(cold: Node) -> None:
    cold.signal("storage", signal.SIGSTOP)
    with warming_up(cold) as warming:
        cold.kill("supervisor")
        cold.start()
        said, complained = warming.communicate(timeout=SECONDS)
    assert warming.returncode == 0, complained
    assert "waiting for it" in complained
    assert "beginning anew" in complained
    assert f"{PROMPTS * 3} of {PROMPTS * 3} extents" in said
    require_all_hit_in_memory(cold)


def test_of_one_tenant_within_a_budget_to_the_block(node: Node) -> None:
    node.start()
    with StampedEngine(node.endpoint, salt="acme") as acme, StampedEngine(node.endpoint) as other:
        for prompt in range(4):
            acme.store_flushed(prompt, BLOCKS)
            other.store_flushed(prompt, BLOCKS)
    node.kill("supervisor")
    node.start()
    budget = 2 * BLOCKS + 3
    arguments = ("--tenant", "acme", "--since", "1h", "--budget", str(budget * BLOCK_BYTES), "--json")
    done = tierkv("warmup", *arguments, "--endpoint", str(node.endpoint))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["promoted_bytes"], told["reason"]) == (budget * BLOCK_BYTES, "budget")
    by_tenant = {line["tenant"]: line["host_bytes"] for line in answer(node, "du", "--by", "tenant")["lines"]}
    assert by_tenant.pop("") == 0
    assert list(by_tenant.values()) == [budget * BLOCK_BYTES]
    assert tierkv("warmup", "--tenant", "nobody", "--endpoint", str(node.endpoint)).returncode == 2


def test_prompts_are_computed_by_an_engine_once_and_hit_afterwards_across_a_kill(node: Node, tmp_path: Path) -> None:
    node.start()
    prompts = tmp_path / "prompts"
    prompts.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(PROMPTS)))
    with StampedEngine(node.endpoint) as cache:

        def serve(_path: str, body: dict[str, Any]) -> Answer:
            number = int(body["prompt"])
            loaded = cache.load(number, BLOCKS)
            assert not loaded.is_wrong
            if loaded.right < BLOCKS:
                cache.store_flushed(number, BLOCKS)
            return completion(BLOCKS * BLOCK_TOKENS, loaded.right * BLOCK_TOKENS)

        with OpenAiEngine(answer=serve) as engine:
            arguments = ("warmup", "--prompts", str(prompts), "--engine", engine.url, "--json")
            first = tierkv(*arguments, "--endpoint", str(node.endpoint))
            assert first.returncode == 0, first.stderr
            tokens = PROMPTS * BLOCKS * BLOCK_TOKENS
            told = json.loads(first.stdout)
            assert (told["done"], told["prompt_tokens"], told["cached_tokens"]) == (PROMPTS, tokens, 0)
            assert told["node"] == {"asked_tokens": tokens, "hit_tokens": 0, "stored_tokens": tokens}
            node.kill("supervisor")
            node.start()
            assert tierkv("warmup", "--endpoint", str(node.endpoint)).returncode == 0
            second = json.loads(tierkv(*arguments, "--endpoint", str(node.endpoint)).stdout)
            assert second["node"] == {"asked_tokens": tokens, "hit_tokens": tokens, "stored_tokens": 0}
    require_all_hit_in_memory(node)
