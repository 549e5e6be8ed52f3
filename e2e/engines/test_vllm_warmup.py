"""`tierkv warmup --prompts` has a vLLM compute prompts that nobody has asked yet; the node has them afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from demo_lib.prompts import TEXTS

from e2e.engines.harness import VllmServer, tierkv_at
from e2e.engines.questions import SMALL_CACHE
from e2e.harness import Node, wait_until
from e2e.test_cli import tierkv

PROMPTS = 3


def system_prompt(number: int) -> str:
    """No two begin alike."""
    return f"{number}. " + (TEXTS / "system.txt").read_text().strip()


def warm_up(node: Node, server: VllmServer, prompts: Path, *, exit_code: int) -> dict[str, Any]:
    arguments = ("--prompts", str(prompts), "--engine", server.url, "--json", "--endpoint", str(node.endpoint))
    done = tierkv("warmup", *arguments)
    assert done.returncode == exit_code, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_prompts_are_computed_once_and_come_from_the_node_afterwards(tmp_path: Path, folder: Path, model: Path) -> None:
    prompts = tmp_path / "prompts"
    chat = {"messages": [{"role": "system", "content": system_prompt(0)}, {"role": "user", "content": "Hello"}]}
    lines = [chat, {"prompt": system_prompt(1)}, system_prompt(2)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (
        Node(tmp_path, host_bytes="256MiB", nvme_bytes="1GiB", slab_bytes=None, extent_bytes=None) as node,
        VllmServer(folder, model, "warmed", kv_transfer=tierkv_at(node.endpoint), arguments=SMALL_CACHE) as server,
    ):
        node.start()
        server.start()
        first = warm_up(node, server, prompts, exit_code=0)
        assert (first["done"], first["failed"]) == (PROMPTS, 0)
        assert first["node"]["hit_tokens"] == 0
        held = first["prompt_tokens"] // server.block_tokens * server.block_tokens
        wait_until(lambda: num_held(node) >= held - PROMPTS * server.block_tokens, "the node holds the prompts")
        server.reset_prefix_cache()
        second = warm_up(node, server, prompts, exit_code=0)
        assert second["prompt_tokens"] == first["prompt_tokens"]
        assert second["node"]["hit_tokens"] == num_held(node) == second["node"]["asked_tokens"]
        with prompts.open("a") as file:
            file.write(json.dumps({"prompt": "word " * 4_000}) + "\n")
        third = warm_up(node, server, prompts, exit_code=4)
        assert (third["done"], third["failed"]) == (PROMPTS, 1)
        ((error),) = third["errors"]
        assert (error["line"], error["status"]) == (PROMPTS + 1, 400)
        server.kill()
        assert "is not reached" in unreached(node, server, prompts)


def unreached(node: Node, server: VllmServer, prompts: Path) -> str:
    done = tierkv("warmup", "--prompts", str(prompts), "--engine", server.url, "--endpoint", str(node.endpoint))
    assert done.returncode == 4
    return done.stderr


def num_held(node: Node) -> int:
    done = tierkv("du", "--json", "--endpoint", str(node.endpoint))
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["total"]["tokens"])
