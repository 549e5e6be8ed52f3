"""`tierkv size` of a real node: what it was asked, twice, and what it says before that and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Node, StampedEngine
from e2e.test_cli import answer, tierkv
from tierkv.torture.stamped import BLOCK_BYTES, BLOCK_TOKENS

pytestmark = pytest.mark.timeout(180)

BLOCKS = 8  # an extent of e2e.harness.SMALL
PROMPT_BYTES = BLOCKS * BLOCK_BYTES
PROMPTS, ROUNDS = 40, 3


def size(node: Node, *arguments: str) -> Any:
    return answer(node, "size", *arguments)


def test_a_node_tells_what_more_room_would_have_found_and_what_it_found_itself(tmp_path: Path) -> None:
    """Prompts in turn, more than the host holds and fewer than NVMe: whoever drops the oldest finds all or nothing."""
    with Node(tmp_path, host_bytes="2MiB", nvme_bytes="16MiB", nvme_reserve_bytes="0", eviction_policy="lru") as node:
        node.start()
        empty = tierkv("size", "--endpoint", str(node.endpoint))
        assert (empty.returncode, "it can't say anything yet" in empty.stdout) == (0, True)
        with StampedEngine(node.endpoint) as engine:
            for _ in range(ROUNDS):
                for prompt in range(PROMPTS):
                    engine.load(prompt, BLOCKS)
                    engine.store_flushed(prompt, BLOCKS)
        found = size(node)
        all_bytes = PROMPTS * PROMPT_BYTES
        reuse = (ROUNDS - 1) / ROUNDS
        assert found["requests"] == PROMPTS * ROUNDS
        assert found["asked_tokens"] == PROMPTS * ROUNDS * BLOCKS * BLOCK_TOKENS
        assert found["first_tokens"] == found["asked_tokens"] / ROUNDS
        assert (found["sample"]["blocks"], found["sample"]["rate"]) == (PROMPTS * BLOCKS, 1.0)
        assert found["sample"]["seen_bytes"] == all_bytes
        assert (found["host"]["capacity_bytes"], found["host"]["hit_rate"]) == (2 * 2**20, 0.0)
        assert all_bytes * 0.7 < found["ceiling"]["capacity_bytes"] < all_bytes * 1.1
        assert found["ceiling"]["hit_rate"] == pytest.approx(reuse)
        host, nvme = found["did"]["tiers"]
        assert (host["tier"], nvme["tier"], nvme["capacity_bytes"]) == ("host", "nvme", 16 * 2**20)
        assert nvme["hit_rate"] == pytest.approx(reuse)
        assert nvme["estimated_hit_rate"] == pytest.approx(reuse)
        assert found["did"]["saved_seconds_a_day"] == pytest.approx(found["did"]["estimated_seconds_a_day"])
        assert (found["did"]["regretted_tokens"], found["did"]["more"]) == (0, [])
        assert found["load_bytes_per_second"] > 0
        said = tierkv("size", "--since", "1h", "--endpoint", str(node.endpoint))
        assert said.returncode == 0, said.stderr
        assert "Both agree" in said.stdout
        assert "Nothing that it evicted for want of room was asked for again" in said.stdout
        node.stop()
        node.start()
        assert size(node)["requests"] == 0, "nothing of it survives a restart"


def test_a_node_without_nvme_tells_how_much_more_memory_would_have_kept(tmp_path: Path) -> None:
    with Node(tmp_path, memory_only=True, host_bytes="2MiB", eviction_policy="lru") as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for _ in range(ROUNDS):
                for prompt in range(PROMPTS):
                    engine.load(prompt, BLOCKS)
                    engine.store(prompt, BLOCKS)
                    engine.seal(prompt, BLOCKS)
        found = size(node)
        assert found["nvme"] is None
        assert [tier["tier"] for tier in found["did"]["tiers"]] == ["host"]
        did = found["did"]
        hit_rate = did["tiers"][0]["hit_rate"]
        assert did["regretted_tokens"] > 0
        kept = did["more"][-1]
        assert (kept["tier"], kept["hit_rate"]) == ("host", did["regretted_tokens"] / found["asked_tokens"])
        assert hit_rate + kept["hit_rate"] == pytest.approx(found["ceiling"]["hit_rate"]), "with that it finds all"
        assert 0 < kept["more_bytes"] < PROMPTS * PROMPT_BYTES * 1.1


def test_a_node_that_is_away_has_its_exit_code(tmp_path: Path) -> None:
    done = tierkv("size", "--endpoint", str(tmp_path))
    assert done.returncode == 5
    assert "no node answers" in done.stderr
