"""Pins of real nodes: what is pinned outlives other prompts, kill -9 and a restart, and when it is unpinned it goes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Node, StampedEngine, wait_until
from e2e.test_cli import tierkv
from tierkv.client import aio
from tierkv.torture.stamped import BLOCK_BYTES, tokens_of

pytestmark = pytest.mark.timeout(240)

BLOCKS = 8  # an extent of e2e.harness.SMALL
TIGHT = {"host_bytes": "2MiB", "nvme_bytes": "4MiB", "nvme_reserve_bytes": "0", "pinned_share": "25%"}


def ask(node: Node, *arguments: str, expected: int = 0) -> Any:
    done = tierkv(*arguments, "--json", "--endpoint", str(node.endpoint))
    assert done.returncode == expected, done.stderr
    return json.loads(done.stdout)


def token_file(tmp_path: Path, prompt: int, num_blocks: int) -> str:
    path = tmp_path / f"tokens-{prompt}"
    path.write_text(json.dumps(tokens_of(prompt, num_blocks).tolist()))
    return str(path)


def fill(engine: StampedEngine, *, first: int, is_gone: int | None = None) -> None:
    """Other prompts, more than both tiers hold, and until `is_gone` is."""
    for prompt in range(first, first + 60):
        engine.store_flushed(prompt, BLOCKS)
    deadline = time.monotonic() + 60
    while is_gone is not None and engine.match(is_gone, BLOCKS):
        assert time.monotonic() < deadline, f"prompt {is_gone} is not pinned, and stays"
        first += 1
        engine.store_flushed(first + 60, BLOCKS)


def in_memory(engine: StampedEngine, prompt: int) -> int:
    return engine.group.match(keys=engine.keys(prompt, BLOCKS)).host_blocks


def test_a_pinned_prefix_outlives_other_prompts_and_kill_9_and_goes_when_it_is_unpinned(tmp_path: Path) -> None:
    with Node(tmp_path, **TIGHT) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            for prompt in (1, 2):
                engine.store_flushed(prompt, BLOCKS)
            (pinned,) = ask(
                node, "pin", "--model", "stamped", "--token-file", token_file(tmp_path, 1, BLOCKS), "--owner", "ann"
            )["pins"]
            assert (pinned["phase"], pinned["recorded"], pinned["host_bytes"]) == ("holds", True, BLOCKS * BLOCK_BYTES)
            fill(engine, first=100, is_gone=2)
            assert (engine.match(1, BLOCKS), in_memory(engine, 1)) == (BLOCKS, BLOCKS)
        node.kill("supervisor")
        node.start()
        with StampedEngine(node.endpoint) as engine:
            (found,) = ask(node, "pins")["pins"]
            assert (found["pin"], found["owner"], found["made"]) == (pinned["pin"], "ann", pinned["made"])
            wait_until(lambda: in_memory(engine, 1) == BLOCKS, "what is pinned in memory is brought back there")
            fill(engine, first=300)
            loaded = engine.load(1, BLOCKS)
            assert (loaded.right, loaded.nvme_blocks) == (BLOCKS, 0)
            assert ask(node, "unpin", pinned["pin"][:8])["pins"][0]["recorded"] is False
            fill(engine, first=500, is_gone=1)
        assert node.data_dir is not None
        assert list((node.data_dir / "pins").iterdir()) == []
        node.kill("supervisor")
        node.start()
        assert ask(node, "pins")["pins"] == []


@pytest.mark.parametrize("victim", ["front", "storage"])
def test_a_pin_outlives_the_death_of_one_process(tmp_path: Path, victim: str) -> None:
    with Node(tmp_path, **TIGHT) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
            pinned = engine.group.pin(keys=engine.keys(1, BLOCKS), tier="nvme", owner="bob")
            assert pinned.recorded
        node.kill(victim)
        node.wait_ready()
        with StampedEngine(node.endpoint) as engine:
            fill(engine, first=100)
            assert engine.load(1, BLOCKS).right == BLOCKS
            assert [row.owner for row in engine.client.pins().rows] == ["bob"]


def test_a_pin_ends_by_itself_and_one_of_what_comes_later_holds_from_then_on(tmp_path: Path) -> None:
    with Node(tmp_path, **TIGHT) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            wish = token_file(tmp_path, 1, BLOCKS)
            (waiting,) = ask(node, "pin", "--model", "stamped", "--token-file", wish)["pins"]
            assert waiting["phase"] == "waiting"
            engine.store_flushed(2, BLOCKS)
            short = engine.group.pin(keys=engine.keys(2, BLOCKS), seconds=1.0)
            engine.store_flushed(1, BLOCKS)
            wait_until(lambda: short.pin not in [row.pin for row in engine.client.pins().rows], "it ends by itself")
            fill(engine, first=100, is_gone=2)
            assert engine.load(1, BLOCKS).right == BLOCKS
            assert ask(node, "pins")["pins"][0]["phase"] == "holds"


def test_pins_can_not_fill_a_tier_and_whoever_is_refused_is_told_who_has_it(tmp_path: Path) -> None:
    with Node(tmp_path, **TIGHT) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.group.pin(keys=engine.keys(1, 3 * BLOCKS), owner="ann")
            done = tierkv(
                "pin", "--endpoint", str(node.endpoint), "--model", "stamped",
                "--token-file", token_file(tmp_path, 2, 2 * BLOCKS),
            )  # fmt: skip
            assert done.returncode == 2
            assert "pins may hold 512.0 KiB of host" in done.stderr
            assert "ann 384.0 KiB" in done.stderr


def test_a_pin_whose_prefix_is_purged_says_so_also_after_a_restart(tmp_path: Path) -> None:
    with Node(tmp_path, **TIGHT) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            engine.store_flushed(1, BLOCKS)
            engine.group.pin(keys=engine.keys(1, BLOCKS))
        done = tierkv("purge", "--no-tenant", "--yes", "--endpoint", str(node.endpoint))
        assert done.returncode == 0, done.stderr
        assert [row["phase"] for row in ask(node, "pins")["pins"]] == ["purged"]
        node.kill("supervisor")
        node.start()
        assert [row["phase"] for row in ask(node, "pins")["pins"]] == ["purged"]


def test_an_asyncio_client_pins_as_a_blocking_one_does(tmp_path: Path) -> None:
    async def story(endpoint: Path, engine: StampedEngine) -> None:
        async with await aio.connect(endpoint) as client:
            group = await client.open(engine.group.identity, model_name="stamped")
            pinned = await group.pin(keys=engine.keys(1, BLOCKS), owner="cleo")
            assert pinned.recorded
            assert [row.pin for row in (await client.pins()).rows] == [pinned.pin]
            (over,) = await client.unpin(pin=pinned.pin)
            assert (over.owner, over.recorded) == ("cleo", False)
            assert (await client.pins()).rows == ()

    with Node(tmp_path, **TIGHT) as node:
        node.start()
        with StampedEngine(node.endpoint) as engine:
            asyncio.run(story(node.endpoint, engine))
